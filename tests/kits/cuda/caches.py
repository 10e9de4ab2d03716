"""Paged caches for tests of attention kernels."""

from __future__ import annotations

import torch

__all__ = [
    "SHAPES",
    "Caches",
    "near",
]


class Caches:
    """What ``made`` needs of a platform, also where there is no GPU."""

    def __init__(self, device):
        self.device = device
        self.cache = self  # the capability, too

    def make(self, layers, pages, page_size, kv_heads, dim, dtype):
        return [torch.zeros(pages, 2, kv_heads, page_size, dim, dtype=dtype, device=self.device) for _ in range(layers)]

    def write(self, cache, index, keys_values):
        page_size = cache.shape[3]
        cache[index // page_size, :, :, index % page_size] = keys_values.unflatten(1, (2, -1))


def near(found, expected):
    limit = 2e-5 if found.dtype == torch.float32 else 1e-2
    found, expected = found.float().cpu(), expected.float().cpu()
    assert torch.isfinite(found).all()
    assert (found - expected).norm() <= limit * expected.norm()


SHAPES = {
    "drafts": {"drafts": ((40, 6), (5, 6), (0, 6), (300, 6))},
    "counts": {"drafts": ((33, 7), (15, 1), (16, 2), (62, 7))},
    "long": {"drafts": ((30, 64), (400, 64))},
    "mixed": {"decodes": (3, 200), "drafts": ((31, 5), (120, 9)), "prefills": ((0, 12), (40, 30))},
    "drafting": {"drafts": ((45, 9), (16, 9), (0, 9)), "drafted": 5},
}
