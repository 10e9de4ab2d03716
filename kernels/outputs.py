"""What is read off hidden states: prompt scores, sampled tokens, accepted guesses, rows that are not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.answers import Answer, PromptScores
from kernels.models.decoder import Decoder
from kernels.platforms.base import Platform
from kernels.platforms.prepared import PassFound, StepFound
from kernels.rows import StepRows
from kernels.sampling import Sampled, Sampler
from kernels.slots import SlotTable
from kernels.speculative.following import Followed
from kernels.speculative.samples import Samples, Verified
from kernels.speculative.speculator import Speculator

__all__ = ["StepOutputs"]

SCORE_ROWS = 64  # prompt positions whose logits exist at a time


class StepOutputs:
    """Of one runner. ``caches``: the model's, in which accepted guesses are moved to their places."""

    def __init__(
        self,
        platform: Platform,
        model: Decoder,
        sampler: Sampler,
        slots: SlotTable,
        caches: list[Any],
        speculator: Speculator | None,
    ) -> None:
        self._platform = platform
        self._model = model
        self._sampler = sampler
        self._slots = slots
        self._caches = caches
        self._speculator = speculator

    def likeliest(self, step: StepRows, found: StepFound, answer: Answer) -> bool:
        """Whether what a prepared step found is all that its rows want: each its likeliest next token, or none."""
        state = self._slots
        grows = step.starts + step.counts == state.known[step.slots]
        prompts = step.slots[step.decodes :] if grows.all() else step.slots
        if (state.prompt_logprobs[prompts] >= 0).any() or not self._sampler.plain(tuple(step.slots.tolist())):
            return False
        state.computed[step.slots] += step.counts
        state.grew(step.slots[grows])
        answer.likeliest, answer.sampled_rows, answer.sampling = found.likeliest, step.rows, grows
        answer.arrives = found.arrives
        return True

    def scores(self, step: StepRows) -> bool:
        """Whether a row wants something of its prompt's tokens, and not of its last alone."""
        state, slots = self._slots, step.slots
        return bool(((state.prompt_logprobs[slots] >= 0) & (step.starts + 1 < state.prompt_length[slots])).any())

    def rest(self, step: StepRows, found: StepFound, answer: Answer) -> None:
        """What rows of a prepared step want beside: see ``read``."""
        self._slots.computed[step.slots] += step.counts
        self._score_prompts(step, found.hidden, answer)
        self._test_chunks(step, found.hidden, answer)
        self._sample(step, found.hidden, answer, found.logits)

    def read(self, step: StepRows, found: PassFound, answer: Answer) -> None:
        """``found``: what the model returned, of all tokens or of each row's last, where keys and values were put, and
        what its head made, if it was run."""
        hidden, features = self._model.split(found.result)
        self._slots.computed[step.slots] += step.certain()
        self._score_prompts(step, hidden, answer)
        self._test_chunks(step, hidden, answer)
        if self._speculator is not None:
            self._sample_verified(self._speculator, step, hidden, features, found, answer)
        else:
            self._sample(step, hidden, answer)

    def _score_prompts(self, step: StepRows, hidden: Tensor, answer: Answer) -> None:
        """Log-probabilities of the prompt tokens that this step's positions predict, where a request wants them."""
        state = self._slots
        wanted = state.prompt_logprobs[step.slots]
        for row in np.flatnonzero(wanted >= 0).tolist():
            slot, start, offset = int(step.slots[row]), int(step.starts[row]), int(step.offsets[row])
            scored = min(int(step.counts[row]), int(state.prompt_length[slot]) - 1 - start)
            parts = []
            for begin in range(0, scored, SCORE_ROWS):
                end = min(begin + SCORE_ROWS, scored)
                logits = self._model.logits(hidden[offset + begin : offset + end])
                targets = state.tokens[slot, start + 1 + begin : start + 1 + end].to(torch.int64)
                parts.append(self._sampler.score_prompt(logits, targets, int(wanted[row])))
            if parts:
                scores = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
                answer.prompts.append(PromptScores(int(step.rows[row]), *scores))

    def _test_chunks(self, step: StepRows, hidden: Tensor, answer: Answer) -> None:
        """Rows that sample nothing are tested as well, at their last token, which sees the others: the pages that they
        fill are shared before anything is sampled from them.
        """
        short = np.flatnonzero(step.starts + step.counts < self._slots.known[step.slots])
        if len(short):
            last = hidden.index_select(0, self._platform.put(self._places(step, hidden)[short]))
            answer.chunk_rows, answer.chunks_broken = step.rows[short], ~last.isfinite().all(-1)

    def _sample(self, step: StepRows, hidden: Tensor, answer: Answer, logits: Tensor | None = None) -> None:
        """Rows that reached their last known token get the next one. ``logits``: of each row's last token, if they were
        made."""
        state = self._slots
        reached = np.flatnonzero(step.starts + step.counts == state.known[step.slots])
        if not len(reached):
            return
        slots = step.slots[reached]
        lengths = state.known[slots]
        chosen, wanted = (hidden, self._places(step, hidden)[reached]) if logits is None else (logits, reached)
        if len(wanted) < len(chosen):
            chosen = chosen.index_select(0, self._platform.put(wanted))
        at_slots, at = self._platform.put(slots), self._platform.put(lengths)
        sampled = self._sampler.sample(
            self._model.logits(chosen) if logits is None else chosen,
            at_slots,
            at,
            state.tokens,
            host_slots=slots.tolist(),
            longest=int(lengths.max()),
        )
        state.append(slots, at_slots, at, sampled.tokens)
        answer.sampled, answer.sampled_rows = sampled, step.rows[reached]

    @staticmethod
    def _places(step: StepRows, hidden: Tensor) -> npt.NDArray[np.int64]:
        """Where the last token of each row is in ``hidden``, of all tokens or of these alone."""
        return step.last if len(hidden) > len(step.rows) else np.arange(len(step.rows))

    def _sample_verified(
        self,
        speculator: Speculator,
        step: StepRows,
        hidden: Tensor,
        features: Tensor,
        found: PassFound,
        answer: Answer,
    ) -> None:
        """The same with guesses: what was sampled after each says which of them are right."""
        reached = step.starts + step.counts == self._slots.known[step.slots]
        reached[step.verifying] = True
        verified: Verified | None = None
        if step.drafts is None:
            self._sample(step, hidden, answer)
        elif found.accepted is not None:
            verified = speculator.trees.accepted(found)
        else:
            samples = Samples.of(step, self._slots.known)
            if found.head is not None and len(samples.tokens) == len(hidden):
                logits, *greedy = found.head
                verified = speculator.sample(step, samples, logits, Sampled(*greedy))
            else:
                chosen = hidden if len(samples.tokens) == len(hidden) else hidden[self._platform.put(samples.tokens)]
                verified = speculator.sample(step, samples, self._model.logits(chosen))
            speculator.verifier.move(step, found.index, verified.outcome, self._caches)
        if verified is not None:
            self._tell(step, verified, answer)
        answer.arrives = speculator.ran(step, reached, features, answer.sampled, verified)

    def followed(self, step: StepRows, followed: Followed, answer: Answer) -> None:
        """The same of a step that was given to the device before the one before it was settled."""
        assert self._speculator is not None
        verified, features = followed.verified, self._model.split(followed.found.result)[1]
        self._tell(step, verified, answer)
        reached = np.ones(len(step.slots), dtype=bool)
        answer.arrives = self._speculator.ran(step, reached, features, answer.sampled, verified)
        self._speculator.trees.followed(self._speculator.last, followed.found.end, followed.behind)

    @staticmethod
    def _tell(step: StepRows, verified: Verified, answer: Answer) -> None:
        answer.sampled, answer.sampled_rows = verified.sampled, step.rows[verified.rows]
        answer.places, answer.outcome = verified.places, verified.outcome
        answer.verified_rows = step.rows[step.verifying]
        answer.guesses = step.counts[step.verifying] - 1
