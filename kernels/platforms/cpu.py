"""The CPU platform: plain torch operators, bf16 through oneDNN (AMX where the processor has it), and fp32."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from kernels.cpu.attention import AttentionPlan, AttentionPlanner, paged_attention
from kernels.cpu.host import host_memory, usable_cores
from kernels.cpu.linear import bf16_is_fast, make_linear
from kernels.cpu.norm import CpuNorm
from kernels.platforms.base import AttentionRows, Linear, Memory, Norm, Platform, PlatformError

__all__ = ["CpuPlatform"]


class CpuPlatform(Platform):
    """A layer's cache is one tensor [pages, page_size, 2, kv_heads, head_dim]: a page's keys and values are gathered
    by one copy. Its memory comes from the system zeroed and is taken only as pages are first written.

    ``threads``: intra-op threads. 0: one a usable core, less one that is left to the event loop, because a step is as
    slow as its slowest thread: on two busy cores one thread decodes nearly twice as fast as two.
    ``ranks``: how many processes run the model together on this host and share its cores and its memory.
    """

    name = "cpu"
    collectives = "gloo"
    default_memory_fraction = 0.25
    default_cache_tokens = 131072

    def __init__(self, threads: int = 0, ranks: int = 1) -> None:
        self.device = torch.device("cpu")
        self.threads = threads or max(1, (usable_cores() - 1) // ranks)
        self._ranks = ranks
        self._planner: AttentionPlanner | None = None

    def bind_thread(self) -> None:
        torch.set_num_threads(self.threads)  # OpenMP keeps it by calling thread

    def memory(self) -> Memory:
        host = host_memory()
        return Memory(total=host.total // self._ranks, free=host.free // self._ranks)

    def dtype(self, requested: str, stored: str | None) -> torch.dtype:
        if requested == "auto":
            return torch.float32 if stored in (None, "float32") or not bf16_is_fast() else torch.bfloat16
        if requested not in ("bfloat16", "float32"):
            raise PlatformError(f"dtype {requested!r} is not supported on cpu; use auto, bfloat16 or float32")
        return torch.bfloat16 if requested == "bfloat16" else torch.float32

    def empty_host_state(self, *shape: int) -> Tensor:
        return torch.from_numpy(np.zeros(shape, dtype=np.int32))

    def make_cache(
        self, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> list[Tensor]:
        self._planner = AttentionPlanner(page_size, kv_heads, dtype)
        shape = (pages, page_size, 2, kv_heads, head_dim)

        def zeros() -> Tensor:  # numpy's come untouched from the system, torch's are written
            memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
            return torch.from_numpy(memory).view(dtype).view(shape)

        return [zeros() for _ in range(layers)]

    def clear_pages(self, caches: list[Tensor], pages: list[int]) -> None:
        for cache in caches:
            cache[pages] = 0

    def make_linear(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
        return make_linear(weight, bias, shared)

    def make_norm(self, weight: Tensor, eps: float) -> Norm:
        return CpuNorm(weight, eps)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        swapped = x.unflatten(-1, (2, -1)).flip(-2).view(x.shape)
        torch.addcmul(x * cos, swapped, sin, out=out)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return F.silu(x[:, :half]).mul_(x[:, half:])

    def write_cache(self, cache: Tensor, index: Tensor, keys_values: Tensor) -> None:
        cache.view(-1, *keys_values.shape[1:]).index_copy_(0, index, keys_values)

    def plan_attention(self, rows: AttentionRows, window: int) -> AttentionPlan:
        assert self._planner is not None, "make_cache comes first"
        return self._planner.plan(rows, window)

    def attention(self, queries: Tensor, cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        return paged_attention(queries, cache, plan, scale)
