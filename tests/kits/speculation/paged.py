"""A paged cache to run models in without a runner."""

from __future__ import annotations

import numpy as np
import torch

from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.devices.cpu.device import CpuDevice


class Paged:
    """Rows of a cache whose pages are shuffled; page 0 is the null page."""

    def __init__(self, rows=3, pages=8, page_size=16, platform=None, dtype=torch.float32):
        if platform is None:
            platform = CpuDevice(threads=1)
            assert platform.select_dtype("float32", None) == torch.float32
        self.platform, self.page_size, self.dtype = platform, page_size, dtype
        self.num_pages = rows * pages + 1
        order = np.random.default_rng(3).permutation(self.num_pages - 1) + 1
        self.pages = order.reshape(rows, pages).astype(np.int32)

    def caches(self, config):
        return self.platform.cache.make(
            config.layers, self.num_pages, self.page_size, config.kv_heads, config.head_dim, self.dtype
        )

    def batch(self, spans, tokens, window=0, **more):
        """``spans``: (row, start, count) of each; ``tokens``: of all of them, one after the other."""
        rows, starts, counts = (np.array(part, dtype=np.int64) for part in zip(*spans, strict=True))
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in spans])
        token_rows = np.repeat(rows, counts)
        index = self.pages[token_rows, positions // self.page_size].astype(np.int64) * self.page_size
        decodes = 0 if more else int(np.cumprod(counts == 1).sum())
        plan = self.platform.attention.plan(
            AttentionRows(starts, counts, np.ascontiguousarray(self.pages[rows]), decodes, **more), window
        )
        return ForwardBatch(
            torch.as_tensor(tokens),
            torch.from_numpy(positions),
            torch.from_numpy(index + positions % self.page_size),
            {window: plan},
        )
