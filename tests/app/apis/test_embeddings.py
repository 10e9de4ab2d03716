"""``/v1/embeddings``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest

from app.apis.embeddings.handlers import cut_all
from app.application import Troupe
from kernels.contract.pooling import DenseConfig, PoolingConfig

Serve = Callable[[Troupe], Awaitable[str]]


async def post(application: Troupe, **body: Any) -> tuple[int, Any]:
    response = await application.test_client().post("/v1/embeddings", json=body)
    return response.status_code, json.loads(await response.get_data())


async def test_the_sdk_gets_vectors_in_the_order_of_inputs(
    make_application: Callable[..., Troupe], serve: Serve
) -> None:
    application = make_application(is_embedding=True)
    client = openai.AsyncOpenAI(base_url=await serve(application) + "/v1", api_key="none", max_retries=0)
    answer = await client.embeddings.create(input=["ab", "c"], model="fake")
    assert [one.index for one in answer.data] == [0, 1]
    assert answer.data[0].embedding == pytest.approx([0.6, 0.0, 0.8])
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 3)
    many = await client.embeddings.create(input=["x"] * 2048, model="fake", encoding_format="float", dimensions=1)
    assert [one.embedding for one in many.data] == [[1.0]] * 2048
    for ids in ([1, 2], [[1, 2], [3]]):
        assert (await client.embeddings.create(input=ids, model="fake")).usage.prompt_tokens == sum(
            len(one) if isinstance(one, list) else 1 for one in ids
        )
    await client.close()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ["x"] * 2049}, "input"),
        ({"input": ["x", 5]}, "input"),
        ({"input": ""}, "input"),
        ({"input": "x", "dimensions": 4}, "dimensions"),
    ],
)
async def test_a_wrong_field_is_named(make_application: Callable[..., Troupe], body: Any, param: str) -> None:
    status, answer = await post(make_application(is_embedding=True), **body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_too_many_dimensions_are_refused_before_inputs_run(make_application: Callable[..., Troupe]) -> None:
    application = make_application(is_embedding=True)
    engine: Any = application.engine
    engine.model_info = SimpleNamespace(hidden_size=3, pooling=None)
    status, answer = await post(application, input="x", dimensions=4)
    assert (status, answer["error"]["param"]) == (400, "dimensions")
    assert not engine.streams
    assert (await post(application, input="x", dimensions=3))[0] == 200
    for pooling in (
        PoolingConfig("embed", "mean", dense=(DenseConfig("2_Dense", 3, 2),)),
        PoolingConfig("embed", "end", projected=2),
    ):
        engine.model_info = SimpleNamespace(hidden_size=3, pooling=pooling)
        status, answer = await post(application, input="x", dimensions=3)
        assert (status, "have 2 numbers" in answer["error"]["message"]) == (400, True)


async def test_others_run_between_two_vectors() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    found = [(np.ones(4, np.float32), 1)] * 50
    assert len([vector async for vector in cut_all(found, 2)]) == 50
    counting.cancel()
    assert turns >= 49


async def test_a_generative_model_is_refused(application: Troupe) -> None:
    status, answer = await post(application, input="x")
    assert (status, answer["error"]["code"]) == (400, "model_not_supported")
    assert "--is-embedding" in answer["error"]["message"]
