"""Several faults: by chance, at the same moment, during the recovery from another, and more than the engine bears."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from actors.faults import Fault
from actors.protocol import LoadProgress
from actors.protocol.requests import Chat, EngineFailed, SamplingParams
from actors.runtime import Message
from tests.kits.breaking import Reading, Rig, breakable
from tests.kits.waiting import PATIENCE, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]

PARAMS = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
CHAT = Chat(messages=[{"role": "user", "content": "one two three " * 12}])
REQUESTS: list[tuple[Any, SamplingParams]] = [
    ("Once upon a time", PARAMS),
    ("The lazy dog", msgspec.structs.replace(PARAMS, repetition_penalty=1.5, presence_penalty=0.5, stop=("never",))),
    (list(range(10, 90)), msgspec.structs.replace(PARAMS, temperature=1.1, top_p=0.95, seed=5, n=2)),
    ([7, 8, 9], msgspec.structs.replace(PARAMS, logprobs=2, frequency_penalty=1.0)),
    (CHAT, PARAMS),
]
Expected = list[tuple[dict[int, list[int]], dict[int, str]]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tiny_model: Path) -> AsyncIterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        async with breakable(tiny_model, patch, watchdog_timeout=5.0) as made:
            yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(rig: Rig) -> Expected:
    """Tokens and texts by choice."""
    readings = [await rig.read(prompt, params) for prompt, params in REQUESTS]
    return [(reading.tokens, reading.texts) for reading in readings]


def crash(rig: Rig, *actors: str) -> None:
    assert rig.engine._system is not None
    for actor in actors:
        rig.engine._system.crash_actor(actor, RuntimeError("injected"))


async def live(rig: Rig) -> tuple[list[Reading], list[asyncio.Task[Reading]]]:
    """Requests that decode, and one on its way in."""
    *now, later = REQUESTS
    started = [rig.start(prompt, params) for prompt, params in now]
    await until(lambda: all(reading.count >= 5 for reading, _ in started), "they do not decode")
    started.append(rig.start(*later))
    return [reading for reading, _ in started], [task for _, task in started]


async def all_whole(rig: Rig, readings: list[Reading], expected: Expected) -> None:
    for reading, whole in zip(readings, expected, strict=True):
        assert reading.error is None
        assert (reading.tokens, reading.texts) == whole
    await rig.rest()
    rig.forgive()


# -- by chance


@pytest.mark.parametrize("seed", range(8))
async def test_a_storm_loses_and_alters_nothing(rig: Rig, expected: Expected, seed: int) -> None:
    rng = random.Random(seed)
    readings, tasks = await live(rig)
    for _ in range(rng.randint(2, 4)):
        what = rng.choice(["kill", "exception", "corrupt", "duplicate", "late", "scheduler", "cache", "detokenizer"])
        if what in ("kill", "exception"):
            rig.plan.add(Fault(rng.choice(["decode", "prefill"]), what, nth=rng.randint(1, 20)))  # type: ignore[arg-type]
        elif what in ("corrupt", "duplicate", "late"):
            rig.wire.arm("worker-0", what, seconds=0.2)
        else:
            crash(rig, what)
        await asyncio.sleep(rng.choice([0.0, 0.02, 0.3]))
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
    rig.plan.clear()
    rig.wire._armed.clear()
    await all_whole(rig, readings, expected)


# -- at the same moment


@pytest.mark.parametrize(
    "victims",
    [
        ("worker-0", "scheduler"),
        ("worker-0", "detokenizer"),
        ("scheduler", "detokenizer"),
        ("worker-0", "renderer-0", "tokenizer-0"),
        ("worker-0", "scheduler", "cache", "detokenizer", "tokenizer-0", "renderer-0"),
    ],
)
async def test_faults_at_the_same_moment(rig: Rig, expected: Expected, victims: tuple[str, ...]) -> None:
    readings, tasks = await live(rig)
    crash(rig, *victims)
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
    await all_whole(rig, readings, expected)


# -- during a recovery


async def test_the_next_worker_dies_before_it_has_loaded(rig: Rig, expected: Expected) -> None:
    """That is no death with a request in the batch: no request is quarantined for it."""
    readings, tasks = await live(rig)
    first = rig.worker_pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: rig.worker_pid not in (0, first), "no next worker")
    os.kill(rig.worker_pid, signal.SIGKILL)
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
    await all_whole(rig, readings, expected)


async def test_the_next_worker_is_stopped_while_it_loads(
    rig: Rig, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It owes no answer to anything, so that only its silence shows that it hangs."""
    assert rig.engine._system is not None
    cell = rig.engine._system._cells["worker-0"]
    emit, stopped = cell.emit, list[int]()

    def stop(message: Message[Any, None]) -> None:
        if not stopped and isinstance(message, LoadProgress):
            stopped.append(rig.worker_pid)
            os.kill(stopped[0], signal.SIGSTOP)
        emit(message)

    readings, tasks = await live(rig)
    monkeypatch.setattr(cell, "emit", stop)
    os.kill(rig.worker_pid, signal.SIGKILL)
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
    assert stopped
    await all_whole(rig, readings, expected)


async def test_a_worker_dies_with_the_one_that_is_prepared_to_follow_it(rig: Rig, expected: Expected) -> None:
    readings, tasks = await live(rig)
    assert rig.engine._system is not None
    standby = rig.engine._system._cells["worker-0"].standby
    assert standby is not None
    await until(lambda: standby.pid, "no standby")
    for pid in (standby.pid, rig.worker_pid):
        assert pid
        os.kill(pid, signal.SIGKILL)
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
    await all_whole(rig, readings, expected)


@pytest.mark.parametrize("victim", ["scheduler", "cache", "detokenizer"])
async def test_an_actor_dies_while_the_worker_is_away(rig: Rig, expected: Expected, victim: str) -> None:
    readings, tasks = await live(rig)
    os.kill(rig.worker_pid, signal.SIGKILL)
    await until(lambda: rig.engine.board.worker is None, "the worker is still alive")
    crash(rig, victim)
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
    await all_whole(rig, readings, expected)


async def test_the_detokenizer_dies_of_what_a_new_scheduler_waits_for(rig: Rig, expected: Expected) -> None:
    """The scheduler asks the fence as it starts; the one who should answer dies of the message before it."""
    readings, tasks = await live(rig)
    rig.plan.add(Fault("detokenize", "exception", nth=1))
    crash(rig, "scheduler")
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
    rig.plan.clear()
    await all_whole(rig, readings, expected)


async def test_the_worker_dies_again_while_a_drain_waits(rig: Rig, expected: Expected) -> None:
    readings, tasks = await live(rig)
    await until(lambda: readings[-1].count >= 1, "it does not decode")
    drain = asyncio.create_task(rig.engine.drain(PATIENCE))
    rig.plan.add(Fault("decode", "kill", nth=2))
    await until(lambda: rig.plan.pending() == 0, "no worker died")
    await until(lambda: rig.engine.board.worker is None, "the worker is still alive")
    crash(rig, "scheduler", "detokenizer")
    assert await drain is True
    await asyncio.gather(*tasks)
    rig.engine.lifecycle.phase = "ready"
    await all_whole(rig, readings, expected)


# -- more than it bears


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer", "tokenizer-0"])
async def test_an_actor_that_keeps_dying_ends_the_engine(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    async with breakable(tiny_model, monkeypatch) as rig:
        reading, task = rig.start("Once upon", SamplingParams(temperature=0, max_tokens=450, ignore_eos=True))
        await until(lambda: reading.count > 0, "it does not decode")
        assert rig.engine._system is not None
        (cell,) = [cell for cell in rig.engine._system._cells.values() if cell.name == victim]
        unit = cell.group if cell.supervision.restarts_group and cell.group is not None else None
        history = cell.restarts if unit is None else unit._restarts
        history.extend([rig.engine._system.clock.monotonic()] * 5)
        crash(rig, victim)
        await until(lambda: rig.engine.status.phase == "failed", "it goes on")
        assert victim in (rig.engine.status.error or "")
        assert not rig.engine.health().ok
        with pytest.raises(EngineFailed, match=victim):
            rig.engine.generate("Once upon", PARAMS)
        await task
        assert isinstance(reading.error, EngineFailed)
        assert victim in str(reading.error)
