"""Every fault at every stage of a request's way. Whatever breaks: each request ends exactly once, the streams beside it
say what they would have said, with their adapters, and nothing is left over.

The table below says what becomes of the request that the fault is meant for, and why a fault cannot be where it is not
tried.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from actors.faults import Fault
from actors.protocol.requests import Chat, EngineDraining, RequestTimeout, SamplingParams
from actors.text.detokenizer import Detokenizer
from tests.kits.adapters import adapted_modules, save_adapter
from tests.kits.breaking import Reading, Rig, breakable
from tests.kits.waiting import PATIENCE, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]

BESIDE = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
VICTIM = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=440, ignore_eos=True)
PROMPTS = ["Once upon a time", "The lazy dog", list(range(10, 60))]
ADAPTERS = [None, "first", None]
"""Of ``PROMPTS``. The victim's is another."""
CHAT = Chat(messages=[{"role": "user", "content": "What is the capital of France? one two three four five six " * 3}])

IN_THE_LOOP = "no frame of a child carries this stage: its actor lives in the engine's own loop"
NO_AWAIT = "its handler awaits nothing: what hangs there is the engine's loop, and /live says so to its manager"

WHOLE, FAILS, LEFT, LATE, CUT = "goes on", "fails alone", "its reader left", "its time is over", "cut by the deadline"

STAGES = ("render", "admission", "queue", "prefill", "decode", "detokenize", "stream", "drain")
WIRE = ("dropped", "duplicate", "late", "corrupt")
EXPECTED: dict[str, dict[str, str]] = {
    "exception": dict.fromkeys(STAGES, WHOLE) | {"admission": FAILS, "stream": FAILS},
    "memory": dict.fromkeys(STAGES, WHOLE) | {"render": FAILS, "admission": FAILS, "stream": FAILS},
    "device_memory": {"prefill": WHOLE, "decode": WHOLE},
    "hang": dict.fromkeys(STAGES, WHOLE) | {"admission": LATE, "detokenize": NO_AWAIT, "stream": LEFT, "drain": CUT},
    "kill": dict.fromkeys(STAGES, WHOLE),
    "slow": dict.fromkeys(STAGES, WHOLE),
    **{
        fault: dict.fromkeys(STAGES, WHOLE) | dict.fromkeys(("admission", "queue", "detokenize", "stream"), IN_THE_LOOP)
        for fault in WIRE
    },
    "hang-up": dict.fromkeys(STAGES, LEFT),
    "deadline": dict.fromkeys(STAGES, LATE),
}
CELLS = [(stage, fault) for fault, stages in EXPECTED.items() for stage in stages]
POSSIBLE = [(stage, fault) for stage, fault in CELLS if EXPECTED[fault][stage] not in (IN_THE_LOOP, NO_AWAIT)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder, modules = tmp_path_factory.mktemp("adapters"), adapted_modules(tiny_model)
    paths = [f"{name}={save_adapter(folder / name, modules, seed)}" for seed, name in enumerate(("first", "victim"))]
    with pytest.MonkeyPatch.context() as patch:
        async with breakable(tiny_model, patch, watchdog_timeout=2.0, lora_paths=paths) as made:
            yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(rig: Rig) -> dict[str, tuple[object, ...]]:
    each = zip(PROMPTS, ADAPTERS, strict=True)
    result = {
        str(index): (await rig.read(prompt, BESIDE, adapter=adapter)).seen()
        for index, (prompt, adapter) in enumerate(each)
    }
    victim, plain = [(await rig.read(CHAT, VICTIM, adapter=adapter)).seen() for adapter in ("victim", None)]
    assert victim != plain
    return result | {"victim": victim}


async def test_every_stage_meets_every_fault() -> None:
    for fault, stages in EXPECTED.items():
        assert set(stages) == ({"prefill", "decode"} if fault == "device_memory" else set(STAGES))


async def test_what_cannot_be_cannot_be(rig: Rig) -> None:
    processes = {actor.name: actor.pid for actor in rig.engine.actors()}
    assert [processes[name] for name in ("tokenizer-0", "scheduler", "cache", "detokenizer")] == [None] * 4
    assert processes["worker-0"]
    assert processes["renderer-0"]
    assert not inspect.iscoroutinefunction(Detokenizer.emit)


@pytest.mark.parametrize(("stage", "fault"), POSSIBLE)
async def test_a_fault(rig: Rig, undisturbed: dict[str, tuple[object, ...]], stage: str, fault: str) -> None:
    cell = Cell(rig, stage, fault, EXPECTED[fault][stage])
    try:
        await asyncio.wait_for(cell.play(), PATIENCE)
    finally:
        rig.engine.lifecycle.phase = "ready"  # a drain is for good, but the other cells need this engine
        rig.plan.clear()
        rig.forgive()
    assert rig.plan.pending() == 0
    for index, reading in enumerate(cell.beside):
        if cell.expected == CUT and reading.error is not None:
            assert isinstance(reading.error, EngineDraining)
        else:
            assert reading.error is None
            assert reading.seen() == undisturbed[str(index)]
    cell.judge(undisturbed["victim"])
    await rig.rest()


class Cell:
    """One fault at one stage, with a request that it is meant for and others beside it."""

    def __init__(self, rig: Rig, stage: str, fault: str, expected: str) -> None:
        self.rig = rig
        self.stage = stage
        self.fault = fault
        self.expected = expected
        self.beside: list[Reading] = []
        self.victim: Reading | None = None
        self.drained: bool | BaseException | None = None
        self.draining: asyncio.Task[None] | None = None
        self.seconds = 0.35
        """The victim's time, if it is over before the victim ends."""

    async def play(self) -> None:
        rig = self.rig
        each = zip(PROMPTS, ADAPTERS, strict=True)
        started = [rig.start(prompt, BESIDE, adapter=adapter) for prompt, adapter in each]
        for reading, _ in started:
            reading.stream._faults = None  # what strikes a reader is meant for the victim's
        self.beside = [reading for reading, _ in started]
        await until(lambda: all(reading.count >= 3 for reading in self.beside), "they do not decode")
        for _ in range(6):
            if await self.strike():
                break
            rig.plan.clear()
            self.seconds *= 2  # on a busy machine the victim ended, or its time was over, before the stage
        else:
            raise AssertionError("the fault did not happen")
        for _, task in started:
            await task
        if self.draining is not None:
            await self.draining
        assert not rig.wire._armed, "the fault did not happen"

    async def strike(self) -> bool:
        """Run the victim until its reader ends or leaves; returns whether the fault happened."""
        rig = self.rig
        before_victim = self.stage not in ("decode", "detokenize", "stream", "drain")
        if before_victim:
            self.arm()
        victim, reader = self.start_victim()
        if not before_victim:
            await until(lambda: victim.count >= 2 or reader.done(), "the victim does not decode")
            if reader.done():
                return False
            if self.stage != "drain":
                self.arm()
        if self.stage == "drain":
            self.draining = asyncio.create_task(self.drain())
        struck = "the stage was not reached"
        if self.fault in ("hang-up", "hang") and self.expected == LEFT:
            await until(lambda: rig.plan.pending() == 0, struck)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await victim.stream.aclose()
        elif self.expected == LATE and self.stage in ("stream", "drain"):
            await until(lambda: rig.plan.pending() == 0 or reader.done(), struck)
            await self.read_from_a_halted_worker(reader)
        else:
            await reader
        if self.expected == FAILS:
            # Who reads goes with what he raised, and so does his stream.
            victim.stream, victim.error = None, victim.error and victim.error.with_traceback(None)  # type: ignore[assignment]
            gc.collect()
        return rig.plan.pending() == 0

    async def read_from_a_halted_worker(self, reader: asyncio.Task[Reading]) -> None:
        """The fault does not hold up the worker, which could have ended the request in time."""
        pid = self.rig.worker_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await reader
        finally:
            os.kill(pid, signal.SIGCONT)

    def arm(self) -> None:
        rig, stage = self.rig, self.stage
        if self.fault in WIRE:
            rig.wire.arm("renderer-0" if stage == "render" else "worker-0", self.fault)
            return
        kind = {"hang-up": "slow", "deadline": "slow"}.get(self.fault, self.fault)
        nth = {"prefill": 2, "decode": 3, "detokenize": 2}.get(stage, 1)
        rig.plan.add(Fault(stage, kind, nth=nth, seconds=self.seconds + 0.15 if self.fault == "deadline" else 0.3))  # type: ignore[arg-type]

    def start_victim(self) -> tuple[Reading, asyncio.Task[Reading]]:
        # A salt of its own: its prompt is computed, whatever ran before.
        keywords: dict[str, Any] = {"adapter": "victim", "cache_salt": f"{self.stage} {self.fault} {self.seconds}"}
        if self.expected == LATE:
            keywords["timeout"] = self.seconds
        params = VICTIM if self.expected != LATE else LONG
        self.victim, reader = self.rig.start(CHAT, params, **keywords)
        return self.victim, reader

    async def drain(self) -> None:
        self.arm()
        try:
            self.drained = await self.rig.engine.drain(0.2 if self.expected == CUT else PATIENCE)
        except Exception as error:
            self.drained = error

    def judge(self, expected: tuple[object, ...]) -> None:
        victim = self.victim
        assert victim is not None
        if self.expected == WHOLE:
            assert victim.error is None
            assert victim.seen() == expected
        elif self.expected == FAILS:
            assert victim.error is not None
        elif self.expected == LATE:
            assert isinstance(victim.error, RequestTimeout)
        elif self.expected == CUT:
            assert self.drained is False
            assert victim.error is None or isinstance(victim.error, EngineDraining)
        if self.stage == "drain" and self.fault in ("exception", "memory"):
            assert isinstance(self.drained, Exception)
        elif self.stage == "drain" and self.expected != CUT:
            assert self.drained is True
