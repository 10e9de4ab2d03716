"""Lets grammars judge what native steps on the CPU have sampled, mostly without masks.

The noise of a token depends on its id, not on the other tokens (decision 0002). So the winner among all tokens is also
the winner among the allowed ones, if it is allowed: most masks need not be computed. A row whose token is not allowed
is drawn again with a mask, and its next token is drawn with one at once. So are all tokens of rows with top-k, top-p or
min-p, whose cut depends on the mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.contract.step import RowError
from kernels.core.arrays import Ints, Longs
from kernels.core.operators import Draw, Draws, Masks
from kernels.execution.pending_step import StepContext
from kernels.grammar.slots import GrammarSlots
from kernels.sampling.masks import RowMasks
from kernels.sampling.sampler import Sampler
from kernels.state.slots import SlotTable

__all__ = ["HostGrammars", "MaskedRows"]


class MaskedRows:
    """The rows with a grammar of a batch: their indices ``rows`` and ``slots`` int64 [n], and their ``draws`` [n].
    ``early``: which of them the next step draws with a mask at once."""

    def __init__(self, rows: list[int], named: Sequence[int], draws: Draws) -> None:
        self.rows: Longs = np.array(rows, dtype=np.int64)
        self.named = [named[row] for row in rows]
        self.slots: Longs = np.array(self.named, dtype=np.int64)
        self.draws = draws
        cuts = (draws["top_k"] > 0) | (draws["top_p"] < 1) | (draws["log_min_p"] > -np.inf)
        self._cuts: set[int] = set(np.flatnonzero(cuts & (draws["temperature"] > 0)).tolist())
        self.early = sorted(self._cuts)

    def others(self) -> list[int]:
        """Those that are not ``early``."""
        early = set(self.early)
        return [at for at in range(len(self.named)) if at not in early]

    def refused(self, some: list[int]) -> None:
        """The tokens of these were not allowed."""
        self.early = sorted(self._cuts.union(some))


class HostGrammars:
    """The grammars of one runner. ``draw``: the device's."""

    def __init__(self, grammars: GrammarSlots, sampler: Sampler, draw: Draw, state: SlotTable) -> None:
        self._grammars, self._sampler, self._draw, self._state = grammars, sampler, draw, state

    @classmethod
    def make(cls, context: StepContext) -> HostGrammars | None:
        """None: requests have no grammars, or the device draws no tokens."""
        loaded = context.loaded
        draw = loaded.device.sampling.draw
        if loaded.grammars is None or draw is None:
            return None
        return cls(loaded.grammars, loaded.sampler, draw, loaded.slots)

    def rows(self, named: tuple[int, ...], masked: list[int]) -> MaskedRows:
        """The rows ``masked`` of these slots, which are all ``raced`` (see ``Sampler``)."""
        draws = self._sampler.draws(tuple(named[row] for row in masked), greedy=True)
        assert draws is not None
        return MaskedRows(masked, named, draws)

    def masks(self, masked: MaskedRows, rows: int) -> Masks | None:
        """Masks for a step of so many ``rows``; None if no row needs one before it is drawn."""
        if not masked.early:
            return None
        found = self._of(masked, np.array(masked.early, dtype=np.int64), self._state.known[masked.slots])
        if found is None:
            return None
        bits: Ints = np.full((rows, found.bits.shape[1]), -1, dtype=np.int32)
        bits[masked.rows[masked.early]] = found.bits
        return bits

    def judge(self, masked: MaskedRows, logits: Tensor, tokens: bytes) -> tuple[bytes, tuple[RowError, ...]]:
        """Replace the tokens int32 [rows] that a grammar forbids, here and in the table, whose last tokens they are.
        Also returns the rows whose grammar cannot go on. ``logits`` [rows, vocab] that they were drawn from."""
        state, found = self._state, np.frombuffer(tokens, dtype=np.int32)
        lengths = state.known[masked.slots] - 1
        known, drawn, early = lengths.tolist(), found[masked.rows].tolist(), masked.early
        if early:
            some = masked.others()
            given = ([each[at] for at in some] for each in (masked.named, known, drawn))
            refused = [some[at] for at in self._grammars.accept(*given)]
        else:
            refused = self._grammars.accept(masked.named, known, drawn)
        masked.refused(refused)
        if refused:
            found = found.copy()
            self._draw_again(masked, np.array(refused, dtype=np.int64), lengths, logits, found)
            tokens = found.tobytes()
        failed = self._grammars.errors(masked.named)
        return tokens, tuple(RowError(slot, int(state.generation[slot]), why) for slot, why in failed.items())

    def _of(self, masked: MaskedRows, some: Longs, lengths: Longs) -> RowMasks | None:
        return self._grammars.masks(masked.slots[some].tolist(), lengths[some].tolist()).masks

    def _draw_again(self, masked: MaskedRows, some: Longs, lengths: Longs, logits: Tensor, found: Ints) -> None:
        """Draw the rows ``some`` of the masked ones with their masks, into ``found`` and the table."""
        state, rows, known = self._state, masked.rows[some], lengths[some]
        masks = self._of(masked, some, lengths)
        if masks is None:
            return
        assert state.here is not None
        chosen, at = logits.index_select(0, torch.from_numpy(rows)), torch.from_numpy(known)
        drawn = self._draw(chosen, masked.draws[some], at, None, chosen.shape[1], masks.bits)
        assert drawn is not None, "the device recorded the pass"
        tokens = drawn[0].numpy()
        for place in np.flatnonzero(drawn[1].numpy()).tolist():  # every allowed token has the logit -inf
            tokens[place] = int(np.unpackbits(masks.bits[place].view(np.uint8), bitorder="little").argmax())
        found[rows] = tokens
        state.here[masked.slots[some], known] = tokens
