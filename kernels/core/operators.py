"""Signatures of the operators that devices implement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "DRAWS",
    "Acceptance",
    "Candidates",
    "Draw",
    "Draws",
    "Greedy",
    "Linear",
    "Lookup",
    "MaskLogits",
    "Masks",
    "Norm",
    "NormInProgress",
    "PendingResidual",
    "TopKTopP",
]

Linear = Callable[[Tensor], Tensor]
"""``[tokens, inputs] -> [tokens, outputs]``, with the weight in the layout that the device prefers."""

Lookup = Callable[[Tensor], Tensor]
"""ids int [tokens] -> their rows [tokens, hidden] of a table."""

TopKTopP = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""``(logits, rows, row_max, temperature, top_k, top_p, largest_k)`` -> the values and ids that ``nucleus.cut`` finds.

Called for rows that all have a top-k of 1 to 1024, or have none (``largest_k`` 0).
"""

Greedy = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Logits [rows, vocab] -> each row's argmax int64 [rows], and ``SampledTokens.nonfinite``; a token is 0 in such a
row."""

Candidates = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Logits [rows, vocab] and a count -> the best ids int64 and their log-probabilities float32, both [rows, count], the
best first; of equals the lowest id first."""

DRAWS = np.dtype(
    [
        ("keys", np.int32, 2),
        ("temperature", np.float32),
        ("log_min_p", np.float32),
        ("top_p", np.float64),
        ("top_k", np.int64),
    ]
)
"""How a row is sampled: ``keys`` are its seed's, a ``temperature`` of 0 is greedy, a ``top_k`` of 0 is none."""

Draws = npt.NDArray[Any]
"""Rows of ``DRAWS``."""

Masks = npt.NDArray[np.int32]
"""The tokens that each row may sample, [rows, words]: a bit a token, the lowest first."""


MaskLogits = Callable[[Tensor, Tensor], None]
"""Sets forbidden tokens of logits [rows, vocab] to -inf. Packed int32 [n, 1 + words]: a row and its ``Masks``."""


class Draw(Protocol):
    """Samples whole rows."""

    def __call__(
        self,
        logits: Tensor,
        draws: Draws,
        positions: Tensor,
        ids: Tensor | None,
        vocab: int,
        masks: Masks | None = None,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Logits [rows, vocab], draws [rows], positions int64 [rows] -> what ``Greedy`` finds, sampled. None: not of
        such logits, or not yet.

        ``ids`` int64: the tokens that logits are of, of ``vocab`` in all, whose noise counts; None: their own indices.
        ``masks``: of the rows; the logits of other tokens are overwritten. ``rows``: of the logits, those that are
        drawn from; None: all.
        """
        ...


@dataclass(frozen=True)
class Acceptance:
    """What ``DraftKernels.accept`` found, ``packed`` int64 [rows, n] so that one copy brings it to the host, and the
    ``rows`` int64 [rows, 4] that were asked for, in the device's own memory."""

    packed: Tensor
    levels: int
    rows: Tensor

    @staticmethod
    def width(levels: int) -> int:
        """The width of ``packed``."""
        return 2 + 2 * levels + -(-levels // 8)

    @property
    def outcome(self) -> Tensor:
        """int64 [rows, 2 + levels], as ``VerifyResult.outcome``."""
        return self.packed[:, : 2 + self.levels]

    @property
    def tokens(self) -> Tensor:
        """int64 [rows, levels]: after each node passed."""
        return self.packed[:, 2 + self.levels : 2 + 2 * self.levels]

    @property
    def nonfinite(self) -> Tensor:
        """bool [rows, levels]: whether the token sampled there is invalid."""
        return self.packed[:, 2 + 2 * self.levels :].view(torch.bool)[:, : self.levels]

    def first_rows(self, count: int) -> Acceptance:
        """The results of the first ``count`` rows."""
        return Acceptance(self.packed[:count], self.levels, self.rows[:count])

    def on_host(self, packed: Tensor) -> Acceptance:
        """The same with ``packed`` on the host."""
        return Acceptance(packed, self.levels, self.rows)


class Norm(Protocol):
    """A norm with its weight in the layout that the device prefers."""

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of ``x``, in its dtype."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``s = x + residual``; returns the norm of s, and s. May overwrite both inputs."""
        ...


class NormInProgress:
    """The norm of a complete residual stream, as far as a device has computed it; see ``PendingResidual``."""


PendingResidual = Tensor | NormInProgress | None
"""The summand that a residual stream [tokens, hidden] still lacks; or, if it lacks none, the beginning of the next norm
or None."""
