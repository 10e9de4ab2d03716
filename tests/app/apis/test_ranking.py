"""Ranking, scoring and classifying over HTTP, by a tiny encoder with and without a head, and by generating models."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from actors.options import Arguments
from actors.protocol.requests import EngineFailed, QueueFull, RequestTimeout
from app.application import Troupe, create_app
from app.server.request_body import MAX_BODY
from kernels.contract.pooling import PoolingConfig
from tests.kits.engines import small_engine
from tests.kits.tiny_encoder import make_tiny_encoder
from tests.kits.tiny_model import make_tiny_model
from tests.kits.tiny_modernbert import make_tiny_modernbert
from tests.kits.trained_encoder import SUBJECTS, make_trained_encoder, sentence

pytestmark = pytest.mark.usefixtures("warm_workers")

QUERY = "what is the capital of france"
HEAD = PoolingConfig("classify", "cls", labels=("LABEL_0",), activation="sigmoid", encoder=True)
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
        _, answer = await post(
            application, "/v2/rerank", query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=True
        )
        assert [one["document"] for one in answer["results"]] == [{"text": DOCUMENTS[best[0]]}]
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


@pytest.mark.parametrize("pooling", ["cls", "mean"])
async def test_modernbert_ranks_by_either_pooling(tmp_path: Path, pooling: str) -> None:
    model = make_tiny_modernbert(tmp_path, labels=1, classifier_pooling=pooling)
    async with small_engine(tmp_path) as engine:
        expected = []
        for document in DOCUMENTS:
            ids, _ = await engine.tokenize_pair(QUERY, document)
            expected.append(float(model(torch.tensor([ids])).logits[0, 0].sigmoid()))
        status, answer = await post(served(engine, tmp_path), "/v1/rerank", query=QUERY, documents=DOCUMENTS)
        assert status == 200
        scores = {one["index"]: one["relevance_score"] for one in answer["results"]}
        assert [scores[index] for index in range(3)] == pytest.approx(expected, abs=1e-5)
        assert list(scores) == sorted(range(3), key=lambda index: -expected[index])


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
        for form in ({"text": DOCUMENTS[0]}, {"input": DOCUMENTS[0]}):
            status, answer = await post(application, "/classify", **form)
            assert (status, answer["error"]["code"]) == (400, "model_not_supported")
        status, answer = await post(application, "/pooling", input=DOCUMENTS[0], task="token_embed")
        assert (status, answer["error"]["param"]) == (400, "task")
        assert "'token_embed' is not run" in answer["error"]["message"]


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


async def test_a_delimiter_stands_between_query_and_items(tiny_model: Path) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    query, items, labels = list(range(10, 50)), [[9], [10, 11], [12, 9, 13]], [5, 9]
    options = {"model_path": str(tiny_model), "served_model_name": ("tiny",), "skip_server_warmup": True}
    async with small_engine(tiny_model) as engine:
        application = create_app(Arguments(**options, multi_item_scoring_delimiter=33), engine=engine)
        _, found = await post(application, "/v1/score", query=query, items=items, label_token_ids=labels)
        for item, scores in zip(items, found["scores"], strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([[*query, 33, *item]])).logits[0, -1]
            assert scores == pytest.approx(logits.softmax(-1)[labels].tolist(), rel=1e-3)
        texts = {"query": await engine.detokenize(query), "items": [await engine.detokenize(one) for one in items]}
        mark = await engine.detokenize([33])
        _, found = await post(application, "/v1/score", **texts, label_token_ids=labels)
        plain = served(engine, tiny_model)
        joined = {"query": texts["query"] + mark, "items": texts["items"], "label_token_ids": labels}
        _, same = await post(plain, "/v1/score", **joined)
        assert found["scores"] == same["scores"]
        status, answer = await post(
            application, "/v1/score", query=query, items=items, label_token_ids=labels, item_first=True
        )
        assert (status, answer["error"]["param"]) == (400, "item_first")
        far = create_app(Arguments(**options, multi_item_scoring_delimiter=10**6), engine=engine)
        status, answer = await post(far, "/v1/score", query=query, items=items, label_token_ids=labels)
        assert status == 400
        assert "is no token of its model" in answer["error"]["message"]


async def test_a_trained_model_ranks_what_is_related_first(tmp_path: Path) -> None:
    """Query and related document have no subject's word in common."""
    make_trained_encoder(tmp_path)
    choose, subjects = random.Random(99), list(SUBJECTS)
    documents = [sentence(subject, 1, choose) for subject in subjects]
    async with small_engine(tmp_path) as engine:
        application = served(engine, tmp_path)
        for index, subject in enumerate(subjects):
            status, answer = await post(
                application, "/v1/rerank", query=sentence(subject, 0, choose), documents=documents
            )
            assert status == 200
            assert answer["results"][0]["index"] == index
        _, answer = await post(application, "/v1/embeddings", input=[sentence("sea", half, choose) for half in (0, 1)])
        first, second = (torch.tensor(one["embedding"]) for one in answer["data"])
        assert float(first @ second) > 0.5


async def test_prompts_are_named_and_those_of_ranking_are_chosen(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path)
    prompts = {"prompts": {"query": "what is ", "passage": "the lazy "}}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    async with small_engine(tmp_path) as engine:
        application = served(engine, tmp_path)
        query, plain = torch.tensor(await engine.embed("what is paris")), await engine.embed("paris")
        for path, field in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
            _, answer = await post(application, path, input="paris", prompt_name="query")
            assert answer["data"][0][field] == pytest.approx(query.tolist(), abs=1e-6)
            _, answer = await post(application, path, input="paris")
            assert answer["data"][0][field] == pytest.approx(plain, abs=1e-6)
            status, answer = await post(application, path, input="paris", prompt_name="banana")
            assert (status, answer["error"]["param"]) == (400, "prompt_name")
        _, answer = await post(application, "/rerank", query="paris", documents=["dog"])
        document = torch.tensor(await engine.embed("the lazy dog"))
        assert answer["results"][0]["relevance_score"] == pytest.approx(float(query @ document), abs=1e-5)


async def test_inputs_and_pairs_are_cut_to_what_fits(tmp_path: Path) -> None:
    model: Any = make_tiny_encoder(tmp_path, labels=1)
    long = "one two three four five six " * 15
    async with small_engine(tmp_path) as engine:
        application = served(engine, tmp_path)
        body = {"text_1": QUERY, "text_2": long}
        status, answer = await post(application, "/v1/score", **body)
        assert (status, answer["error"]["param"]) == (400, "text_2")
        for most, length in ((-1, 64), (20, 20)):
            _, answer = await post(application, "/v1/score", **body, truncate_prompt_tokens=most)
            own = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
            own.enable_truncation(length)
            pair = own.encode(QUERY, long)
            types = torch.tensor([pair.type_ids])
            expected = model(torch.tensor([pair.ids]), token_type_ids=types).logits[0, 0].sigmoid().item()
            assert answer["data"][0]["score"] == pytest.approx(expected, abs=1e-5)
            assert answer["usage"]["prompt_tokens"] == length
        for path in ("/classify", "/pooling"):
            status, answer = await post(application, path, input=long, truncate_prompt_tokens=12)
            assert (status, answer["usage"]["prompt_tokens"]) == (200, 12)
            status, answer = await post(application, path, input=long, truncate_prompt_tokens=65)
            assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_vectors_that_are_not_of_length_1_are_cut_only(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path)
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in
               (("", "Transformer"), ("1_Pooling", "Pooling"))]  # fmt: skip
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    async with small_engine(tmp_path) as engine:
        application = served(engine, tmp_path)
        for path, field in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
            _, answer = await post(application, path, input="paris")
            whole = answer["data"][0][field]
            assert float(torch.tensor(whole).norm()) > 2
            _, answer = await post(application, path, input="paris", dimensions=4)
            assert answer["data"][0][field] == pytest.approx(whole[:4], abs=1e-6)


async def test_a_request_of_many_inputs_fits_a_short_queue(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path)
    async with small_engine(tmp_path, max_running_requests=2, max_queued_requests=1) as engine:
        arguments = Arguments(
            model_path=str(tmp_path), served_model_name=("tiny",), skip_server_warmup=True, max_running_requests=2,
            max_queued_requests=1,
        )  # fmt: skip
        application = create_app(arguments, engine=engine)
        status, answer = await post(application, "/v1/embeddings", input=["paris"] * 20)
        assert (status, len(answer.get("data", []))) == (200, 20)


async def test_qwen3_reranker_answers_yes_or_no(tmp_path: Path) -> None:
    """Its own prompt, and the chance of yes among yes and no."""
    path = tmp_path / "Qwen3-Reranker-tiny"
    make_tiny_model(path, max_position_embeddings=2048)
    words = json.loads((path / "tokenizer.json").read_text())
    words["added_tokens"] += [
        {"id": token, "content": word, "special": False, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False} for token, word in ((382, "yes"), (383, "no"))
    ]  # fmt: skip
    kept = {word: token for word, token in words["model"]["vocab"].items() if token < 382}
    words["model"] |= {"vocab": kept, "merges": [
        pair for pair in words["model"]["merges"] if "".join(pair) in kept
    ]}  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(words))
    model: Any = transformers.Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    own = Tokenizer.from_file(str(path / "tokenizer.json"))
    task, documents = "Given a web search query, retrieve relevant passages that answer the query", DOCUMENTS
    async with small_engine(path) as engine:
        application = served(engine, path)
        for instruction in (None, "Find what is quick"):
            expected = []
            for document in documents:
                text = (
                    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
                    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
                    f"<Instruct>: {instruction or task}\n<Query>: {QUERY}\n<Document>: {document}<|im_end|>\n"
                    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
                )
                with torch.inference_mode():
                    logits = model(torch.tensor([own.encode(text).ids])).logits[0, -1]
                expected.append(float(logits[[382, 383]].softmax(0)[0]))
            body = {} if instruction is None else {"instruction": instruction}
            _, answer = await post(application, "/v1/rerank", query=QUERY, documents=documents, **body)
            found = {one["index"]: one["relevance_score"] for one in answer["results"]}
            assert [found[index] for index in range(3)] == pytest.approx(expected, abs=1e-4)
        _, answer = await post(application, "/v1/score", text_1=QUERY, text_2=documents)
        assert len(answer["data"]) == 3
        status, answer = await post(
            application, "/v1/rerank", query=QUERY, documents=documents, truncate_prompt_tokens=9
        )
        assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")


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
    engine.model_info = SimpleNamespace(pooling=HEAD, hidden_size=3)
    status, answer = await post(application, path, **body)
    assert (status, answer["error"]["param"]) == (400, param)


PATHS: dict[str, dict[str, Any]] = {
    **{path: {"query": "a", "documents": ["b"]} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    **{path: {"text_1": "a", "text_2": "b"} for path in ("/score", "/v1/score")},
    "/classify": {"text": "a"},
    "/pooling": {"input": "a"},
    "/encode": {"text": "a"},
    "/v1/embeddings": {"input": "a"},
}


def embedding(make_application: Callable[..., Troupe], **arguments: Any) -> tuple[Troupe, Any]:
    """An application of a fake embedding model, and its engine."""
    application = make_application(is_embedding=True, **arguments)
    engine: Any = application.engine
    engine.model_info = SimpleNamespace(pooling=PoolingConfig("embed", "cls", encoder=True), hidden_size=3)
    return application, engine


def of_cohere(answer: Any) -> bool:
    return sorted(answer) == ["id", "message"]


@pytest.mark.parametrize("path", PATHS)
async def test_refusals_have_the_form_of_their_api(make_application: Callable[..., Troupe], path: str) -> None:
    application, engine = embedding(make_application, api_key="secret,other")
    if path == "/classify":
        engine.model_info = SimpleNamespace(pooling=HEAD, hidden_size=3)
    client, cohere = application.test_client(), path == "/v2/rerank"
    key = {"Authorization": "Bearer secret"}

    async def refused(status: int, headers: dict[str, str] = key, **body: Any) -> Any:
        response = await client.post(path, json=PATHS[path] | body, headers=headers)
        answer = json.loads(await response.get_data())
        assert (response.status_code, of_cohere(answer)) == (status, cohere)
        return response

    await refused(401, {})
    await refused(401, {"Authorization": "Bearer wrong"})
    assert (await client.post(path, json=PATHS[path], headers=key)).status_code == 200
    assert engine.streams[-1].tenant
    if path != "/encode":
        await refused(404, model="banana")
    engine.admission_error = QueueFull("the queue is full", retry_after=5.0)
    assert (await refused(429)).headers["Retry-After"] == "5"
    engine.admission_error, engine.ready_error = None, RequestTimeout("it took too long")
    await refused(504)
    engine.ready_error = EngineFailed("it has failed")
    await refused(503)
    engine.begin_drain()
    await refused(503)


async def test_a_body_over_the_limit_is_refused_in_coheres_form(make_application: Callable[..., Troupe]) -> None:
    application, _ = embedding(make_application)
    response = await application.test_client().post(
        "/v2/rerank", data=b" " * (MAX_BODY + 1), headers={"Content-Type": "application/json"}
    )
    assert (response.status_code, of_cohere(json.loads(await response.get_data()))) == (413, True)


async def test_the_inputs_of_a_client_that_has_left_are_aborted(
    make_application: Callable[..., Troupe], serve: Any, until: Any
) -> None:
    application, engine = embedding(make_application)
    engine.tokenizing = asyncio.Event()
    async with httpx.AsyncClient(base_url=await serve(application)) as client:
        body = {"query": "a", "documents": ["b", "c"]}
        asking = asyncio.create_task(client.post("/v1/rerank", json=body))
        await until(lambda: len(engine.streams) == 3)
        asking.cancel()
        await until(lambda: all(stream.closed for stream in engine.streams))
    assert all(stream.aborted.is_set() for stream in engine.streams)


@pytest.mark.parametrize(("falls", "expected"), [(False, -7), (True, 7)])
async def test_coheres_lowest_priority_is_the_highest_here(
    make_application: Callable[..., Troupe], falls: bool, expected: int
) -> None:
    application, engine = embedding(
        make_application, enable_priority_scheduling=True, schedule_low_priority_values_first=falls
    )
    status, _ = await post(application, "/v2/rerank", query="a", documents=["b"], priority=7)
    assert (status, {one["priority"] for one in engine.requests}) == (200, {expected})


async def test_each_task_is_counted_by_its_own_operation(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path, labels=1)
    async with small_engine(tmp_path) as engine:
        application = served(engine, tmp_path)
        await post(application, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
        await post(application, "/classify", input=DOCUMENTS)
        await post(application, "/v1/score", text_1=QUERY, text_2=DOCUMENTS[0])
        await post(application, "/pooling", input=DOCUMENTS[:2])
        text = (await (await application.test_client().get("/metrics")).get_data()).decode()
    for operation in ("rerank", "classify", "score", "embeddings"):
        label = f'gen_ai_operation_name="{operation}"'
        assert any(label in line for line in text.splitlines() if "duration" in line), operation
    for path in ("/v1/rerank", "/classify", "/v1/score", "/pooling"):
        assert any(f'"{path}"' in line for line in text.splitlines()), path
