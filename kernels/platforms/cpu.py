"""The CPU platform: native operators for bf16 where the processor has AMX and the user does not limit it to less; else
plain torch operators, bf16 through oneDNN, and fp32."""

from __future__ import annotations

import logging
import subprocess
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.blocks import likeliest
from kernels.cpu.attention import AttentionPlan, AttentionPlanner, with_short
from kernels.cpu.caches import attend, clear_pages, make_caches, make_narrow_caches, move_tokens, write_tokens
from kernels.cpu.experts import CpuExperts
from kernels.cpu.host import host_memory, usable_cores
from kernels.cpu.isa import IsaError, chosen_isa, processor_isa
from kernels.cpu.linear import CpuLinear, TiedLinear, bf16_is_fast
from kernels.cpu.narrow_cache import NarrowPages, NarrowPlan
from kernels.cpu.native.library import NEEDED_ISA, Awaited, built, open_library, start_build
from kernels.cpu.native_blocks import NativeBlocks
from kernels.cpu.native_fp8 import NativeFp8
from kernels.cpu.native_grouped import NativeGrouped
from kernels.cpu.norm import CpuNorm
from kernels.cpu.operators import Native
from kernels.cpu.program import Program
from kernels.cpu.quantized import CpuBlocksLinear, CpuGroupedLinear, CpuInt8Linear
from kernels.cpu.recording import NotNative
from kernels.cpu.steady import CpuPass
from kernels.layers.experts import ExpertsInTurn, ExpertWeights
from kernels.platforms.base import Memory, Platform, PlatformError
from kernels.platforms.operators import Draws, Linear, Lookup, Norm
from kernels.platforms.prepared import Decodes, HostPass, PassHead
from kernels.platforms.rows import AttentionRows
from kernels.quantization.cache import LayerScales
from kernels.quantization.gguf_weight import GgufWeight
from kernels.quantization.weights import Fp8Weight, GroupedWeight, Int8Weight, Projection, QuantizedWeight

__all__ = ["CpuPlatform"]

_log = logging.getLogger("troupe.kernels")

_GATED = (CpuLinear, CpuInt8Linear, CpuGroupedLinear, CpuBlocksLinear)
"""Layers that may have products with gates."""


class CpuPlatform(Platform):
    """A layer's cache is one tensor [pages, page_size, 2, kv_heads, head_dim]: a page's keys and values are gathered
    by one copy. Its memory comes from the system zeroed and is taken only as pages are first written.

    ``threads``: of each operator. 0: one a usable core for native operators, whose threads take chunks as they come to
    them; one less for torch's, where a step is as slow as its slowest thread: on two busy cores, of which the event
    loop wants one now and then, one thread decodes nearly twice as fast as two.

    The default cache is a compromise between the prompts that it finds again and the memory of a small host: with it a
    server of the model in the box stays under 700 MB.
    ``ranks``: how many processes run the model together on this host and share its cores and its memory.
    """

    name = "cpu"
    collectives = "gloo"
    default_memory_fraction = 0.25
    default_cache_tokens = 40960
    verified_tokens = 64  # four tiles of rows: up to there tokens cost less than one each, and from there on as much
    verifies_apart = True  # beside a prompt each costs as much as a token of it

    def __init__(self, threads: int = 0, ranks: int = 1) -> None:
        self.device = torch.device("cpu")
        try:
            self.isa = chosen_isa()
        except IsaError as error:
            raise PlatformError(f"TROUPE_CPU_ISA: {error}") from None
        self.cpu_isa = str(self.isa)
        self.threads = threads or max(1, (usable_cores() - 1) // ranks)
        self._ranks = ranks
        self._planner: AttentionPlanner | None = None
        self._native_threads = threads or max(1, usable_cores() // ranks)
        self._native: Native | None = None
        self._native_attention = True  # whether all caches fit it: one plan serves a model and its draft
        self._building: subprocess.Popen[bytes] | Awaited | None = None
        self._linears: weakref.WeakSet[CpuLinear | CpuInt8Linear] = weakref.WeakSet()

    def bind_thread(self) -> None:
        torch.set_num_threads(self.threads)  # OpenMP keeps it by calling thread

    def memory(self) -> Memory:
        host = host_memory()
        return Memory(total=host.total // self._ranks, free=host.free // self._ranks)

    def dtype(self, requested: str, stored: str | None) -> torch.dtype:
        if requested == "auto":
            requested = "float32" if stored in (None, "float32") or not bf16_is_fast() else "bfloat16"
        if requested not in ("bfloat16", "float32"):
            raise PlatformError(f"dtype {requested!r} is not supported on cpu; use auto, bfloat16 or float32")
        if requested == "float32":
            return torch.float32
        self._find_native()
        return torch.bfloat16

    def _find_native(self) -> None:
        """Take the native operators, or have them compiled for later."""
        if self._native is not None or self.isa < NEEDED_ISA or not bf16_is_fast():
            return
        library = open_library()
        if library is not None:
            self._native = Native(library, self._native_threads)
        elif built() is None:
            self._building = start_build()

    def renew(self) -> bool:
        if self._building is None or self._building.poll() is None:
            return False
        self._building = None
        library = open_library()
        if library is None:
            return False
        self._native = Native(library, self._native_threads)
        for linear in self._linears:
            linear.adopt(self._native)
        return True

    def _native_for(self, dtype: torch.dtype, fits: bool) -> Native | None:
        """The native operators, where they are there and fit. Raises NotNative when a program needs them."""
        native = self._native
        if native is None or (fits and dtype == torch.bfloat16):
            return native
        if native.recording:
            raise NotNative("an operator's shape")
        return None

    def empty_host_state(self, *shape: int) -> Tensor:
        return torch.from_numpy(np.zeros(shape, dtype=np.int32))

    def make_cache(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        scales: Sequence[LayerScales] | None = None,
    ) -> list[Tensor] | list[NarrowPages]:
        self._planner = AttentionPlanner(page_size, dtype)
        self._native_attention &= dtype == torch.bfloat16 and Native.fits_attention(page_size, head_dim)
        shape = (pages, page_size, 2, kv_heads, head_dim)
        if self.cache_dtype is None:
            return make_caches(layers, shape, dtype)
        found = make_narrow_caches(layers, shape, self.cache_dtype, self.scale_dtype, scales)
        self._native_attention &= found[0].kept is not None
        return found

    def clear_pages(self, caches: list[Tensor] | list[NarrowPages], pages: list[int]) -> None:
        clear_pages(caches, pages)

    def make_linear(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
        linear = CpuLinear(weight, bias, shared, self._native)
        self._linears.add(linear)
        return linear

    def make_lookup(self, table: Tensor | QuantizedWeight) -> Lookup:
        blocks = self._blocks(table)
        return super().make_lookup(table) if blocks is None else blocks.lookup

    def _blocks(self, table: Tensor | QuantizedWeight) -> CpuBlocksLinear | None:
        """Of a table in blocks, where there are native operators."""
        if not isinstance(table, GgufWeight) or not NativeBlocks.fits(table):
            return None
        native = self._wait_for_native()
        if native is None:
            return None
        linear = CpuBlocksLinear(table, None, native)
        self.widened_bytes += linear.nbytes - table.nbytes
        return linear

    def make_tied(self, table: Tensor | QuantizedWeight) -> tuple[Lookup, Linear]:
        blocks = self._blocks(table)
        if blocks is not None:
            return blocks.lookup, blocks
        if isinstance(table, QuantizedWeight):
            return super().make_tied(table)
        linear = TiedLinear(table, self._native)
        self._linears.add(linear)
        return linear.lookup, linear

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        if isinstance(weight, Int8Weight) and weight.activation is not None:
            linear = CpuInt8Linear(weight, bias, self._native)
            self._linears.add(linear)
            self.widened_bytes += linear.extra_bytes
            return linear
        found = weight.grouped() if isinstance(weight, Int8Weight) else weight
        if isinstance(found, GroupedWeight):
            fits = NativeGrouped.fits(found)
        elif isinstance(found, Fp8Weight):
            fits = NativeFp8.fits(found)
        else:
            fits = isinstance(found, GgufWeight) and NativeBlocks.fits(found)
        if not fits:
            return super().make_quantized(weight, bias)
        native = self._wait_for_native()
        if native is None:
            reason = f"there are no native products, which need {str(NEEDED_ISA).upper()} and a C++ compiler"
            if self.isa < NEEDED_ISA <= processor_isa():
                reason = f"--cpu-isa {self.isa} switches the native products off"
            return self.make_dequantized(weight, bias, reason)
        packed: CpuGroupedLinear | CpuBlocksLinear
        if isinstance(found, GroupedWeight | Fp8Weight):
            packed = CpuGroupedLinear(found, bias, native)
        else:
            assert isinstance(found, GgufWeight)
            packed = CpuBlocksLinear(found, bias, native)
        self.widened_bytes += packed.nbytes - weight.nbytes
        return packed

    def _wait_for_native(self) -> Native | None:
        """The native operators, once they are compiled: without them a weight would have to be floats as well."""
        if self._native is None and self._building is not None:
            _log.info("the native operators are compiled, once on this machine, before weights can stay quantized")
            self._building.wait()
            self.renew()
        return self._native

    def make_float_head(self, weight: Projection, shared: bool) -> Linear:
        linear = super().make_float_head(weight, shared)

        def head(x: Tensor) -> Tensor:
            if self._native is not None and self._native.recording:
                raise NotNative("an output layer in float32")
            return linear(x)

        return head

    def make_experts(
        self, router: Tensor, bias: Tensor | None, experts: Sequence[ExpertWeights], chosen: int, normalized: bool
    ) -> Linear:
        linears = [
            (
                self.make_projection(expert.gate_up, expert.gate_up_bias),
                self.make_projection(expert.down, expert.down_bias),
            )
            for expert in experts
        ]
        in_turn = ExpertsInTurn(
            self.make_linear(router, bias), [(self._gated(up), down) for up, down in linears], chosen, normalized
        )
        slow = "experts are run one by one by torch's operators: decodes are no program"
        return CpuExperts(in_turn, linears, lambda: self._native, lambda: self._tell(slow))

    def settle(self, x: Tensor) -> Tensor:
        native = self._native_for(x.dtype, Native.fits_settle(x))
        return super().settle(x) if native is None else native.settle(x)

    def chain(self, first: Linear, then: Linear) -> Linear:
        def run(x: Tensor) -> Tensor:
            if self._native is not None and self._native.recording:
                raise NotNative("an operator of torch")
            return then(first(x))

        return run

    def make_gated_projection(self, weight: Projection, bias: Tensor | None) -> Linear:
        return self._gated(self.make_projection(weight, bias))

    def _gated(self, linear: Linear) -> Linear:
        def gated(x: Tensor) -> Tensor:
            out = linear.gated(x) if isinstance(linear, _GATED) else None
            return self.silu_and_mul(linear(x)) if out is None else out

        return gated

    def make_norm(self, weight: Tensor, eps: float) -> Norm:
        return CpuNorm(weight, eps, self._native_for)

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        if self._native is not None and self._native.recording:
            raise NotNative("a norm's bias")
        return super().add_bias(x, bias)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        if self._native is not None and self._native.recording:
            return self._native.embed(table, len(ids))
        return super().embed(ids, table)

    def angles(self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self._native is not None and self._native.recording:
            return self._native.angles(frequencies, scale, len(positions))
        return super().angles(positions, frequencies, scale, dtype)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        native = self._native_for(x.dtype, Native.fits_rotary(x))
        if native is not None:
            return native.rotary(x, cos, sin, out)
        swapped = x.unflatten(-1, (2, -1)).flip(-2).view(x.shape)
        torch.addcmul(x * cos, swapped, sin, out=out)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        native = self._native_for(x.dtype, Native.fits_silu(x))
        if native is not None:
            return native.silu_and_mul(x)
        half = x.shape[-1] // 2
        return F.silu(x[:, :half]).mul_(x[:, half:])

    def empty_rows(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        native = self._native_for(dtype, True)
        return super().empty_rows(rows, width, dtype) if native is None else native.empty_rows(rows, width)

    def add_rows(self, x: Tensor, y: Tensor | None, out: Tensor) -> None:
        native = self._native_for(x.dtype, Native.fits_add(x.shape[1]))
        if native is not None:
            return native.add(x, y, out)
        super().add_rows(x, y, out)

    def add_weighted(self, x: Tensor, y: Tensor, logits: Tensor) -> Tensor:
        native = self._native_for(x.dtype, Native.fits_add(x.shape[1]))
        if native is None:
            return super().add_weighted(x, y, logits)
        native.add(x, y, x, logits)
        return x

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token ids int64 [rows] of ``logits`` [rows, vocab], and which rows are broken: 0 in these."""
        native = self._native_for(logits.dtype, True)
        return likeliest(logits) if native is None else native.greedy(logits)

    def draw(
        self, logits: Tensor, draws: Draws, positions: Tensor, ids: Tensor | None, vocab: int
    ) -> tuple[Tensor, Tensor] | None:
        """See ``operators.Draw``."""
        native = self._native_for(logits.dtype, True)
        return None if native is None else native.draw(logits, draws, positions, ids, vocab)

    def place_heads(
        self,
        qkv: Tensor,
        heads: int,
        norm: Norm | None,
        cos: Tensor,
        sin: Tensor,
        cache: Tensor | NarrowPages,
        index: Tensor,
    ) -> Tensor:
        kept = cache.kept if isinstance(cache, NarrowPages) else cache
        if kept is None or not (norm is None or isinstance(norm, CpuNorm)):
            return super().place_heads(qkv, heads, norm, cos, sin, cache, index)
        native = self._native_for(qkv.dtype, Native.fits_place(qkv.shape[2]))
        if native is None:
            return super().place_heads(qkv, heads, norm, cos, sin, cache, index)
        weight = None if norm is None else (norm.plain, norm.eps)
        native.place(qkv, heads, weight, cos, sin, kept, index)
        return qkv[:, :heads]

    def write_cache(self, cache: Tensor | NarrowPages, index: Tensor, keys_values: Tensor) -> None:
        fits = not isinstance(cache, NarrowPages) or cache.kept is not None
        write_tokens(cache, index, keys_values, self._native_for(keys_values.dtype, fits))

    def move_cache(self, cache: Tensor | NarrowPages, source: Tensor, target: Tensor) -> None:
        move_tokens(cache, source, target)

    def plan_attention(self, rows: AttentionRows, window: int) -> AttentionPlan | NarrowPlan:
        assert self._planner is not None, "make_cache comes first"
        native = self._native is not None and self._native_attention
        if self.cache_dtype is None or native:
            return self._planner.plan(rows, window, native)
        return NarrowPlan(self._planner, rows, window)

    def attention(
        self, queries: Tensor, cache: Tensor | NarrowPages, plan: AttentionPlan | NarrowPlan, scale: float
    ) -> Tensor:
        native = self._native_for(queries.dtype, self._native_attention)
        return attend(queries, cache, plan, scale, native)

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
        """Record them as a program of native operators, for drafts of any kind and chunks of prompts. Ranks that run a
        model together have collectives between their operators, which no program has."""
        most = max(max_rows * tokens, prompts)
        held = None if states is None else states.new_zeros(most, states.shape[1])
        program = self._record(forward, windows, most, held)
        if program is None:
            return None

        def decode(batch: ForwardBatch) -> Tensor | None:
            return program.run(batch, with_short(next(iter(batch.plans.values())).rows))

        return Decodes((max_rows,), decode, most)

    def capture_pass(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        windows: Sequence[int],
        max_tokens: int,
        states: Tensor | None = None,
    ) -> HostPass | None:
        program = self._record(forward, windows, max_tokens, states)
        return None if program is None else CpuPass(program)

    def _record(
        self, forward: Callable[[ForwardBatch], Tensor], windows: Sequence[int], tokens: int, held: Tensor | None
    ) -> Program | None:
        if self._native is None or self._ranks > 1:
            return None
        return Program.record(self._native, forward, windows, self.plan_attention, tokens, held)
