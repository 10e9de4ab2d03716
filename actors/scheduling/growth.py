"""How many pages admission keeps free for the growth of running sequences."""

from __future__ import annotations

from collections.abc import Iterable

from actors.scheduling.sequence import Sequence

__all__ = ["GrowthReserve"]

_SHARE = 0.7  # initial share of the remaining tokens that a sequence is expected to write
_FLOOR = 0.14  # the share falls to this part of it after ...
_STEPS = 600  # ... this many steps without preemption
_HORIZON = 4096  # most tokens of growth that count, per sequence


class GrowthReserve:
    """Admission keeps pages free for a share of the tokens that running sequences may still write.

    The share falls with every step and returns to its start when a sequence is preempted. The rule and its numbers are
    those of SGLang's ``--schedule-conservativeness``, which scales the share.
    """

    def __init__(self, conservativeness: float) -> None:
        self._highest = min(_SHARE * conservativeness, 1.0)
        self._lowest = self._highest * _FLOOR
        self._decay = (self._highest - self._lowest) / _STEPS
        self._share = self._highest

    def step(self) -> None:
        """Record a step planned without preemption."""
        self._share = max(self._share - self._decay, self._lowest)

    def preempted(self) -> None:
        self._share = self._highest

    def pages(self, sequences: Iterable[Sequence], page_size: int) -> int:
        """Pages for the rest of each prefill, and for the expected share of each output."""
        pages, tokens = 0, 0
        for sequence in sequences:
            pages += max(-(-sequence.known // page_size) - sequence.pages, 0)
            tokens += min(sequence.target - sequence.known, _HORIZON)
        return pages + -(-int(tokens * self._share) // page_size)
