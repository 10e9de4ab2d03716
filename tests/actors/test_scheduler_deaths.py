"""When the scheduler says that a worker died: at the death, however late it hears of it."""

from __future__ import annotations

import numpy as np
import pytest

from actors.cache_manager import CacheManager
from actors.journal import Journal, JournalEntry
from actors.protocol import DetokenizerProtocol, Emit, Fence, SequenceSpec, Step, Submit, WorkerProtocol, WorkerReady
from actors.requests import SamplingParams
from actors.runtime import Actor, ActorSystem, Deferred, RequestError, handles
from actors.scheduler import Scheduler
from actors.scheduling import PlannerConfig
from actors.scheduling.testing import model_info
from actors.streams import StreamBuffer
from actors.vitals import Vitals
from kernels.step import SlotSampling, StepResult
from telemetry.timeline import Timelines
from tests.waiting import until


class Silent(Actor[WorkerProtocol]):
    """A worker that answers a step when the test says what."""

    def __init__(self, steps: list[Deferred[StepResult]]) -> None:
        self._steps = steps

    @handles
    def step(self, message: Step) -> Deferred[StepResult]:
        self._steps.append(self.context.system.loop.create_future())
        return self._steps[-1]


class Drain(Actor[DetokenizerProtocol]):
    @handles
    def emit(self, message: Emit) -> None: ...

    @handles
    def fence(self, message: Fence) -> None: ...


@pytest.mark.parametrize("heard", ["by a step", "by the next life"])
@pytest.mark.parametrize("token", ["before the death", "on its way at the death"])
async def test_the_mark_is_of_the_death_or_of_a_stream_that_began_after_it(heard: str, token: str) -> None:
    journal, vitals, steps = Journal(), Vitals(), list[Deferred[StepResult]]()
    info = model_info(num_pages=9, page_size=16)
    async with ActorSystem() as system:
        cache = await system.spawn(lambda: CacheManager(vitals), name="cache")
        detokenizer = await system.spawn(Drain, name="detokenizer")
        worker = await system.spawn(lambda: Silent(steps), name="worker-0")
        scheduler = await system.spawn(
            lambda: Scheduler(
                PlannerConfig(max_running=2, max_slots=3, step_tokens=64, max_prefill_tokens=64),
                journal=journal,
                cache=cache,
                worker=worker,
                detokenizer=detokenizer,
                vitals=vitals,
                step_timeout=600.0,
            ),
            name="scheduler",
        )
        vitals.worker = (info, 0)
        await scheduler.tell(WorkerReady(info=info, epoch=0))
        prompt = np.arange(8, dtype=np.int32).tobytes()
        spec = SequenceSpec(sequence=1, prompt=prompt, sampling=SlotSampling(), max_tokens=9)
        timeline = Timelines().open("1", operation="text_completion", model="")
        entry = JournalEntry(1, 0, spec, SamplingParams(), StreamBuffer(timeline, 1), timeline, [0], [])
        journal.open(entry)
        await scheduler.tell(Submit(sequences=(spec,)))
        await until(lambda: steps, "no step was sent")
        began, died = system.clock.monotonic(), system.clock.monotonic() + 1e-6
        entry.begin_decode(began if token == "before the death" else died + 1e-6)
        await until(lambda: system.clock.monotonic() > died)
        vitals.worker_lost(died)
        if heard == "by a step":
            steps[0].set_exception(RequestError("of another life"))
        else:
            vitals.worker = (info, 1)
            await scheduler.tell(WorkerReady(info=info, epoch=1))
        await until(lambda: timeline.marks, "the death was not marked")
        assert [mark.name for mark in timeline.marks][:1] == ["worker_died"]
        assert timeline.marks[0].at == (died if token == "before the death" else died + 1e-6)
        assert timeline.marks[0].attributes["in_step"] is True
        assert entry.worker_deaths == 1
