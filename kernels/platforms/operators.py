"""Operators that a platform makes: the forms in which others call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

__all__ = ["Cut", "Greedy", "Linear", "Lookup", "Norm"]

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


class Norm(Protocol):
    """A norm with its weight in the form that the platform likes."""

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of ``x``, in its dtype."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``s = x + residual``; returns the norm of s, and s. May overwrite both inputs."""
        ...
