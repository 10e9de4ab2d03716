"""Layers of experts of a draft model that ranks of data-parallel attention share.

How many passes a draft needs in a step is known only in its part of attention: it depends on accepted tokens and on how
deep requests draft. The parts therefore agree on the tokens of each pass when its first layer of experts begins, and a
part that has finished its own passes takes part in those of the others until all have finished.
"""

from __future__ import annotations

import torch

from kernels.distributed.shared_experts import SharedExperts

__all__ = ["DraftExperts"]

_FINISHED = -1


class DraftExperts(SharedExperts):
    """``SharedExperts`` of a draft, each of whose passes runs all of its layers of experts.

    Every rank calls ``finish`` once a step, after the draft passes of the step.
    """

    _left = 0
    """Layers of the current pass that have not begun."""

    def set_width(self, hidden: int) -> None:
        """The draft's hidden size, if it is not that of the constructor."""
        self._nothing = self._nothing.new_empty((0, hidden))

    def tokens(self, rows: int) -> tuple[int, ...]:
        if not self._left:
            self._begin(rows)
        self._left -= 1
        return super().tokens(rows)

    def finish(self) -> None:
        """Take part in the draft passes of the other parts until every part has finished."""
        while self._begin(_FINISHED):
            self.run_empty()

    def _begin(self, rows: int) -> bool:
        """Agree on the tokens of each part in the next pass. Returns whether there is one; waits for all parts."""
        own = torch.tensor([[rows]], dtype=torch.int64, device=self._nothing.device)
        found = self.across.all_gather_rows(own).flatten().tolist()
        if max(found) == _FINISHED:
            return False
        self.enter(tuple(max(count, 0) for count in found))
        self._left = len(self.layers)
        return True
