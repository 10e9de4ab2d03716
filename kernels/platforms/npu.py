"""The Ascend NPU: Atlas A2, A3 and A5 through torch_npu."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch_npu
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.device_memory import device_memory, step_memory
from kernels.graph_sizes import graph_sizes
from kernels.layers.experts import ExpertWeights
from kernels.layers.stacked_experts import refusal
from kernels.npu.attention import (
    FusedPart,
    LayerCache,
    causal_mask,
    check_cache,
    fused_attention,
    padded_dim,
    plan_part,
)
from kernels.npu.errors import explain
from kernels.npu.experts import NpuExperts
from kernels.npu.graphs import DecodeGraphs
from kernels.npu.microscaling import NpuMxLinear, mx_fits
from kernels.npu.narrow_cache import ALIGNMENT, NarrowLayer, WidePart, attend_narrow, compact, narrow_layer
from kernels.npu.native_attention import NativePart, native_attention, plan_native
from kernels.npu.norm_quant import NpuBehindNorm, NpuGated
from kernels.npu.operators import NpuNorm, ascend_cut, make_linear, rotate, swiglu, write_cache
from kernels.npu.quantized import NpuInt8Linear, NpuStaticLinear
from kernels.npu.soc import soc_of
from kernels.npu.tree_attention import TreePart, plan_trees, tree_attention
from kernels.npu.weight_only import NpuWeightOnlyLinear, fits_weight_only
from kernels.platforms.base import Fetched, Memory, Platform, PlatformError
from kernels.platforms.operators import Linear, Norm
from kernels.platforms.prepared import Decodes, PassHead
from kernels.platforms.projections import BehindNorm
from kernels.platforms.rows import AttentionRows
from kernels.quantization.cache import LayerScales
from kernels.quantization.weights import Fp8Weight, GroupedWeight, Int8Weight, Projection, QuantizedWeight
from kernels.staging import Staging, fetch
from kernels.step import RunnerConfig

__all__ = ["AttentionPlan", "NpuPlatform"]

_log = logging.getLogger("troupe.kernels.npu")

ASCEND, NATIVE = "ascend", "torch_native"
_TREES = "trees"  # of the fused attention, a call with a mask
_GIB = 1 << 30


@dataclass(frozen=True)
class AttentionPlan:
    """The calls that make up a step's attention, in the order of their tokens."""

    parts: tuple[FusedPart | TreePart | NativePart | WidePart, ...]
    rows: AttentionRows | None = None  # that it was made of; None in a graph


class NpuPlatform(Platform):
    """One NPU of this process: ``config.device_index`` counts those that ASCEND_RT_VISIBLE_DEVICES shows.

    Raises PlatformError when the device is not there, or is of a generation there is no support for.
    """

    collectives = "hccl"
    overlaps = True
    signed_sines = False
    scale_dtype = torch.float32
    default_memory_fraction = 0.85

    def __init__(self, config: RunnerConfig) -> None:
        index = config.device_index
        try:
            count = torch.npu.device_count()
        except RuntimeError as error:
            raise PlatformError(
                f"the NPU driver does not answer ({error}); is it installed, and CANN's set_env.sh sourced?"
            ) from error
        if index >= count:
            raise PlatformError(
                f"there is no NPU {index}: this process sees {count}; see --base-gpu-id and ASCEND_RT_VISIBLE_DEVICES"
            )
        self.device = torch.device("npu", index)
        torch.npu.set_device(self.device)  # before anything else: other calls would wake device 0
        self.soc = soc_of(torch_npu.npu.get_soc_version(), torch.npu.get_device_name(self.device))
        if self.soc.nz_weights:
            torch.npu.config.allow_internal_format = True
        if self.soc.generation != "A5":  # which never compiles at launch, and refuses to be told so
            torch.npu.set_compile_mode(jit_compile=False)
        if config.op_timeout:
            torch.npu.set_op_timeout_ms(int(1000 * config.op_timeout))
        self.name = f"npu ({self.soc.generation}, {self.soc.name})"
        self.cut = ascend_cut if self.soc.filters_logits and config.sampling_backend != "pytorch" else None
        if config.sampling_backend == ASCEND and not self.soc.filters_logits:
            raise PlatformError("--sampling-backend ascend needs a kernel that Atlas A5 does not have; use pytorch")
        self._config = config
        self._mask: Tensor | None = None
        self._staging: Staging | None = None
        self._prefill = self._decode = self._verify = ASCEND
        self._dtype = torch.bfloat16

    def bind_thread(self) -> None:
        torch.npu.set_device(self.device)

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        if self._staging is None:
            self._staging = Staging(self.device)
        return self._staging.put(array)

    def fetch(self, tensors: Sequence[Tensor], lasting: bool = False) -> Fetched:
        return fetch(tensors)

    def memory(self) -> Memory:
        return device_memory(self.device)

    def step_memory(self, step: Callable[[], None]) -> int:
        return step_memory(self.device, step)

    def dtype(self, requested: str, stored: str | None) -> torch.dtype:
        if requested == "auto":
            requested = "float16" if stored == "float16" else "bfloat16"
        found = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}.get(requested)
        if found is None:
            raise PlatformError(f"dtype {requested!r} is not supported on npu; use bfloat16, float16 or float32")
        self._dtype = found
        self._prefill = self._backend(self._config.prefill_attention_backend)
        self._decode = self._backend(self._config.decode_attention_backend)
        speculation = self._config.speculation
        decodes = speculation is not None and speculation.attention_mode == "decode"
        self._verify = self._decode if decodes else self._prefill
        return found

    def _backend(self, chosen: str) -> str:
        chosen = chosen or self._config.attention_backend
        if not chosen:
            return NATIVE if self._dtype == torch.float32 else ASCEND
        if chosen == ASCEND and self._dtype == torch.float32:
            raise PlatformError(
                "the fused attention computes in 16 bits: use --dtype bfloat16, or --attention-backend torch_native"
            )
        return chosen

    @property
    def _fused(self) -> bool:
        return ASCEND in (self._prefill, self._decode)

    def cache_head_dim(self, dim: int) -> int:
        wide = padded_dim(dim) if self._fused else dim
        return -(-dim // ALIGNMENT) * ALIGNMENT if self.cache_dtype == torch.int8 else wide

    def check_cache_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.int8, torch.bfloat16):
            raise PlatformError(f"NPUs have no operators for a cache in {dtype}; use --kv-cache-dtype int8")
        if dtype == torch.int8:
            _log.warning(
                "Of a cache in int8 the fused attention reads decodes alone; for prompts, drafts and windows its pages "
                "are turned into bfloat16 first."
            )

    def empty_host_state(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def make_cache(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        scales: Sequence[LayerScales] | None = None,
    ) -> list[LayerCache] | list[NarrowLayer]:
        dim = self.cache_head_dim(head_dim)
        if self._fused:
            check_cache(pages, page_size, kv_heads, dim)
            dtype = torch.bfloat16
            if self._mask is None:
                self._mask = causal_mask(self.device)

        if self.cache_dtype == torch.int8:
            fixed: Sequence[LayerScales | None] = scales or [None] * layers
            return [narrow_layer(pages, page_size, kv_heads, dim, layer, self.device) for layer in fixed]
        dtype = self.cache_dtype or dtype

        def zeros() -> Tensor:
            return torch.zeros((pages, page_size, kv_heads, dim), dtype=dtype, device=self.device)

        return [LayerCache(zeros(), zeros()) for _ in range(layers)]

    def clear_pages(self, caches: list[LayerCache] | list[NarrowLayer], pages: list[int]) -> None:
        index = self.put(np.array(pages))
        for cache in caches:
            if isinstance(cache, NarrowLayer):
                cache.clear(index)
                continue
            cache.keys.index_fill_(0, index, 0)
            cache.values.index_fill_(0, index, 0)

    def make_linear(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
        return make_linear(weight, bias, shared, self.soc)

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        if isinstance(weight, Int8Weight) and NpuInt8Linear.fits(weight):
            return NpuInt8Linear(weight, bias, self.soc)
        if isinstance(weight, Int8Weight) and NpuStaticLinear.fits(weight):
            return NpuStaticLinear(weight, bias, self.soc)
        if isinstance(weight, Int8Weight | GroupedWeight) and fits_weight_only(weight):
            return NpuWeightOnlyLinear(weight, bias)
        if isinstance(weight, Fp8Weight) and mx_fits(weight, self.soc):
            return NpuMxLinear(weight, bias)
        return super().make_quantized(weight, bias)

    def make_gated_projection(self, weight: Projection, bias: Tensor | None) -> Linear:
        if isinstance(weight, QuantizedWeight):
            return NpuGated(self.make_projection(weight, bias), self.silu_and_mul)
        return super().make_gated_projection(weight, bias)

    def make_behind_norm(self, norm: Norm, linear: Linear) -> BehindNorm:
        if NpuBehindNorm.fits(norm, linear, self.soc):
            return NpuBehindNorm(norm, linear)
        return super().make_behind_norm(norm, linear)

    def widen(self, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        """On the host where it is of floats of eight bits: A2 and A3 have none, and some of A5's casts fail."""
        host = weight.to(torch.device("cpu")) if isinstance(weight, Fp8Weight) else weight
        return host.dequantize(dtype).to(self.device)

    def make_experts(
        self, router: Tensor, bias: Tensor | None, experts: Sequence[ExpertWeights], chosen: int, normalized: bool
    ) -> Linear:
        kind = partial(NpuExperts.kind, soc=self.soc)
        experts = self._stackable(experts, kind)
        reason = refusal(experts, kind)
        if reason is not None:
            return self._in_turn(router, bias, experts, chosen, normalized, reason)
        return NpuExperts(self.make_linear(router, bias, shared=True), experts, chosen, normalized, self.soc)

    def make_norm(self, weight: Tensor, eps: float) -> Norm:
        return NpuNorm(weight, eps)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        out.copy_(rotate(x, cos, sin))

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return swiglu(x)

    def write_cache(self, cache: LayerCache | NarrowLayer, index: Tensor, keys_values: Tensor) -> None:
        if isinstance(cache, NarrowLayer):
            return cache.write(index, keys_values)
        half = keys_values.shape[1] // 2
        write_cache(keys_values[:, :half], keys_values[:, half:], cache.keys, cache.values, index)

    def move_cache(self, cache: LayerCache | NarrowLayer, source: Tensor, target: Tensor) -> None:
        if isinstance(cache, NarrowLayer):
            return cache.move(source, target)
        for part in (cache.keys, cache.values):
            tokens = part.view(-1, *part.shape[2:])
            tokens.index_copy_(0, target, tokens.index_select(0, source))

    def plan_attention(self, rows: AttentionRows, window: int) -> AttentionPlan:
        first, short, last = rows.decodes, rows.decodes + rows.verifies, len(rows.starts)
        tree = rows.tree is not None and first < short and int(rows.counts[first:short].max()) > 1
        verify = _TREES if tree and self._verify == ASCEND else self._verify
        calls: list[tuple[int, int, str]] = []
        for low, high, kind in ((0, first, self._decode), (first, short, verify), (short, last, self._prefill)):
            if low == high:
                continue
            narrow = self.cache_dtype == torch.int8 and window == 0  # whose decodes are calls of their own
            apart = kind == _TREES or (low == first and (self.soc.splits_mixed_steps or narrow))
            if calls and calls[-1][2] == kind and not apart:
                low = calls.pop()[0]
            calls.append((low, high, kind))
        return AttentionPlan(tuple(self._narrow_part(rows, *call, window) for call in calls), rows)

    def _narrow_part(
        self, rows: AttentionRows, first: int, last: int, kind: str, window: int
    ) -> FusedPart | TreePart | NativePart | WidePart:
        """``_part``, of a cache of whole numbers over pages that are made floats of."""
        read_so = kind == ASCEND and last <= rows.decodes and window == 0
        if self.cache_dtype != torch.int8 or read_so:
            return self._part(rows, first, last, kind, window)
        rows, pages = compact(rows, first, last, self._config.page_size, self.put)
        part = self._part(rows, first, last, kind, window)
        return WidePart(part, pages)

    def _part(
        self, rows: AttentionRows, first: int, last: int, kind: str, window: int
    ) -> FusedPart | TreePart | NativePart:
        if kind == NATIVE:
            return plan_native(rows, first, last, window, self.put)
        if kind == _TREES:
            return plan_trees(rows, window, self._config.page_size, self.put)
        assert self._mask is not None, "make_cache comes first"
        return plan_part(rows, first, last, window, self._mask, self.put)

    def attention(self, queries: Tensor, cache: LayerCache | NarrowLayer, plan: AttentionPlan, scale: float) -> Tensor:
        found = []
        for part in plan.parts:
            held: LayerCache | NarrowLayer = cache
            if isinstance(part, WidePart):
                assert isinstance(cache, NarrowLayer)
                dim, dtype = queries.shape[2], queries.dtype
                if not isinstance(part.part, NativePart):
                    dim, dtype = padded_dim(dim), torch.bfloat16
                held = cache.widened(part.pages, dtype, dim)
                part = part.part
            asked = queries[part.begin : part.end]
            if isinstance(held, NarrowLayer):
                assert isinstance(part, FusedPart)
                found.append(attend_narrow(asked, held, part, scale))
            elif isinstance(part, TreePart):
                found.append(tree_attention(asked, held, part, scale))
            elif isinstance(part, FusedPart):
                found.append(fused_attention(asked, held, part, scale))
            else:
                found.append(native_attention(asked, held, part, scale))
        return (found[0] if len(found) == 1 else torch.cat(found)).reshape(len(queries), -1)

    def capture_decodes(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        windows: Sequence[int],
        max_rows: int,
        columns: int,
        agree: Callable[[bool], bool],
        tokens: int = 1,
        tree: bool = False,
        states: Tensor | None = None,
        prompts: int = 0,
        head: PassHead | None = None,
    ) -> Decodes | None:
        config = self._config
        backend = self._decode if tokens == 1 else self._verify
        if config.disable_graphs or not self.captures or backend == NATIVE or self._mask is None:
            return None
        if self.cache_dtype == torch.int8 and (tokens > 1 or any(windows)):
            return None  # whose pages are made floats of, as many as there are
        most = config.graph_max_rows or self._default_graph_rows()
        sizes = graph_sizes(config.graph_rows, most, max_rows)
        if tokens > 1:  # each token of a row that is filled up has a slot of the dump page of its own
            sizes = [size for size in sizes if size * tokens <= config.page_size]
        if not sizes:
            return None
        graphs = DecodeGraphs(
            forward,
            windows,
            lambda part: AttentionPlan((part,)),
            sizes,
            columns,
            config.page_size,
            self._mask,
            not config.disable_graph_padding,
            agree,
            self.put,
            tokens,
            tree,
            states,
        )

        def decode(batch: ForwardBatch) -> Tensor | None:
            plan = next(iter(batch.plans.values()))
            only = plan.parts[0] if len(plan.parts) == 1 else None
            pages = None if only is None or isinstance(only, WidePart) else only.pages
            return graphs.run(batch, plan.rows, pages)

        return Decodes(tuple(graphs.sizes), decode) if graphs.sizes else None

    def _default_graph_rows(self) -> int:
        """Graphs take memory and streams: fewer on small devices."""
        return 16 if self.memory().total <= 32 * _GIB else 64

    def explain(self, error: BaseException) -> Exception | None:
        visible = [part.strip() for part in os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",") if part.strip()]
        index = self._config.device_index
        return explain(error, f"NPU {visible[index] if index < len(visible) else index} ({self.soc.name})")
