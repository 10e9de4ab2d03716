"""The results of tasks that make vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

__all__ = ["activated", "normalized"]

Put = Callable[[Any], Tensor]
"""``DeviceMemory.put``."""


def normalized(vectors: Tensor, wanted: Sequence[bool], put: Put) -> Tensor:
    """``vectors`` [rows, n] in float32, those that are ``wanted`` so of length 1."""
    wide = vectors.float()
    lengths = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp_min(1e-12)
    return torch.where(_column(wanted, put), wide / lengths, wide)


def activated(
    numbers: Tensor, activation: Literal["softmax", "sigmoid", "none"], wanted: Sequence[bool], put: Put
) -> Tensor:
    """``numbers`` [rows, labels] in float32, those that are ``wanted`` so as probabilities."""
    wide = numbers.float()
    if activation == "none":
        return wide
    result = wide.softmax(-1) if activation == "softmax" else wide.sigmoid()
    return torch.where(_column(wanted, put), result, wide)


def _column(flags: Sequence[bool], put: Put) -> Tensor:
    return put(np.array(flags, dtype=np.int64)).bool().unsqueeze(1)
