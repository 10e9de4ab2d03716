"""Prefixes under computation: a sequence that shares one waits for it."""

from __future__ import annotations

from actors.scheduling.sequence import Sequence

__all__ = ["InFlightPrefixes"]


class InFlightPrefixes:
    """Running sequences with prompt pages that the prefix cache does not know yet, by salt and first page."""

    def __init__(self, page_size: int, shared_pages: int = 1) -> None:
        """``shared_pages``: prefixes are shared by so many pages at a time, from one snapshot of states to the next."""
        self._page_bytes = 4 * page_size
        self._shared_pages = shared_pages
        self._prefills: dict[tuple[bytes, bytes], list[Sequence]] = {}

    def add(self, sequence: Sequence) -> None:
        """Add an admitted sequence, unless it has less than a page of its own to share."""
        if len(sequence.spec.prompt) < self._page_bytes:
            return
        sequence.first_page = (sequence.spec.salt, sequence.spec.prompt[: self._page_bytes])
        self._prefills.setdefault(sequence.first_page, []).append(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence whose prompt is cached or that no longer runs."""
        group = self._prefills.get(sequence.first_page)
        if group is not None and sequence in group:
            group.remove(sequence)
            if not group:
                del self._prefills[sequence.first_page]

    def computes_for(self, waiting: Sequence) -> bool:
        """Whether another sequence is computing full pages of the prefix of ``waiting``.

        Running prefills come before the queue, so this wait is no longer than the one for budget and pages.
        """
        if not self._prefills or waiting.scores_prompt:
            return False
        group = self._prefills.get((waiting.spec.salt, waiting.spec.prompt[: self._page_bytes]))
        if group is None:
            return False
        prompt, pages = waiting.spec.prompt, self._shared_pages
        size = self._page_bytes * pages
        usable = min(len(prompt), 4 * (waiting.length - 1)) // size
        return any(_shares(prefill.spec.prompt, prompt, prefill.shared // pages, usable, size) for prefill in group)


def _shares(prefill: bytes, waiting: bytes, shared: int, usable: int, size: int) -> bool:
    """Whether both prompts fill the page after the ``shared`` first ones and are equal up to its end."""
    end = (shared + 1) * size
    return shared < usable and len(prefill) >= end and prefill[:end] == waiting[:end]
