"""Weights in the blocks of GGUF files."""

from __future__ import annotations

import numpy as np
import torch

from kernels.weights.gguf.blocks import KINDS
from kernels.weights.quantization.gguf_weight import BlockRows, GgufWeight

__all__ = [
    "KIND",
    "weight_of",
]

KIND = {kind.name: kind for kind in KINDS.values()}


def weight_of(name, outputs, inputs, seed=0):
    """Random codes and integers, with small scales."""
    kind, generator = KIND[name], np.random.default_rng(seed)
    data = generator.integers(0, 256, (outputs, inputs // kind.block, kind.size), np.uint8)
    for at in kind.halves:
        halves = (generator.standard_normal((*data.shape[:2], 1)) * 0.01).astype(np.float16)
        data[:, :, at : at + 2] = halves.view(np.uint8)
    return GgufWeight((BlockRows(kind, torch.from_numpy(data)),))
