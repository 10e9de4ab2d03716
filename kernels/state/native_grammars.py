"""Lets grammars check what native steps on the CPU have sampled, mostly without masks.

The noise of a token depends on its id, not on the other tokens (decision 0002). So the winner among all tokens is also
the winner among the allowed ones, if it is allowed: most masks need not be computed. A row whose token is not allowed
is drawn again with a mask, and its next token is drawn with one at once. So are all tokens of rows with top-k, top-p or
min-p, whose cut depends on the mask, and tokens that are known to be the only ones, whose mask is one bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.step import RowError
from kernels.core.arrays import Ints, Longs, ragged
from kernels.core.operators import Draw, Draws, Masks
from kernels.grammar.slots import GrammarSlots, bit
from kernels.sampling.masks import RowMasks
from kernels.sampling.sampler import Sampler
from kernels.state.slots import SlotTable

__all__ = ["MaskedRows", "NativeChainsResult", "NativeGrammars"]


class MaskedRows:
    """Rows with a grammar of a batch: their indices ``rows`` and ``slots`` int64 [n], and their ``draws`` [n].
    ``cut`` bool [n]: rows where what is sampled can depend on the mask, even if the token drawn without one is allowed.
    ``early``: the rows that the next step draws with a mask at once, where they may have several tokens."""

    def __init__(self, rows: list[int], named: Sequence[int], draws: Draws) -> None:
        self.rows: Longs = np.array(rows, dtype=np.int64)
        self.named = [named[row] for row in rows]
        self.slots: Longs = np.array(self.named, dtype=np.int64)
        self.draws = draws
        cut = (draws["top_k"] > 0) | (draws["top_p"] < 1) | (draws["log_min_p"] > -np.inf)
        self.cut: npt.NDArray[np.bool_] = cut & (draws["temperature"] > 0)
        self._always = np.flatnonzero(self.cut).tolist()
        self.early: set[int] = set(self._always)

    def refused(self, some: list[int]) -> None:
        """The tokens of these were not allowed."""
        self.early = {*self._always, *some}


class NativeChainsResult(NamedTuple):
    """Rows whose chains were verified: the positions of their ``roots`` and the numbers of ``accepted`` tokens int64
    [rows]; row by row these ``tokens`` int32, and the tokens of the pass that they follow, ``places`` int64."""

    roots: Longs
    accepted: Longs
    tokens: Ints
    places: Longs
    failed: tuple[RowError, ...] = ()


class NativeGrammars:
    """The grammars of one runner. ``draw``: the device's."""

    def __init__(self, grammars: GrammarSlots, sampler: Sampler, draw: Draw, state: SlotTable) -> None:
        self._grammars, self._sampler, self._draw, self._state = grammars, sampler, draw, state

    def rows(self, named: tuple[int, ...], masked: list[int]) -> MaskedRows:
        """The rows ``masked`` of these slots, which are all ``unedited`` (see ``Sampler``)."""
        draws = self._sampler.draws(tuple(named[row] for row in masked), greedy=True)
        assert draws is not None
        return MaskedRows(masked, named, draws)

    def masks(self, masked: MaskedRows, rows: int) -> Masks | None:
        """Masks for a step of so many ``rows``; None if no row needs one before it is drawn."""
        lengths = self._state.known[masked.slots]
        certain = self._grammars.certain(masked.named, lengths.tolist())
        some = [at for at in masked.early if at not in certain]
        if not certain and not some:
            return None
        bits: Ints = np.full((rows, self._grammars.words), -1, dtype=np.int32)
        for at, token in certain.items():
            row = bits[masked.rows[at]]
            row[:] = 0
            row[token // 32] = bit(token)
        if some:
            chosen = np.array(some, dtype=np.int64)
            result = self._of(masked, chosen, lengths[chosen])
            if result is not None:
                bits[masked.rows[chosen]] = result.bits
        return bits

    def check(self, masked: MaskedRows, logits: Tensor, tokens: bytes) -> tuple[bytes, tuple[RowError, ...]]:
        """Replace the tokens int32 [rows] that a grammar forbids, here and in the table, whose last tokens they are.
        Also returns the rows whose grammar cannot go on. ``logits`` [rows, vocab] that they were drawn from."""
        result = np.frombuffer(tokens, dtype=np.int32)
        lengths = self._state.known[masked.slots] - 1
        refused = self._grammars.accept(masked.named, lengths.tolist(), result[masked.rows].tolist())
        masked.refused(refused)
        if refused:
            result = result.copy()
            self._draw_again(masked, np.array(refused, dtype=np.int64), lengths, logits, result)
            tokens = result.tobytes()
        return tokens, self._failed(masked)

    def check_chains(
        self, masked: MaskedRows, chains: NativeChainsResult, logits: Tensor, drafts: Sequence[list[int]] = ()
    ) -> NativeChainsResult:
        """Cut chains of accepted draft tokens behind the first token that grammars replace. The table then ends there,
        too. ``logits`` [tokens, vocab] of the pass.

        ``drafts``: of each row the chain that the pass ran, its root first; only the root where it was none. A chain
        goes on where the replacing token is its next one.
        """
        counts, tokens = chains.accepted.copy(), chains.tokens.copy()
        begins, known = np.cumsum(counts) - counts, chains.roots + 1
        going, cut = np.arange(len(masked.rows)), [np.zeros(0, dtype=np.int64)]
        for place in range(int(counts[masked.rows].max())):
            going = going[counts[masked.rows[going]] > place]
            rows = masked.rows[going]
            lengths, drawn = known[rows] + place, tokens[begins[rows] + place]
            free = np.flatnonzero(~masked.cut[going])
            refused = free[self._accept(masked, going[free], lengths[free], drawn[free])]
            checked = np.sort(np.concatenate((refused, np.flatnonzero(masked.cut[going]))))
            if not len(checked):
                continue
            places = chains.places[begins[rows] + place]
            result = self._drawn(masked, going[checked], lengths[checked], logits, places[checked])
            wrong = result != drawn[checked]
            replaced, right = checked[wrong], checked[~wrong]
            self._accept(masked, going[right], lengths[right], drawn[right])
            tokens[begins[rows[replaced]] + place] = result[wrong]
            counts[rows[replaced]] = place + 1
            cut.append(replaced)
        if (counts == chains.accepted).all() and (tokens == chains.tokens).all():
            return chains._replace(failed=self._failed(masked))
        state, kept, ends = self._state, ragged(begins, counts), known[masked.rows] + counts[masked.rows]
        assert state.here is not None
        state.here[masked.slots, ends - 1] = tokens[begins[masked.rows] + counts[masked.rows] - 1]
        borders = np.cumsum(counts)[:-1]
        emitted, places = np.split(tokens[kept], borders), np.split(chains.places[kept], borders)
        for at in np.concatenate(cut).tolist() if drafts else ():
            row = int(masked.rows[at])
            length, first = int(known[row]) + len(emitted[row]), len(emitted[row])
            after = logits[int(places[row][0]) + first :]
            more = self._go_on(masked, at, length, int(emitted[row][-1]), drafts[row][first:], after)
            emitted[row] = np.append(emitted[row], np.array(more, dtype=np.int32))
            places[row] = places[row][0] + np.arange(len(emitted[row]))
            counts[row], ends[at] = len(emitted[row]), known[row] + len(emitted[row])
        state.known[masked.slots], state.computed[masked.slots] = ends, ends - 1
        return NativeChainsResult(
            chains.roots, counts, np.concatenate(emitted), np.concatenate(places), self._failed(masked)
        )

    def _go_on(
        self, masked: MaskedRows, at: int, length: int, last: int, drafts: list[int], logits: Tensor
    ) -> list[int]:
        """The tokens that follow ``last``, the last of ``length`` tokens of a masked row, as far as ``drafts`` predicts
        it and them, and one more. ``logits`` [drafts .., vocab]: those after each of ``drafts``."""
        here, slot, result = self._state.here, masked.named[at], list[int]()
        assert here is not None
        for node, token in enumerate(drafts):
            if token != last:
                break
            lengths, places = np.array([length + node]), np.array([node])
            last = int(self._drawn(masked, np.array([at]), lengths, logits, places)[0])
            here[slot, length + node] = last
            result.append(last)
        return result

    def _accept(self, masked: MaskedRows, some: Longs, lengths: Longs, tokens: Ints | Longs) -> list[int]:
        named = masked.slots[some].tolist()
        return self._grammars.accept(named, lengths.tolist(), tokens.tolist())

    def _failed(self, masked: MaskedRows) -> tuple[RowError, ...]:
        generation, result = self._state.generation, self._grammars.errors(masked.named)
        return tuple(RowError(slot, int(generation[slot]), why, invalid=True) for slot, why in result.items())

    def _of(self, masked: MaskedRows, some: Longs, lengths: Longs) -> RowMasks | None:
        """The masks of the rows ``some`` after so many tokens."""
        return self._grammars.masks(masked.slots[some].tolist(), lengths.tolist()).masks

    def _draw_again(self, masked: MaskedRows, some: Longs, lengths: Longs, logits: Tensor, found: Ints) -> None:
        """Draw the rows ``some`` of the masked ones with their masks, into ``found`` and the table."""
        rows, known = masked.rows[some], lengths[some]
        assert self._state.here is not None
        found[rows] = drawn = self._drawn(masked, some, known, logits, rows)
        self._state.here[masked.slots[some], known] = drawn
        self._accept(masked, some, known, drawn)  # now, while the texts' state is in the processor's cache

    def _drawn(self, masked: MaskedRows, some: Longs, lengths: Longs, logits: Tensor, places: Longs) -> Longs:
        """The tokens of the rows ``some`` that follow ``lengths`` tokens, drawn from ``places`` of the logits with
        masks. The logits of other tokens are overwritten."""
        masks = self._of(masked, some, lengths)
        assert masks is not None
        at = torch.from_numpy(lengths)
        drawn = self._draw(logits, masked.draws[some], at, None, logits.shape[1], masks.bits, places)
        assert drawn is not None, "the device recorded the pass"
        tokens: Longs = drawn[0].numpy()
        broken = drawn[1].numpy()
        if broken.any():
            for place in np.flatnonzero(broken).tolist():
                self._grammars.fail(masked.named[some[place]], "the model gives no token that it allows a finite logit")
        return tokens
