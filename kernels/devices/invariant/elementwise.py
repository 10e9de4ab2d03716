"""Functions of single numbers, and sums, that give a token the same bits wherever it stands in a step.

Additions, multiplications, divisions and roundings are exact everywhere. Other functions (``exp``, ``sin``) are
approximations, and a library may use one for whole vectors and another for the rest at the end, or where it divides the
numbers among threads. ``by_lines`` leaves no such rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

__all__ = ["by_lines", "pairwise_sum"]

_LINE: Final = 64
"""Numbers: a multiple of every vector, also where loops take two at a time. A line holds numbers of one token only."""
_CALL: Final = 1 << 14
"""Numbers in a call: PyTorch divides none of fewer than 2^15 among threads."""


def by_lines(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of each number of ``x`` [..., width], in float32. ``function`` works in place."""
    width = x.shape[-1]
    lines = -(-width // _LINE) * _LINE
    held = torch.zeros((*x.shape[:-1], lines), dtype=torch.float32, device=x.device)
    held[..., :width] = x
    for part in held.view(-1).split(_CALL):
        function(part)
    return held[..., :width]


def pairwise_sum(x: Tensor) -> Tensor:
    """Sums [...] of ``x`` [..., width]: the halves are added number by number until one number is left."""
    while (width := x.shape[-1]) > 1:
        half = width // 2
        halves = x[..., :half] + x[..., half : 2 * half]
        if width % 2:
            halves[..., :1] += x[..., 2 * half :]
        x = halves
    return x.squeeze(-1)
