"""Operators that a platform makes: the forms in which others call them."""

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
    "Begun",
    "Candidates",
    "Cut",
    "Draw",
    "Draws",
    "Greedy",
    "Linear",
    "Lookup",
    "Norm",
    "Unadded",
]

Linear = Callable[[Tensor], Tensor]
"""``[tokens, inputs] -> [tokens, outputs]``, with the weight in the layout that the platform likes."""

Lookup = Callable[[Tensor], Tensor]
"""ids int [tokens] -> their rows [tokens, hidden] of a table."""

Cut = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""``(logits, rows, row_max, temperature, top_k, top_p, largest_k)`` -> the values and ids that ``nucleus.cut`` finds.

Called for rows that all have a top-k of 1 to 1024, or have none (``largest_k`` 0).
"""

Greedy = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Logits [rows, vocab] -> the likeliest token ids int64 [rows], and ``Sampled.broken``; a token is 0 in such a row."""

Candidates = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Logits [rows, vocab] and how many -> the likeliest ids int64 and their log-probabilities float32 [rows, so many], the
best first, of equals the lowest id."""

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

Draw = Callable[[Tensor, Draws, Tensor, Tensor | None, int], tuple[Tensor, Tensor] | None]
"""``(logits [rows, vocab], draws [rows], positions int64 [rows], ids, vocab)`` -> what ``Greedy`` finds, sampled. None:
not of such logits, or not yet.

``ids`` int64: the tokens that logits are of, of ``vocab`` in all, whose noise counts; None: their own indices.
"""


@dataclass(frozen=True)
class Acceptance:
    """What ``Platform.accept`` found, ``packed`` int64 [rows, n] so that one copy brings it to the host, and the
    ``rows`` int64 [rows, 4] that were asked for, in the device's own memory."""

    packed: Tensor
    levels: int
    rows: Tensor

    @staticmethod
    def width(levels: int) -> int:
        """Of ``packed``."""
        return 2 + 2 * levels + -(-levels // 8)

    @property
    def outcome(self) -> Tensor:
        """int64 [rows, 2 + levels], as ``Verified.outcome``."""
        return self.packed[:, : 2 + self.levels]

    @property
    def tokens(self) -> Tensor:
        """int64 [rows, levels]: after each node passed."""
        return self.packed[:, 2 + self.levels : 2 + 2 * self.levels]

    @property
    def broken(self) -> Tensor:
        """bool [rows, levels]: whether what was sampled there is not to be used."""
        return self.packed[:, 2 + 2 * self.levels :].view(torch.bool)[:, : self.levels]

    def of(self, count: int) -> Acceptance:
        """Of the first ``count`` rows."""
        return Acceptance(self.packed[:count], self.levels, self.rows[:count])

    def here(self, packed: Tensor) -> Acceptance:
        """The same with ``packed`` on the host."""
        return Acceptance(packed, self.levels, self.rows)


class Norm(Protocol):
    """A norm with its weight in the form that the platform likes."""

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of ``x``, in its dtype."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``s = x + residual``; returns the norm of s, and s. May overwrite both inputs."""
        ...


class Begun:
    """What a platform has of the norm of a residual stream whose last sum is made; see ``Unadded``."""


Unadded = Tensor | Begun | None
"""What is still to be added to a residual stream [tokens, hidden]: so much; or nothing any more, of which the next norm
may be begun."""
