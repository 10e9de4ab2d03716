"""Ranking, scoring and classifying over HTTP, by a tiny encoder with and without a head, and by generating models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.options import Arguments
from app.application import Troupe, create_app
from kernels.contract.pooling import PoolingConfig
from tests.kits.engines import small_engine
from tests.kits.tiny_encoder import make_tiny_encoder

QUERY = "what is the capital of france"
DOCUMENTS = ["the quick brown fox", "the capital of france is paris", "one two three"]


async def post(application: Troupe, path: str, **body: Any) -> tuple[int, Any]:
    response = await application.test_client().post(path, json=body)
    return response.status_code, json.loads(await response.get_data())


def served(engine: Any, path: Path) -> Troupe:
    return create_app(
        Arguments(model_path=str(path), served_model_name=("tiny",), skip_server_warmup=True), engine=engine
    )


async def test_a_cross_encoder_ranks_scores_and_classifies(tmp_path: Path) -> None:
    model: Any = make_tiny_encoder(tmp_path, labels=1)
    async with small_engine(tmp_path) as engine:
        application, expected = served(engine, tmp_path), []
        for document in DOCUMENTS:
            ids, second = await engine.tokenize_pair(QUERY, document)
            types = torch.tensor([[int(place >= second) for place in range(len(ids))]])
            expected.append(float(model(torch.tensor([ids]), token_type_ids=types).logits[0, 0].sigmoid()))
        best = sorted(range(3), key=lambda index: -expected[index])
        for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
            status, answer = await post(
                application, path, query=QUERY, documents=[*DOCUMENTS[:2], {"text": DOCUMENTS[2]}]
            )
            assert status == 200
            assert [one["index"] for one in answer["results"]] == best
            found = [one["relevance_score"] for one in answer["results"]]
            assert found == pytest.approx([expected[index] for index in best], abs=1e-5)
            documents = [one.get("document") for one in answer["results"]]
            assert documents == ([None] * 3 if path == "/v2/rerank" else [{"text": DOCUMENTS[i]} for i in best])
        _, answer = await post(
            application, "/rerank", query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False
        )
        assert [sorted(one) for one in answer["results"]] == [["index", "relevance_score"]]
        _, answer = await post(application, "/score", text_1=QUERY, text_2=DOCUMENTS)
        assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-5)
        ids = await engine.tokenize(DOCUMENTS[0])
        logit = float(model(torch.tensor([ids])).logits[0, 0])
        chance = 1 / (1 + math.exp(-logit))
        _, answer = await post(application, "/classify", input=[DOCUMENTS[0], ids])
        assert [one["probs"] for one in answer["data"]] == [pytest.approx([chance], abs=1e-5)] * 2
        assert answer["data"][0]["label"] == "LABEL_0"
        _, answer = await post(application, "/classify", text=DOCUMENTS[0], activation=False)
        assert answer["embedding"] == pytest.approx([logit], abs=1e-4)
        _, answer = await post(application, "/encode", input_ids=[ids, ids])
        assert [one["embedding"] for one in answer] == [pytest.approx([logit], abs=1e-4)] * 2
        _, answer = await post(application, "/pooling", input=DOCUMENTS[0], activation=False)
        assert answer["data"][0]["data"] == pytest.approx([logit], abs=1e-4)
        for path, body in (
            ("/v1/embeddings", {"input": "x"}),
            ("/pooling", {"input": "x", "task": "embed"}),
            ("/v1/score", {"query": "x", "items": ["y"], "label_token_ids": [5]}),
        ):
            status, answer = await post(application, path, **body)
            assert (status, answer["error"]["code"]) == (400, "model_not_supported")
        status, answer = await post(application, "/v1/completions", prompt="x", max_tokens=1)
        assert (status, answer["error"]["code"]) == (400, "unsupported_task")


async def test_embeddings_rank_by_their_cosine(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path)
    async with small_engine(tmp_path) as engine:
        application = served(engine, tmp_path)
        query, *documents = [torch.tensor(await engine.embed(text)) for text in (QUERY, *DOCUMENTS)]
        expected = [float(query @ one) for one in documents]
        _, answer = await post(application, "/v1/score", text_1=[QUERY] * 3, text_2=DOCUMENTS)
        assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-5)
        _, answer = await post(application, "/v1/embeddings", input=DOCUMENTS)
        vectors = [one["embedding"] for one in answer["data"]]
        _, answer = await post(application, "/pooling", input=DOCUMENTS)
        assert [one["data"] for one in answer["data"]] == [pytest.approx(one, abs=1e-6) for one in vectors]
        _, answer = await post(application, "/pooling", input=DOCUMENTS[0], dimensions=4)
        assert len(answer["data"][0]["data"]) == 4


async def test_a_generating_model_scores_labels(tiny_model: Path) -> None:
    async with small_engine(tiny_model) as engine:
        application = served(engine, tiny_model)
        ids = {"query": [7, 8], "items": [[9], [10, 11]], "label_token_ids": [5, 9]}
        _, plain = await post(application, "/v1/score", **ids)
        _, among = await post(application, "/v1/score", **ids, apply_softmax=True)
        for whole, part in zip(plain["scores"], among["scores"], strict=True):
            assert part == pytest.approx([one / sum(whole) for one in whole], rel=1e-4)
            assert sum(whole) < 1
        _, turned = await post(application, "/v1/score", **{**ids, "query": [9], "items": [[7, 8]]}, item_first=True)
        assert turned["scores"][0] == pytest.approx(plain["scores"][0], rel=1e-4)
        status, answer = await post(application, "/v1/rerank", query="a", documents=["b"])
        assert (status, answer["error"]["code"]) == (400, "model_not_supported")
        assert "Qwen3-Reranker" in answer["error"]["message"]


async def test_cohere_gets_errors_in_its_form(application: Troupe) -> None:
    status, answer = await post(application, "/v2/rerank", query="a", documents=[])
    assert (status, sorted(answer)) == (400, ["id", "message"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rerank", {"query": "a", "documents": ["x"] * 2049}, "documents"),
        ("/rerank", {"query": "a", "documents": ["x"], "instruction": "i"}, "instruction"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"label_token_ids": [1], "query": "a"}, "items"),
        ("/classify", {}, "text"),
        ("/classify", {"text": "a", "input_ids": [1]}, "text"),
        ("/encode", {"input_ids": []}, "input_ids"),
        ("/pooling", {"input": "a", "dimensions": 2}, "dimensions"),
    ],
)
async def test_a_wrong_field_is_named(
    make_application: Callable[..., Troupe], path: str, body: Any, param: str
) -> None:
    application = make_application()
    engine: Any = application.engine
    head = PoolingConfig("classify", "cls", labels=("LABEL_0",), activation="sigmoid", encoder=True)
    engine.model_info = SimpleNamespace(pooling=head, hidden_size=3)
    status, answer = await post(application, path, **body)
    assert (status, answer["error"]["param"]) == (400, param)
