"""Reservations in the bounded cache groups: admission reserves the most pages that a sequence may hold."""

from __future__ import annotations

from actors.scheduling.sequence import Sequence
from kernels.contract.caches import GroupPages

__all__ = ["BoundedReservations"]


class BoundedReservations:
    """Reservations of running sequences. The number of window or state pages of a sequence is limited and known before
    it runs. So a request to grow in these groups always succeeds, and no sequence is preempted for them.

    ``step_tokens``: tokens of the largest step. Pages for prompt chunks in flight are reserved once for all sequences.
    """

    def __init__(self, groups: tuple[GroupPages, ...], page_size: int, step_tokens: int) -> None:
        self._page_size = page_size
        self._groups = groups
        self._max_pages = [group.sequence_pages(page_size) for group in groups]
        self._free = [group.num_pages - 1 - group.step_pages(step_tokens) for group in groups]

    def fits(self, sequence: Sequence) -> bool:
        """Whether the unreserved pages suffice for the sequence."""
        return all(need <= free for need, free in zip(self._needs(sequence), self._free, strict=True))

    def take(self, sequence: Sequence) -> None:
        """Reserve the pages of a sequence that starts to run."""
        self._free = [free - need for need, free in zip(self._needs(sequence), self._free, strict=True)]

    def give_back(self, sequence: Sequence) -> None:
        """Release the reservation of a sequence that has left the device."""
        self._free = [free + need for need, free in zip(self._needs(sequence), self._free, strict=True)]

    def _needs(self, sequence: Sequence) -> list[int]:
        return [
            min(max_pages, group.columns(sequence.target, self._page_size))
            for max_pages, group in zip(self._max_pages, self._groups, strict=True)
        ]
