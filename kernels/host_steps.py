"""Steps that one call runs whole, where the device is the host: what they give is there when they return."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kernels.answers import RunningStep
from kernels.captures import CapturedSteps
from kernels.speculative.speculator import Speculator
from kernels.speculative.steady import SteadyChains
from kernels.steady import SteadyDecodes
from kernels.step import StepBatch, StepResult, StepTiming

__all__ = ["HostSteps", "of_no_use"]


class HostSteps:
    """Of one runner: its steady decodes, its chains of guesses, and its prompts' ends, as ``CapturedSteps`` has them.

    ``rest``: what of a step with guesses may be done while nobody waits. Times ``begun`` are of ``perf_counter``: when
    the step was asked for.
    """

    def __init__(self, captured: CapturedSteps, speculator: Speculator | None, rest: Callable[[], None]) -> None:
        self._captured, self._speculator, self._rest = captured, speculator, rest

    def steady(self, batch: StepBatch) -> SteadyDecodes | None:
        """What runs the step, should it be such decodes."""
        return self._captured.unseen_steady if batch.unseen else self._captured.steady

    def run_steady(
        self, steady: SteadyDecodes, batch: StepBatch, begun: float, seen: float = 0.0, vain: bool = False
    ) -> RunningStep | None:
        """None when it is not for them, or a row is not finite: then nothing was done that is not done again. ``seen``:
        seconds that observing took. ``vain``: guesses were asked for."""
        prepared = time.perf_counter()
        tokens = steady.run()
        if tokens is None:
            return None
        if not tokens:
            return of_no_use(batch)
        rows = len(steady.slots)
        if self._speculator is not None and self._captured.target is not None and not batch.unseen:
            features = self._captured.target.features[:rows]
            if vain:
                self._speculator.show_vain(steady.slots, features, _ints(batch.generations))
            else:
                self._speculator.show_later(steady.slots, features)
        ended = time.perf_counter()
        timing = StepTiming(
            prepare=prepared - begun, run=ended - prepared, graph_rows=rows, whole=ended - begun, seen=seen
        )
        result = StepResult(batch.number, accepted=batch.counts, tokens=tokens, timing=timing)
        return RunningStep(lambda: result, True, self._rest if vain else None)

    def run_chains(self, chains: SteadyChains, batch: StepBatch, begun: float, seen: float) -> RunningStep | None:
        """None when it is not for them: then nothing was done that is not done again. ``seen``: seconds that observing
        took."""
        drafting = time.perf_counter()
        found = chains.run(batch)
        if found is None:
            return None
        if found.idle:
            steady = self._captured.steady
            fits = steady is not None and steady.fits(batch)
            return self.run_steady(steady, batch, begun, seen, True) if steady is not None and fits else None
        prepared, ended = found.drafted_at, time.perf_counter()
        timing = StepTiming(
            prepare=prepared - begun,
            run=ended - prepared,
            graph_rows=len(found.accepted) // 4,
            draft=seen + prepared - drafting,
            whole=ended - begun,
        )
        result = StepResult(
            batch.number,
            accepted=found.accepted,
            tokens=found.tokens,
            drafted=found.drafted,
            depths=found.depths,
            timing=timing,
        )
        return RunningStep(lambda: result, True, None if chains.follows else self._rest)

    def run_ends(self, batch: StepBatch, begun: float, seen: float) -> RunningStep | None:
        """Prompts to their ends, beside decodes. None when it is not for them, or a row is not finite: then nothing was
        done that is not done again. ``seen``: as above."""
        ends = self._captured.unseen_ends if batch.unseen else self._captured.ends
        if ends is None:
            return None
        prepared = time.perf_counter()
        found = ends.run(batch)
        if found is None:
            return None
        speculator = None if batch.unseen else self._speculator
        if speculator is not None:
            speculator.show_ends(found, _ints(batch.generations))
        ended = time.perf_counter()
        rows = len(found.slots)
        timing = StepTiming(
            prepare=prepared - begun, run=ended - prepared, graph_rows=rows, draft=seen, whole=ended - begun
        )
        accepted = np.ones(rows, dtype=np.int32).tobytes()
        result = StepResult(batch.number, accepted=accepted, tokens=found.tokens, timing=timing)
        return RunningStep(lambda: result, True, None if speculator is None else self._rest)


def of_no_use(batch: StepBatch) -> RunningStep:
    """The step of decodes whose sequences are at their end: the first tokens there are stand for what nobody reads."""
    result = StepResult(batch.number, accepted=batch.counts, tokens=bytes(len(batch.counts)))
    return RunningStep(lambda: result, True)


def _ints(data: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(data, dtype=np.int32)
