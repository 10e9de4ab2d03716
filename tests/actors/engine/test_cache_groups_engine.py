"""An engine of a model whose layers keep windows, latent vectors and states, with a worker in a child process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from actors.boards.stream_buffer import merge
from actors.engine.engine import Engine
from actors.engine.report import readings
from actors.protocol.requests import Delta, SamplingParams
from actors.requests.streams import RequestStream
from tests.kits.engines import rest, small_engine
from tests.kits.mixed_caches import install, make_mixed_model
from tests.kits.waiting import PATIENCE, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPT = "The quick brown fox jumps over the lazy dog. Once upon a time there was a king. " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixed_model(tmp_path_factory.mktemp("mixed") / "model", ("full", "window", "latent", "state"))


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(install(tmp_path_factory.mktemp("site") / "packages")))
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[Engine]:
    async with small_engine(model, page_size=4, chunked_prefill_size=32) as started:
        yield started


async def read(stream: RequestStream) -> Delta:
    async with asyncio.timeout(PATIENCE):
        return merge([delta async for delta in stream])


async def test_answers_are_those_without_a_prefix_cache(model: Path, engine: Engine) -> None:
    prompts = [PROMPT, PROMPT + "one two three", "What is the capital of France?"]
    async with small_engine(model, page_size=16, chunked_prefill_size=512, disable_radix_cache=True) as plain:
        expected = [(await read(plain.generate(prompt, GREEDY))).text for prompt in prompts]
        await rest(plain)
    first = [await read(engine.generate(prompt, GREEDY)) for prompt in prompts]
    again = await asyncio.gather(*(read(engine.generate(prompt, GREEDY)) for prompt in prompts))
    assert [delta.text for delta in first] == expected
    assert [delta.text for delta in again] == expected
    assert again[0].usage.cached_tokens > 0
    await rest(engine)
    usage = engine.board.cache()
    assert usage is not None
    assert [group.kind for group in usage.bounded] == ["window", "state"]
    assert all(group.used == 0 and group.evictable > 0 for group in usage.bounded)
    assert [group["kind"] for group in engine.describe()["cache"]["bounded"]] == ["window", "state"]
    pages = readings(engine)["troupe_cache_group_pages"]
    assert isinstance(pages, Mapping)
    assert pages["main", "evictable"] == usage.evictable
    assert sum(pages["window", state] for state in ("free", "evictable", "used")) == usage.bounded[0].total
    evicted = readings(engine)["troupe_cache_group_evicted_pages_total"]
    assert evicted == {(name,): group.evicted for name, group in usage.groups().items()}


async def test_a_stream_goes_on_after_its_worker_died(engine: Engine) -> None:
    expected = (await read(engine.generate("Once upon", LONG))).text
    stream = engine.generate("Once upon", LONG)
    buffer = stream._buffer
    reader = asyncio.create_task(read(stream))
    await until(lambda: buffer.output_tokens > 20, "it does not decode")
    os.kill(int(engine.describe()["workers"][0]["pid"] or 0), signal.SIGKILL)
    assert (await reader).text == expected
    await rest(engine)
