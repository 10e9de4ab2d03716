"""The rows of a step, in the order in which the model runs them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.contract.step import RowError
from kernels.core.arrays import Longs
from kernels.core.tree import Drafts
from kernels.devices.memory import PendingCopies
from kernels.state.slots import SlotTable

__all__ = ["PrefilledRows", "StepRows"]


class StepRows:
    """Decodes, then rows that verify draft tokens, then prefills.

    ``rows`` int64: their index in the message. ``slots``. ``counts``: tokens that each runs, draft tokens among them.
    ``starts``: the position of the first. ``offsets``: its place in the batch. ``drafts``: the trees of the rows that
    verify, one each; None when none does. ``fetched``: their tokens and parents on the host, for grammars.
    """

    def __init__(self, rows: Longs, slots: Longs, counts: Longs, state: SlotTable) -> None:
        self.rows = rows
        self.slots = slots
        self.counts = counts
        self.starts: Longs = state.computed[slots]
        self.offsets: Longs = np.cumsum(counts) - counts
        longer = np.flatnonzero(counts != 1)
        self.decodes = int(longer[0]) if len(longer) else len(counts)
        self.verifies = 0
        self.drafts: Drafts | None = None
        self.fetched: PendingCopies | None = None

    def with_drafts(self, verifying: Longs, drafts: Drafts, fetched: PendingCopies | None = None) -> StepRows:
        """The same rows, of which the decodes ``verifying`` run the first ``drafts.nodes`` of their trees."""
        others = np.ones(self.decodes, dtype=bool)
        others[verifying] = False
        order = np.concatenate((np.flatnonzero(others), verifying, np.arange(self.decodes, len(self.rows))))
        result = object.__new__(StepRows)
        result.rows, result.slots, result.starts = self.rows[order], self.slots[order], self.starts[order]
        result.counts = self.counts[order]
        result.decodes, result.verifies, result.drafts = self.decodes - len(verifying), len(verifying), drafts
        result.counts[result.verifying] = drafts.nodes
        result.fetched = fetched
        result.offsets = np.cumsum(result.counts) - result.counts
        return result

    @property
    def verifying(self) -> slice:
        """The rows that verify draft tokens."""
        return slice(self.decodes, self.decodes + self.verifies)

    @property
    def verified_tokens(self) -> slice:
        """The tokens of the verifying rows in the batch."""
        verified = self.counts[self.verifying]
        first = self.decodes
        return slice(first, first + int(verified.sum()))

    @property
    def last(self) -> Longs:
        """Index in the batch of each row's last token."""
        return self.offsets + self.counts - 1

    def certain(self) -> Longs:
        """Tokens of each row that the step certainly computes. Accepted draft tokens are counted later."""
        if not self.verifies:
            return self.counts
        certain = self.counts.copy()
        certain[self.verifying] = 0
        return certain


@dataclass(frozen=True, eq=False)
class PrefilledRows:
    """Rows that ran to their last known token, and sampled the next one: prompts, their ends, and decodes.

    ``tokens``: int32 [rows], what each row sampled. Row r ran ``counts[r]`` tokens of ``slots[r]`` from position
    ``starts[r]`` on, int64 [rows]. ``features`` [tokens, n]: features of these tokens, as their bits, row after row.
    ``failed``: rows whose grammar cannot go on.
    """

    tokens: bytes
    slots: Longs
    starts: Longs
    counts: Longs
    features: npt.NDArray[np.int16]
    failed: tuple[RowError, ...] = ()
