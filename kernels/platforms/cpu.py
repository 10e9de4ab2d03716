"""The CPU platform: plain torch operators, bf16 through oneDNN (AMX where the processor has it), and fp32."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from kernels.cpu.attention import AttentionPlan, AttentionPlanner, paged_attention
from kernels.cpu.host import host_memory, usable_cores
from kernels.cpu.linear import make_linear
from kernels.platforms.base import AttentionRows, Linear, Memory, Platform, PlatformError

__all__ = ["CpuPlatform"]


class CpuPlatform(Platform):
    """A layer's cache is one tensor [pages, page_size, 2, kv_heads, head_dim]: a page's keys and values are gathered
    by one copy. Its memory comes from the system zeroed and is taken only as pages are first written.

    ``threads``: intra-op threads, 0 for one a usable core.
    """

    name = "cpu"
    default_memory_fraction = 0.25
    default_cache_tokens = 131072

    def __init__(self, threads: int = 0) -> None:
        self.device = torch.device("cpu")
        self.threads = threads or usable_cores()
        self._planner: AttentionPlanner | None = None

    def bind_thread(self) -> None:
        torch.set_num_threads(self.threads)  # OpenMP keeps it by calling thread

    def memory(self) -> Memory:
        return host_memory()

    def dtype(self, requested: str, stored: str | None) -> torch.dtype:
        if requested == "auto":
            fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
            return torch.float32 if stored in (None, "float32") or not fast else torch.bfloat16
        if requested not in ("bfloat16", "float32"):
            raise PlatformError(f"dtype {requested!r} is not supported on cpu; use auto, bfloat16 or float32")
        return torch.bfloat16 if requested == "bfloat16" else torch.float32

    def empty_host_state(self, *shape: int) -> Tensor:
        return torch.from_numpy(np.zeros(shape, dtype=np.int32))

    def make_cache(
        self, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> list[Tensor]:
        self._planner = AttentionPlanner(page_size, kv_heads, dtype)
        shape = (layers, pages, page_size, 2, kv_heads, head_dim)
        # numpy's zeros come untouched from the system, torch's are written.
        memory = np.zeros(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, dtype=np.uint8)
        return list(torch.from_numpy(memory).view(dtype).view(shape).unbind(0))

    def clear_pages(self, caches: list[Tensor], pages: list[int]) -> None:
        for cache in caches:
            cache[pages] = 0

    def make_linear(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
        return make_linear(weight, bias, shared)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dim() == 1:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x, weight.shape[-1:], None, eps).mul_(weight)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = residual.add_(x)
        return F.rms_norm(residual, weight.shape, weight, eps), residual

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, out=out)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def write_cache(self, cache: Tensor, index: Tensor, keys_values: Tensor) -> None:
        cache.view(-1, *keys_values.shape[1:]).index_copy_(0, index, keys_values)

    def plan_attention(self, rows: AttentionRows, window: int) -> AttentionPlan:
        assert self._planner is not None, "make_cache comes first"
        return self._planner.plan(rows, window)

    def attention(self, queries: Tensor, cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        return paged_attention(queries, cache, plan, scale)
