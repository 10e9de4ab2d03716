"""One sequence on its way from the queue to its last token."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from actors.protocol import Ended, SequenceSpec, TokenScores

if TYPE_CHECKING:
    from kernels.speculative.adaptive import Track

__all__ = ["Sequence", "Status"]


class Status(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Sequence:
    """Mutable state of a :class:`SequenceSpec`. All lengths are in tokens, counted from the sequence's first.

    ``computed <= scheduled <= known``: confirmed by the worker; run or in flight; prompt, output and the tokens that
    steps in flight will sample, one each. ``ahead``: how many more these may sample, where they verify guesses: so far
    ``scheduled`` and ``known`` may jump when they are answered. ``target``: where ``known`` stops growing (max_tokens
    or the context's end). ``drafts``: guesses that a step may verify; ``track``: what became of those so far.
    """

    __slots__ = (
        "ahead",
        "cached_tokens",
        "capacity",
        "charged",
        "commit_at",
        "computed",
        "drafts",
        "first_page",
        "generation",
        "id",
        "known",
        "output",
        "pages",
        "progressed",
        "prompt_length",
        "prompt_parts",
        "rank",
        "scheduled",
        "serial",
        "shared",
        "slot",
        "spec",
        "status",
        "stop_ids",
        "strength",
        "target",
        "tenant",
        "told",
        "track",
    )

    def __init__(self, spec: SequenceSpec, strength: int) -> None:
        self.spec = spec
        self.id = spec.sequence
        self.prompt_length = len(spec.prompt) // 4
        self.stop_ids = spec.stop_ids
        self.output: list[int] = np.frombuffer(spec.output, dtype=np.int32).tolist()
        self.tenant = spec.tenant
        self.charged = 0  # tokens known at the last charge of its tenant
        self.strength = strength  # priority, larger first; 0 for all when priorities are off
        self.rank = (spec.arrival, spec.sequence)  # first come, first served
        self.status = Status.WAITING
        self.progressed = True  # since the last admission, or never preempted
        self.cached_tokens = -1  # of the first admission
        self.target = 0
        self.drafts = 0
        self.track: Track | None = None
        self.first_page: tuple[bytes, bytes] = (b"", b"")
        self.rest()

    def rest(self) -> None:
        """Nothing on the device: the state of a waiting sequence."""
        self.serial = 0  # of this life on the device, counted over all sequences; 0: none
        self.slot = 0
        self.generation = 0
        self.known = self.prompt_length + len(self.output)
        self.scheduled = 0
        self.ahead = 0
        self.computed = 0
        self.pages = 0  # held, the shared ones too
        self.capacity = 0  # tokens that fit the pages held
        self.shared = 0  # full pages known to the prefix cache
        self.commit_at = 0  # the number of computed tokens at which there is another page to share
        self.told = 0  # tokens the prefix cache knows
        self.prompt_parts: list[TokenScores] = []

    @property
    def length(self) -> int:
        """Tokens known to the host."""
        return self.prompt_length + len(self.output)

    @property
    def scores_prompt(self) -> bool:
        """Whether every prompt position is to be computed and scored: asked for, and not sent with a first token."""
        return self.spec.sampling.prompt_logprobs >= 0 and not self.output

    def tokens(self) -> bytes:
        """Prompt and output so far, int32."""
        if not self.output:
            return self.spec.prompt
        return self.spec.prompt + np.array(self.output, dtype=np.int32).tobytes()

    def tokens_from(self, start: int) -> bytes:
        """Tokens ``start ..`` known to the host, int32."""
        if start >= self.prompt_length:
            return np.array(self.output[start - self.prompt_length :], dtype=np.int32).tobytes()
        return self.tokens()[4 * start :]

    def end(self) -> Ended | None:
        """Why the last output token was the last one, if it was."""
        if not self.output:
            return None
        token = self.output[-1]
        if token in self.stop_ids and len(self.output) > self.spec.min_tokens:
            return Ended("stop", matched=token)
        if self.length >= self.target:
            return Ended("length")
        return None
