"""Pauses of generation, and requests that wait too long, with a real worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from actors.boards.stream_buffer import merge
from actors.engine.engine import Engine
from actors.protocol.requests import Delta, RequestAborted, SamplingParams, WaitedTooLong
from actors.requests.streams import RequestStream
from tests.kits.engines import small_engine
from tests.kits.waiting import PATIENCE, until

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPTS = [f"{number} foxes jump over the dog" for number in range(4)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path) -> AsyncIterator[Engine]:
    async with small_engine(tiny_model) as started:
        yield started


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def whole(stream: RequestStream) -> Delta:
    return merge([delta async for delta in stream])


async def under_way(engine: Engine) -> list[asyncio.Task[Delta]]:
    streams = [engine.generate(prompt, LONG) for prompt in PROMPTS]
    buffers = [stream._buffer for stream in streams]
    tasks = [asyncio.create_task(whole(stream)) for stream in streams]
    await until(lambda: all(buffer.output_tokens for buffer in buffers), "they do not decode")
    return tasks


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_stops_all_steps_and_changes_no_token(engine: Engine, mode: str) -> None:
    expected = [(await whole(engine.generate(prompt, LONG))).token_ids for prompt in PROMPTS]
    readers = await under_way(engine)
    await engine.pause_generation(mode)  # type: ignore[arg-type]
    steps, load = engine.board.steps, engine.board.scheduler
    assert load is not None
    assert (load.paused, load.steps_in_flight) == (True, 0)
    assert (load.running, load.waiting) == ((4, 0) if mode == "in_place" else (0, 4))
    assert await engine.flush_cache() == (mode == "retract")
    late = asyncio.create_task(whole(engine.generate("late", LONG)))
    await until(lambda: engine.loads()[0].num_total_reqs == 5, "the late request was not queued")
    assert (engine.board.steps, engine.health().ok) == (steps, True)
    assert not any(reader.done() for reader in readers)
    await engine.continue_generation()
    assert [(await reader).token_ids for reader in readers] == expected
    assert len((await late).token_ids) == 200


async def test_a_pause_may_abort_and_outlives_the_scheduler(engine: Engine) -> None:
    readers = await under_way(engine)
    await engine.pause_generation()
    for reader in readers:
        with pytest.raises(RequestAborted):
            await reader
    system = engine._system
    assert system is not None
    waiting = asyncio.create_task(whole(engine.generate("later", LONG)))
    await until(lambda: engine.loads()[0].num_waiting_reqs == 1, "it does not wait")
    scheduler = engine._schedulers()[0]
    system.crash_actor(scheduler, RuntimeError("a fault"))
    await until(lambda: next(a for a in engine.actors() if a.name == "scheduler").incarnation, "it did not restart")
    await engine.pause_generation("in_place")  # is answered by the new one
    assert engine.loads()[0].paused
    await engine.continue_generation()
    assert len((await waiting).token_ids) == 200


async def test_a_drain_ends_a_pause(tiny_model: Path) -> None:
    async with small_engine(tiny_model) as engine:
        readers = await under_way(engine)
        await engine.pause_generation("in_place")
        assert await engine.drain(60.0)
        assert [len((await reader).token_ids) for reader in readers] == [200] * 4


async def test_requests_that_wait_too_long_end(tiny_model: Path) -> None:
    async with small_engine(tiny_model, max_running_requests=1, request_waiting_timeout=PATIENCE) as engine:
        ahead = engine.generate(PROMPTS[0], LONG)
        first = await anext(ahead)
        assert engine.intake is not None
        engine.intake._arguments = msgspec.structs.replace(engine.arguments, request_waiting_timeout=0.001)
        with pytest.raises(WaitedTooLong):
            await whole(engine.generate(PROMPTS[1], LONG))
        assert len(first.token_ids) + len((await whole(ahead)).token_ids) == 200
