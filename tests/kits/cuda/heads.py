"""Heads of queries, keys and values that a projection places."""

from __future__ import annotations

import torch

from kernels.devices.cuda.elementwise.norm_rope_cache import norm_rope_cache

__all__ = ["HEADS", "KV_HEADS", "Places", "step"]

HEADS, KV_HEADS, PAGE, PAGES = 4, 2, 16, 5


class Places:
    """A platform that counts the tokens it places."""

    def __init__(self) -> None:
        self.placed: list[int] = []

    def norm_rope_cache(self, qkv, heads, norm, cos, sin, cache, index):
        self.placed.append(len(qkv))
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        norm_rope_cache(qkv, heads, KV_HEADS, weight, eps, cos, sin, cache, index)
        return qkv[:, :heads]


def step(device, dtype, dim, inputs, tokens=1):
    angle = torch.rand(tokens, 1, dim // 2) * 6
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
    x, residual = torch.randn(2, tokens, inputs)
    cache = torch.zeros(PAGES, 2, KV_HEADS, PAGE, dim)
    index = torch.randperm(PAGES * PAGE)[:tokens]
    return *(part.to(dtype).to(device) for part in (x, residual, cos, sin, cache)), index.to(device)
