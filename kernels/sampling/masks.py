"""Masks of tokens: which tokens some rows of a batch may sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.core.operators import MaskLogits

__all__ = ["RowMasks"]

_POWERS = (1 << np.arange(32, dtype=np.int64)).astype(np.uint32).view(np.int32)


@dataclass(frozen=True, eq=False)
class RowMasks:
    """Allowed tokens of the rows ``rows`` int64 [n], ascending: ``bits`` int32 [n, words], a bit a token, the lowest
    first. Other rows may sample every token. ``put``: copies an array to the device."""

    rows: npt.NDArray[np.int64]
    bits: npt.NDArray[np.int32]
    put: Callable[[npt.NDArray[Any]], Tensor]

    def apply(self, logits: Tensor, own: MaskLogits | None = None) -> None:
        """Set the logits of forbidden tokens to -inf, in ``logits`` [all rows, vocab] of any floating dtype. ``own``:
        the device's kernel for it."""
        if own is not None and logits.is_contiguous():
            own(logits, self.put(np.concatenate((self.rows[:, None].astype(np.int32), self.bits), axis=1)))
            return
        vocab, here = logits.shape[1], logits.device.type == "cpu"
        forbidden = self.unpack(vocab) if here else self.unpack_on_device(vocab)
        if len(self.rows) == len(logits):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            rows = self.put(self.rows)
            logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf))

    def restore(self, logits: Tensor, source: Tensor) -> None:
        """Copy the rows from ``source``."""
        rows = self.put(self.rows)
        logits.index_copy_(0, rows, source.index_select(0, rows))

    def of_row(self, row: int) -> RowMasks | None:
        """The mask of one row, as a batch of its own."""
        at = int(np.searchsorted(self.rows, row))
        if at == len(self.rows) or self.rows[at] != row:
            return None
        return RowMasks(np.zeros(1, dtype=np.int64), self.bits[at : at + 1], self.put)

    def unpack(self, vocab: int) -> Tensor:
        """Which tokens are forbidden, bool [n, vocab], in the host's memory."""
        bits = np.unpackbits((~self.bits).view(np.uint8), axis=1, count=vocab, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))

    def unpack_on_device(self, vocab: int) -> Tensor:
        """The same on the device, to which the packed bits are copied."""
        words, powers = self.put(self.bits), self.put(_POWERS)
        return ((words.unsqueeze(-1) & powers) == 0).flatten(1)[:, :vocab]
