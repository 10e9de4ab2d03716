"""Common part of fault tests: an engine to break, faults of the link, and the invariants afterwards."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.engine.engine import Engine
from actors.faults import FaultPlan
from actors.protocol.requests import SamplingParams
from actors.requests.streams import RequestStream
from actors.runtime.process.child_process import ChildProcess
from actors.runtime.process.frames import Kind
from telemetry.timeline import Hop, Mark, RequestTimeline
from tests.kits.waiting import until


@dataclass
class Reading:
    """The output of one request that a reader received, by choice."""

    stream: RequestStream
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    prompt_logprobs: list[Any] = field(default_factory=list)
    usage: list[Any] = field(default_factory=list)
    matched: dict[int, Any] = field(default_factory=dict)
    error: BaseException | None = None

    async def read(self) -> Reading:
        """Read to the end or error. A choice must not continue after its end."""
        try:
            async for delta in self.stream:
                index = delta.index
                assert index not in self.finished, "a choice went on after its end"
                self.tokens.setdefault(index, []).extend(delta.token_ids)
                self.texts[index] = self.texts.get(index, "") + delta.text
                self.logprobs.setdefault(index, []).extend(delta.logprobs or ())
                if delta.prompt_logprobs is not None:
                    self.prompt_logprobs.append(delta.prompt_logprobs)
                if delta.finish_reason is not None:
                    self.finished[index] = delta.finish_reason
                    self.matched[index] = delta.matched_stop
                self.usage.append(delta.usage)
        except AssertionError:
            raise
        except Exception as error:
            self.error = error.with_traceback(None)  # its frames reference the request
            error.__context__ = None
        return self

    @property
    def count(self) -> int:
        return sum(len(tokens) for tokens in self.tokens.values())

    def seen(self) -> tuple[object, ...]:
        """The part that two readings of the same request have in common."""
        scores = {
            index: [(s.token_id, s.logprob, tuple((t.token_id, t.logprob) for t in s.top)) for s in scores]
            for index, scores in self.logprobs.items()
        }
        return self.tokens, self.texts, self.finished, self.matched, scores


class Forgetful(logging.Handler):
    """Removes errors from log records: pytest keeps records, and the frames of errors reference requests."""

    def emit(self, record: logging.LogRecord) -> None:
        self.format(record)
        record.exc_info = None


class Ends:
    """Counts how often each request began and ended."""

    def __init__(self) -> None:
        self.began_: Counter[str] = Counter()
        self.ended_: Counter[str] = Counter()

    def began(self, timeline: RequestTimeline) -> None:
        self.began_[timeline.request_id] += 1

    def hop_ended(self, timeline: RequestTimeline, hop: Hop) -> None: ...

    def marked(self, timeline: RequestTimeline, mark: Mark) -> None: ...

    def ended(self, timeline: RequestTimeline) -> None:
        self.ended_[timeline.request_id] += 1


class Wire:
    """Faults of the link: frames from a child to the parent are dropped, duplicated, delayed or corrupted."""

    def __init__(self) -> None:
        self._armed: dict[str, tuple[str, float]] = {}
        self.happened = 0

    def arm(self, child: str, fault: str, seconds: float = 0.3) -> None:
        """Apply the fault to the next reply of this child."""
        self._armed[child] = (fault, seconds)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wire = self

        class FaultyChild(ChildProcess):
            def __init__(self, loop: Any, spec: Any, process: Any) -> None:
                super().__init__(loop, spec, process)
                self._name = spec.name
                self._held: list[tuple[int, int, bytes]] | None = None

            def begin(self, incarnation: int, on_frame: Any, on_lost: Any, on_exit: Any) -> None:
                def through(kind: int, correlation: int, body: memoryview) -> None:
                    self._through(on_frame, kind, correlation, body)

                super().begin(incarnation, through, on_lost, on_exit)

            def _through(self, on_frame: Any, kind: int, correlation: int, body: memoryview) -> None:
                if self._held is not None:  # a stream of bytes keeps its order
                    self._held.append((kind, correlation, bytes(body)))
                    return
                if kind != Kind.REPLY or self._name not in wire._armed:
                    on_frame(kind, correlation, body)
                    return
                fault, seconds = wire._armed.pop(self._name)
                wire.happened += 1
                if fault == "duplicate":
                    on_frame(kind, correlation, body)
                    on_frame(kind, correlation, body)
                elif fault == "corrupt":
                    on_frame(kind, correlation, memoryview(b"\xc1" + bytes(body[: len(body) // 2])))
                elif fault == "late":
                    self._held = [(kind, correlation, bytes(body))]
                    self._loop.call_later(seconds, self._let_go, on_frame)
                else:
                    assert fault == "dropped"

            def _let_go(self, on_frame: Any) -> None:
                held, self._held = self._held or [], None
                for kind, correlation, body in held:
                    on_frame(kind, correlation, memoryview(body))

        monkeypatch.setattr("actors.runtime.process.plan.ChildProcess", FaultyChild)


class Rig:
    """An engine, its fault injection, and the invariants of the idle engine."""

    def __init__(self, engine: Engine, plan: FaultPlan, wire: Wire) -> None:
        self.engine = engine
        self.plan = plan
        self.wire = wire
        self.ends = Ends()
        engine.timelines.listen(self.ends)

    def start(self, prompt: Any, params: SamplingParams, **keywords: Any) -> tuple[Reading, asyncio.Task[Reading]]:
        reading = Reading(self.engine.generate(prompt, params, **keywords))
        return reading, asyncio.create_task(reading.read())

    async def read(self, prompt: Any, params: SamplingParams, **keywords: Any) -> Reading:
        return await self.start(prompt, params, **keywords)[1]

    @property
    def worker_pid(self) -> int:
        return int(self.engine.describe()["workers"][0]["pid"] or 0)

    def restarts(self) -> int:
        return sum(actor.incarnation or 0 for actor in self.engine.actors())

    def forgive(self) -> None:
        """Reset the restart counts of supervisors: many tests share this engine."""
        assert self.engine._system is not None
        for cell in self.engine._system._cells.values():
            cell.restarts.clear()
        for group in self.engine._system._groups.values():
            group._restarts.clear()

    async def rest(self) -> None:
        """Wait until the engine is idle, and check that no state of any request is left."""
        engine = self.engine
        system, actor_tree, intake = engine._system, engine._actor_tree, engine.intake
        assert system is not None
        assert actor_tree is not None
        assert intake is not None

        def quiet() -> bool:
            load = engine.board.scheduler
            return (
                engine.health().ok
                and load is not None
                and load.running == load.waiting == load.steps_in_flight == 0
                and not any(sum(actor.mailbox.values()) or actor.message for actor in engine.actors())
                and all(actor.state == "running" for actor in engine.actors())
                and (usage := engine.board.cache()) is not None
                and usage.used == usage.sequences == 0
            )

        await until(quiet, f"the engine did not come to rest: {engine.describe()}")

        def left() -> list[str]:
            gc.collect()  # crashed actors, their frames and waiting asks are reference cycles
            planner = _actor(system, "scheduler")._planner
            gone = {
                "the journal": not list(actor_tree.replicas[0].journal.live()),
                "the intake": len(intake) == 0 and intake.idle.is_set(),
                "the admission": (intake.admission.sequences, intake.admission.tokens) == (0, 0),
                "timelines": not list(engine.timelines.live()) and self.ends.began_.keys() == self.ends.ended_.keys(),
                "the detokenizer": not _actor(system, "detokenizer")._texts,
                "the planner": planner.in_flight == len(planner.running()) == 0 and not planner.has_work,
                "the worker": engine.board.oldest_step_sent is None,
            }
            return [where for where, empty in gone.items() if not empty]

        # They learn the end of a request at different times.
        with suppress(AssertionError):
            await until(lambda: not left())
        assert left() == [], f"left of requests in: {left()}"
        usage = engine.board.cache()
        assert usage is not None
        assert usage.free + usage.evictable + usage.used == usage.total > 0
        _actor(system, "cache")._cache.check()  # every page has one owner
        assert set(self.ends.ended_.values()) <= {1}, "a request ended twice"
        counted = sum(
            sample.value
            for metric in engine.registry.collect()
            for sample in metric.samples
            if sample.name == "troupe_requests_total"
        )
        assert counted == len(self.ends.ended_)


def _actor(system: Any, name: str) -> Any:
    incarnation = system._cells[name].incarnation
    assert incarnation is not None
    return incarnation._actor


@dataclass(frozen=True)
class Belongings:
    """Resources of a process that an engine could leak."""

    threads: Counter[str]
    files: Counter[str]
    children: Counter[str]
    tasks: Counter[str]

    @classmethod
    def now(cls) -> Belongings:
        gc.collect()
        current = asyncio.current_task()
        return cls(
            threads=Counter(thread.name for thread in threading.enumerate()),
            files=Counter(_files()),
            children=Counter(str(child.pid) for child in psutil.Process().children()),
            tasks=Counter(task.get_name() for task in asyncio.all_tasks() if task is not current),
        )

    def beyond(self, before: Belongings) -> dict[str, list[str]]:
        """New resources since the snapshot, by kind."""
        kinds = ("threads", "files", "children", "tasks")
        more = {kind: list((getattr(self, kind) - getattr(before, kind)).elements()) for kind in kinds}
        return {kind: names for kind, names in more.items() if names}


def _files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            yield f"{number} {os.readlink(f'/proc/self/fd/{number}')}"


@asynccontextmanager
async def breakable(model: Path | str, monkeypatch: pytest.MonkeyPatch, **keywords: Any) -> AsyncIterator[Rig]:
    """An engine for fault injection. After it is closed no resource may be left. Resources of earlier tests, such as a
    build, may end meanwhile; no others may appear.
    """
    monkeypatch.setattr("actors.runtime.process.child_process._MIN_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(logging.getLogger("troupe"), "handlers", [Forgetful()])
    wire = Wire()
    wire.install(monkeypatch)
    options: dict[str, Any] = {
        "dtype": "float32",
        "cpu_threads": 1,
        "max_running_requests": 6,
        "chunked_prefill_size": 32,
        "max_total_tokens": 4096,
        "watchdog_timeout": 3.0,
    }
    before = Belongings.now()
    with FaultPlan() as plan:
        async with Engine(model=str(model), faults=plan, **(options | keywords)) as engine:
            yield Rig(engine, plan, wire)
    # Finished threads may still be exiting, and callbacks of closed resources may be pending.
    with suppress(AssertionError):
        await until(lambda: not Belongings.now().beyond(before))
    left = Belongings.now().beyond(before)
    assert not left, f"the engine left behind: {left}"
