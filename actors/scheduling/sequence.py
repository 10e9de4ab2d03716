"""One sequence on its way from the queue to its last token."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from actors.protocol import Ended, SequenceSpec, TokenScores

if TYPE_CHECKING:
    from actors.scheduling.speculation.policy import AcceptanceEstimate

__all__ = ["Sequence", "Status"]


class Status(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Sequence:
    """Mutable state of a :class:`SequenceSpec`. All lengths are in tokens, counted from the sequence's first.

    ``computed <= scheduled <= known``:

    - ``computed``: confirmed by the worker; ``scheduled``: computed or in flight;
    - ``length``: prompt and output; ``known``: these and one token for each step in flight that samples;
    - ``max_extra``: how many more tokens the steps in flight may sample with draft tokens; ``scheduled`` and ``known``
      grow by the accepted ones with the result;
    - ``target``: where ``known`` stops growing (max_tokens or the end of the context); ``capacity``: of its pages;
    - ``committed``: those that the cache knows; ``commit_at``: the ``computed`` at which the next page can be shared.

    Pages: ``pages`` allocated, of which the first ``shared`` are in the prefix tree. ``slot``: its place on the worker,
    ``generation`` the use of it, ``serial`` the admission; see the table of counters in architecture.md. ``charged``:
    tokens known when its tenant was last charged for them. ``draft_limit``: most draft tokens that a step may verify.
    ``acceptance``: acceptance statistics of its drafts. ``turn``: number of the last step that decoded it.
    """

    __slots__ = (
        "acceptance",
        "arrival_order",
        "cached_tokens",
        "capacity",
        "charged",
        "commit_at",
        "committed",
        "computed",
        "draft_limit",
        "experts",
        "first_page",
        "generation",
        "id",
        "known",
        "max_extra",
        "output",
        "pages",
        "priority",
        "progressed",
        "prompt_length",
        "prompt_parts",
        "scheduled",
        "serial",
        "shared",
        "slot",
        "spec",
        "states",
        "status",
        "stop_ids",
        "target",
        "tenant",
        "turn",
    )

    def __init__(self, spec: SequenceSpec, priority: int) -> None:
        self.spec = spec
        self.id = spec.sequence
        self.prompt_length = len(spec.prompt) // 4
        self.stop_ids = spec.stop_ids
        self.output: list[int] = np.frombuffer(spec.output, dtype=np.int32).tolist()
        self.tenant = spec.tenant
        self.charged = 0  # tokens known at the last charge of its tenant
        self.priority = priority  # larger first; 0 for all when priorities are off
        self.arrival_order = (spec.arrival, spec.sequence)  # first come, first served
        self.status = Status.WAITING
        self.progressed = True  # whether it computed a token since its last admission, or was never preempted
        self.cached_tokens = -1  # at the first admission; -1: not admitted yet
        self.target = 0
        self.draft_limit = 0
        self.turn = 0
        self.acceptance: AcceptanceEstimate | None = None
        self.first_page: tuple[bytes, bytes] = (b"", b"")
        self.leave_device()

    def leave_device(self) -> None:
        """Reset to the state of a waiting sequence, with nothing on the device."""
        self.serial = 0  # number of this admission, counted over all sequences; 0: not admitted
        self.slot = 0
        self.generation = 0
        self.known = self.prompt_length + len(self.output)
        self.scheduled = 0
        self.max_extra = 0
        self.computed = 0
        self.pages = 0  # held, shared ones included
        self.capacity = 0  # tokens that fit the pages held
        self.shared = 0  # full pages known to the prefix cache
        self.commit_at = 0  # number of computed tokens at which another page can be shared
        self.committed = 0  # tokens the prefix cache knows
        self.prompt_parts: list[TokenScores] = []
        self.states: list[bytes] = []  # final hidden states of computed tokens, not emitted yet
        self.experts: list[bytes] = []  # that these tokens took

    @property
    def length(self) -> int:
        """Tokens known to the host."""
        return self.prompt_length + len(self.output)

    @property
    def scores_prompt(self) -> bool:
        """Whether something of every prompt position was requested and not yet sent: then all must be computed."""
        sampling = self.spec.sampling
        wanted = sampling.prompt_logprobs >= 0 or sampling.hidden_states or sampling.routed_experts
        return wanted and not self.output

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
        """Why the sequence ends with its last output token, or None if it continues."""
        if not self.output:
            return None
        token = self.output[-1]
        if token in self.stop_ids and len(self.output) > self.spec.min_tokens:
            return Ended("stop", matched=token)
        if self.length >= self.target:
            return Ended("length")
        return None
