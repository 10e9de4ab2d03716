"""NVIDIA GPUs: CUDA graphs, kernels of our own in Triton, matrix products by cuBLAS."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.cuda.accepting import accept, bring
from kernels.cuda.activation import swiglu
from kernels.cuda.ahead import compile_ahead
from kernels.cuda.angles import angles
from kernels.cuda.attention import AttentionPlan, attention, plan_attention, plan_guesses
from kernels.cuda.candidates import candidates
from kernels.cuda.decode import DecodeScratch
from kernels.cuda.errors import explain
from kernels.cuda.graphs import DecodeGraphs, capture_guesses
from kernels.cuda.growing import CudaGrowing
from kernels.cuda.heads import place_heads
from kernels.cuda.moving import move_accepted, move_caches
from kernels.cuda.narrow_cache import NarrowCache
from kernels.cuda.norms import CudaNorm
from kernels.cuda.prompts import PromptGraphs, prompt_sizes
from kernels.cuda.sampling import likeliest
from kernels.cuda.steps import StepGraphs
from kernels.device_memory import device_memory, step_memory
from kernels.graph_sizes import graph_sizes
from kernels.platforms.base import Fetched, Memory, PlatformError
from kernels.platforms.cuda_layers import CudaLayers
from kernels.platforms.operators import Acceptance, Norm
from kernels.platforms.prepared import Decodes, PassHead, StepForward, StepFound, Steps
from kernels.platforms.rows import AttentionRows, PromptTokens
from kernels.quantization.cache import LayerScales, narrow
from kernels.speculative.growing import Accepted, Growing, GrowthShape
from kernels.speculative.tree import DraftTree, chain
from kernels.staging import Staging, fetch
from kernels.step import RunnerConfig

__all__ = ["CudaPlatform"]

_GIB = 1 << 30
_DRAFTING_ROWS = 16
"""Rows for which graphs of drafts are captured however long these are; more keep the device busy without."""
_PROMPT_TOKENS = 2048
"""Of a step: with more the device takes long enough, whatever the model."""
_PAGE_SIZES = (16, 32, 64, 128, 256)


class CudaPlatform(CudaLayers):
    """One GPU of this process: ``config.device_index`` counts those that CUDA_VISIBLE_DEVICES shows.

    A layer's cache is one tensor [pages, 2, kv_heads, page_size, head_dim]. Raises PlatformError when the device is not
    there.
    """

    collectives = "nccl"
    overlaps = True
    compiles = True
    accepts = True
    invariant = False
    """Whether a token's results do not depend on what else a step runs."""
    default_memory_fraction = 0.9

    def __init__(self, config: RunnerConfig) -> None:
        index = config.device_index
        if not torch.cuda.is_available():
            raise PlatformError(
                "this PyTorch sees no CUDA device; is the driver there (nvidia-smi), was this PyTorch built for CUDA "
                f"(it says {torch.version.cuda or 'it was not'}), and what does CUDA_VISIBLE_DEVICES say?"
            )
        count = torch.cuda.device_count()
        if index >= count:
            raise PlatformError(
                f"there is no GPU {index}: this process sees {count}; see --base-gpu-id and CUDA_VISIBLE_DEVICES"
            )
        super().__init__(torch.device("cuda", index))
        torch.cuda.set_device(self.device)
        major, minor = torch.cuda.get_device_capability(self.device)
        if major < 8:
            raise PlatformError(
                f"{torch.cuda.get_device_name(self.device)} has compute capability {major}.{minor}; the kernels need "
                "8.0 (Ampere) or later: use another GPU or --device cpu"
            )
        backends = (config.attention_backend, config.prefill_attention_backend, config.decode_attention_backend)
        if any(backends) or config.sampling_backend == "ascend":
            raise PlatformError(
                "the backends of attention and sampling that can be chosen are an NPU's; leave them out"
            )
        # Parts of a sum are added in float32, whatever the dtype.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.name = f"cuda ({torch.cuda.get_device_name(self.device)})"
        self.greedy, self.candidates = likeliest, candidates
        self._config = config
        self._kv_heads = 1
        self._staging: Staging | None = None
        self._beside: torch.cuda.Stream | None = None  # copies on it are in nobody's way
        self._scratch = DecodeScratch(self.device)
        self._begins: dict[tuple[int, ...], Tensor] = {}
        self._pool: Any = None  # memory of captured passes
        self._step_bytes = 0  # what the largest step takes

    def bind_thread(self) -> None:
        torch.cuda.set_device(self.device)

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        if self._staging is None:
            self._staging = Staging(self.device)
        return self._staging.put(array)

    def show(self, array: npt.NDArray[Any]) -> Tensor:
        if self._staging is None:
            self._staging = Staging(self.device)
        return self._staging.show(array)

    def fetch(self, tensors: Sequence[Tensor], lasting: bool = False) -> Fetched:
        if lasting and self._beside is None:
            self._beside = torch.cuda.Stream(self.device)
        return fetch(tensors, self._beside if lasting else None)

    def after_copies(self) -> None:
        if self._beside is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._beside)

    def memory(self) -> Memory:
        return device_memory(self.device)

    def step_memory(self, step: Callable[[], None]) -> int:
        self._step_bytes = step_memory(self.device, step, tries=True)
        return self._step_bytes

    def compile_ahead(self, passes: Callable[[], None]) -> None:
        compile_ahead(passes, self.device)

    def dtype(self, requested: str, stored: str | None) -> torch.dtype:
        if requested == "auto":
            requested = "float16" if stored == "float16" else "bfloat16"
        found = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}.get(requested)
        if found is None:
            raise PlatformError(f"dtype {requested!r} is not supported on cuda; use bfloat16, float16 or float32")
        return found

    def cache_head_dim(self, dim: int) -> int:
        if dim % 2 or dim > 256:
            raise PlatformError(f"heads of {dim} are not supported on cuda: up to 256, and even; use --device cpu")
        return dim

    def check_cache_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.int8, torch.bfloat16) and torch.cuda.get_device_capability(self.device) < (8, 9):
            raise PlatformError(
                f"{self.name} has no numbers of fp8, which need compute capability 8.9 (Ada, Hopper) or later: use "
                "--kv-cache-dtype int8"
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
    ) -> list[Tensor] | list[NarrowCache]:
        if page_size not in _PAGE_SIZES:
            sizes = ", ".join(map(str, _PAGE_SIZES))
            raise PlatformError(f"the attention reads pages of {sizes} tokens, not {page_size}; use --page-size 64")
        self._kv_heads = kv_heads
        shape = (pages, 2, kv_heads, page_size, self.cache_head_dim(head_dim))
        kept = self.cache_dtype

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        if kept is None:
            return [zeros(shape, dtype) for _ in range(layers)]
        fixed: Sequence[LayerScales | None] = scales or [None] * layers
        return [
            NarrowCache(
                zeros(shape, kept),
                zeros(shape[:-1], self.scale_dtype) if narrow(kept) and layer is None else None,
                layer,
            )
            for layer in fixed
        ]

    def clear_pages(self, caches: list[Tensor] | list[NarrowCache], pages: list[int]) -> None:
        for cache in caches:
            if isinstance(cache, NarrowCache):
                cache.clear(pages)
            else:
                cache[pages] = 0

    def angles(self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return angles(positions, frequencies, scale, dtype)

    def place_heads(
        self,
        qkv: Tensor,
        heads: int,
        norm: Norm | None,
        cos: Tensor,
        sin: Tensor,
        cache: Tensor | NarrowCache,
        index: Tensor,
    ) -> Tensor:
        assert norm is None or isinstance(norm, CudaNorm)
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        kv_heads = (qkv.shape[1] - heads) // 2
        place_heads(qkv, heads, kv_heads, weight, eps, cos, sin, cache, index, alone=self.invariant)
        return qkv[:, :heads]

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        swapped = x.unflatten(-1, (2, -1)).flip(-2).view(x.shape)
        torch.addcmul(x * cos, swapped, sin, out=out)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return swiglu(x)

    def write_cache(self, cache: Tensor | NarrowCache, index: Tensor, keys_values: Tensor) -> None:
        if isinstance(cache, NarrowCache):
            return cache.write(index, keys_values)
        page_size = cache.shape[3]
        both = keys_values.unflatten(1, (2, -1))
        cache[index // page_size, :, :, index % page_size] = both

    def move_cache(self, cache: Tensor | NarrowCache, source: Tensor, target: Tensor) -> None:
        if isinstance(cache, NarrowCache):
            return cache.move(source, target)
        page_size = cache.shape[3]
        moved = cache[source // page_size, :, :, source % page_size]
        cache[target // page_size, :, :, target % page_size] = moved

    def move_caches(
        self, caches: Sequence[Tensor] | Sequence[NarrowCache], source: Tensor, target: Tensor, each: int
    ) -> None:
        move_caches(caches, source, target, each, self.put)

    def move_accepted(
        self, caches: Sequence[Tensor] | Sequence[NarrowCache], index: Tensor, rows: Tensor, outcome: Tensor
    ) -> bool:
        move_accepted(caches, index, rows, outcome, self._pointers)
        return True

    def accept(
        self, tree: DraftTree, rows: Tensor, sampled: Tensor, broken: Tensor, depth: int, forced: int, table: Tensor
    ) -> Acceptance | None:
        return accept(tree, rows, sampled, broken, depth, forced, table)

    def bring_accepted(
        self,
        given: Tensor,
        pages: Tensor,
        outcome: Tensor,
        tokens: Tensor,
        features: Tensor,
        host: Tensor,
        kept_outcome: Tensor,
        kept_tokens: Tensor,
        kept_features: Tensor,
    ) -> bool:
        bring(given, pages, outcome, tokens, features, host, kept_outcome, kept_tokens, kept_features)
        return True

    def _pointers(self, caches: Sequence[Tensor]) -> Tensor:
        """int64 [caches]: where they begin, put on the device once."""
        at = tuple(cache.data_ptr() for cache in caches)
        if at not in self._begins:
            self._begins[at] = self.put(np.array(at, dtype=np.int64))
        return self._begins[at]

    def plan_guesses(
        self, starts: Tensor, pages: Tensor, tokens: int, bits: Tensor | None, roots: Tensor | None, window: int
    ) -> AttentionPlan:
        return plan_guesses(starts, pages, tokens, bits, roots, window, self._config.page_size)

    def make_growing(self, shape: GrowthShape, given: Accepted) -> Growing | None:
        return CudaGrowing(shape, given) if CudaGrowing.fits(shape) else None

    def capture_guesses(self, run: Callable[[], None]) -> Callable[[], None] | None:
        if self._config.disable_graphs or not self.captures:
            return None
        self._pool, captured = capture_guesses(run, self._pool, self.device)
        return captured

    def plan_attention(self, rows: AttentionRows, window: int) -> AttentionPlan:
        return plan_attention(rows, window, self._kv_heads, self.put)

    def attention(self, queries: Tensor, cache: Tensor | NarrowCache, plan: AttentionPlan, scale: float) -> Tensor:
        return attention(queries, cache, plan, scale, None if self.invariant else self._scratch)

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
        if config.disable_graphs or not self.captures:
            return None
        sizes = self._graph_sizes(tokens, max_rows)
        if not sizes:
            return None
        graphs = DecodeGraphs(
            forward,
            windows,
            sizes,
            self._kv_heads,
            columns,
            config.page_size,
            self.device,
            not config.disable_graph_padding,
            agree,
            self.put,
            tokens,
            tree,
            states,
            self.show,
            head,
        )
        if not graphs.sizes:
            return None
        if tokens > 1 and states is None:  # so that no step waits for its kernel to be made; it writes to the dump page
            nothing = chain(torch.zeros((1, tokens), dtype=torch.int64, device=self.device))
            dump = np.zeros((1, -(-tokens // config.page_size)), dtype=np.int32)
            graphs.verify(np.zeros(1, dtype=np.int64), dump, nothing)
        return Decodes(
            tuple(graphs.sizes),
            lambda batch: graphs.run(batch, next(iter(batch.plans.values()))),
            verify=graphs.verify,
            ends=graphs.ends,
        )

    def capture_steps(
        self,
        forward: StepForward,
        table: Tensor,
        windows: Sequence[int],
        max_rows: int,
        columns: int,
    ) -> Steps | None:
        config = self._config
        sizes = [] if config.disable_graphs or not self.captures else self._graph_sizes(1, max_rows)
        if not sizes:
            return None
        graphs = StepGraphs(
            forward,
            table,
            windows,
            sizes,
            self._kv_heads,
            columns,
            config.page_size,
            not config.disable_graph_padding,
            self.put,
        )
        if not graphs.sizes:
            return None
        prompts = self._capture_prompts(forward, table, windows, min(max_rows, max(graphs.sizes)), columns)
        return Steps(tuple(graphs.sizes), graphs.run, prompts)

    def _capture_prompts(
        self, forward: StepForward, table: Tensor, windows: Sequence[int], max_rows: int, columns: int
    ) -> Callable[[PromptTokens], StepFound | None] | None:
        config = self._config
        if config.disable_prompt_graphs or config.disable_graph_padding:  # no two such steps have the same numbers
            return None
        most = min(config.max_step_tokens, config.graph_max_tokens or max(config.graph_tokens, default=_PROMPT_TOKENS))
        graphs = PromptGraphs(
            forward,
            table,
            windows,
            prompt_sizes(config.graph_tokens, most, max_rows),
            self._kv_heads,
            columns,
            config.page_size,
            not config.all_prompt_graphs,
            self._step_fits,
            self.put,
        )
        return graphs.run if graphs.sizes else None

    def _step_fits(self) -> bool:
        """Whether a largest step finds memory: what the allocator cannot give back is the graphs', used or not."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0] >= self._step_bytes

    def _graph_sizes(self, tokens: int, max_rows: int) -> list[int]:
        config = self._config
        most = config.graph_max_rows or self._default_graph_rows()
        return graph_sizes(config.graph_rows, most if tokens == 1 else max(_DRAFTING_ROWS, most // tokens), max_rows)

    def _default_graph_rows(self) -> int:
        """Graphs take memory and time to capture: fewer on small devices."""
        total = self.memory().total
        return 32 if total <= 24 * _GIB else 160 if total <= 60 * _GIB else 512

    def explain(self, error: BaseException) -> Exception | None:
        visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
        index = self._config.device_index
        return explain(error, f"GPU {visible[index] if index < len(visible) else index} ({self.name})")
