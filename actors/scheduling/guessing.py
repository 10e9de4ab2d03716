"""How many guesses the decodes of a step may verify, where the worker makes some."""

from __future__ import annotations

import msgspec
import numpy as np

from actors.scheduling.draft import Draft, Flight
from actors.scheduling.sequence import Sequence
from kernels.speculative.adaptive import AdaptiveConfig, AdaptiveSteps
from kernels.step import ModelInfo, StepResult

__all__ = ["Guessing", "wants"]


class Guessing:
    """For one worker. ``adaptive``: the JSON settings of ``AdaptiveConfig`` where the number follows what is accepted
    and what steps cost; None: as many as the worker makes.

    The decision is the scheduler's, so that all ranks of a model do the same. ``apart``: none guesses beside prompts.
    """

    def __init__(self, info: ModelInfo, adaptive: str | None) -> None:
        self._depth: int = info.speculative_depth
        self._nodes = info.speculative_levels
        self._tokens: int = info.speculative_tokens
        self.apart: bool = info.speculative_apart
        self._chains = info.speculative_nodes == info.speculative_depth + 1
        self._prompts = 0  # the number of the last step that ran some
        self._steps: AdaptiveSteps | None = None
        if adaptive is not None and self._depth:
            self._steps = AdaptiveSteps(self._nodes, msgspec.json.decode(adaptive, type=AdaptiveConfig))

    @property
    def enabled(self) -> bool:
        return self._depth > 0

    @property
    def unseen(self) -> bool:
        """Whether nothing of the step that is planned is kept for the worker's draft; never where some guess in it."""
        return self._steps is not None and self._steps.asleep

    def rests(self, draft: Draft) -> bool:
        """Whether none of the draft's decodes is to guess, so far as can be told without a look at them."""
        steps, rows = self._steps, draft.decodes
        # Whoever is new stands last.
        if steps is None or rows[-1].track is None or not steps.rests(len(rows)):
            return False
        if steps.times:
            draft.adapted = len(rows)
        return True

    def allow(self, draft: Draft, share: int, spare: int, page_size: int) -> None:
        """Give each decode of the draft as many guesses as its request wants, that could still be of use to it, that
        are ``share`` at most, that the worker gains by in so large a batch, and that there are pages for. ``spare``:
        pages that nobody else needs soon.

        Guesses take positions behind the last known token, so they need pages early. The token that comes anyway
        counts as known already.
        """
        rows = draft.decodes
        if self._tokens:
            share = min(share, max(self._tokens // len(rows) - 1, 0))
        wanted = []
        for s in rows:
            left = s.target - s.known  # after the token that comes anyway
            wanted.append(max(min(s.drafts, share, left if self._chains else s.drafts * left), 0))
        if self._steps is not None:
            wanted = self._adapt(self._steps, draft, wanted)
        if not any(wanted):
            return
        drafts: list[int] = []
        ahead: list[int] = []
        for sequence, most in zip(rows, wanted, strict=True):
            if most:
                root = sequence.scheduled - 1 + sequence.ahead
                pages = -(-(root + most + 1) // page_size) - sequence.pages
                if pages > spare:
                    most = max(min(most, sequence.capacity - root - 1), 0)
                elif pages > 0:
                    draft.grow(sequence, pages, page_size)
                    spare -= pages
            accepts = min(most, self._depth)
            sequence.ahead += accepts
            drafts.append(most)
            ahead.append(accepts)
        if any(drafts):
            draft.drafts, draft.ahead = drafts, ahead
            draft.budget -= sum(drafts)

    def _adapt(self, steps: AdaptiveSteps, draft: Draft, wanted: list[int]) -> list[int]:
        guessing = [sequence for sequence, most in zip(draft.decodes, wanted, strict=True) if most]
        if not guessing:
            steps.declined()
            return wanted
        for sequence in guessing:
            if sequence.track is None:
                sequence.track = steps.track()
        levels = steps.choose([sequence.track for sequence in guessing if sequence.track is not None])
        draft.levels, draft.adapted = max(levels), len(guessing)
        chosen = iter(levels)
        return [min(most, self._nodes[next(chosen)]) if most else 0 for most in wanted]

    def learn(self, flight: Flight, result: StepResult) -> None:
        """What a step's answer says of the guesses that were made."""
        steps = self._steps
        if steps is None:
            return
        behind = flight.number == self._prompts + 1
        if flight.decodes < len(flight.samples):
            self._prompts = flight.number
            steps.interrupted()
        if not flight.adapted:
            return
        alone = flight.counts[-1] == 1 and len(flight.samples) == flight.decodes
        if not result.drafted:
            if not alone:
                steps.untimed(flight.adapted, 0, 0, 0)
            elif flight.ahead:
                steps.vain(flight.adapted, result.timing.whole)
            else:
                steps.timed(flight.adapted, 0, 0, result.timing.whole, 0, result.timing.seen, behind)
            return
        drafted, accepted, depths = (
            np.frombuffer(part, dtype=np.int32).tolist() for part in (result.drafted, result.accepted, result.depths)
        )
        right = 0
        for sequence, depth, tokens in zip(flight.sequences, depths, accepted, strict=True):
            if not depth:
                continue
            right += max(tokens - 1, 0)
            if sequence.track is not None and tokens:
                steps.judged(sequence.track, tokens - 1, depth)
        levels, nodes = max(depths), sum(drafted)
        if not alone:
            steps.untimed(flight.adapted, levels, nodes, right)
        elif nodes:
            steps.timed(flight.adapted, levels, nodes, result.timing.whole, right)
        else:
            steps.vain(flight.adapted, result.timing.whole)


def wants(sequence: Sequence, info: ModelInfo) -> int:
    """Guesses that a step may verify of this request."""
    most: int = info.speculative_nodes - 1
    asked: int = sequence.spec.sampling.drafts
    return most if asked < 0 else min(asked, most)
