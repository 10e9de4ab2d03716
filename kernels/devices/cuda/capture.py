"""Captures on an NVIDIA GPU: CUDA graphs of passes, of whole steps, and of drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.contract.caches import State
from kernels.contract.config import RunnerConfig
from kernels.core.attention_rows import PromptTokens
from kernels.core.batch import ForwardBatch
from kernels.core.tree import chain
from kernels.devices.capture import Capture, CaptureRequest, StepCaptureRequest
from kernels.devices.cuda.attention.plan import AttentionPlan
from kernels.devices.cuda.cache import CudaCaches
from kernels.devices.cuda.graphs.decode_graphs import DecodeGraphs, capture_draft
from kernels.devices.cuda.graphs.prompt_graphs import PromptGraphs, prompt_sizes
from kernels.devices.cuda.graphs.step_graphs import StepGraphs
from kernels.devices.cuda.precompile import precompile_passes
from kernels.devices.experts import ExpertLayers
from kernels.devices.graphs import graph_sizes
from kernels.devices.prepared import CapturedPasses, CapturedStepResult, CapturedSteps
from kernels.devices.staged_memory import StagedMemory

__all__ = ["CudaCapture"]

_GIB = 1 << 30
_DRAFTING_ROWS = 16
"""Rows up to which graphs of drafts are captured for any length; more rows keep the device busy without graphs."""
_PROMPT_TOKENS = 2048
"""Most tokens of a captured step: with more, the device time exceeds the launch time for any model."""


class CudaCapture(Capture):
    holds_windows = True
    holds_states = True

    def __init__(self, config: RunnerConfig, memory: StagedMemory, caches: CudaCaches, experts: ExpertLayers) -> None:
        self._config, self._memory, self._caches, self._experts = config, memory, caches, experts
        self._device = memory.torch_device
        self._pool: Any = None  # memory of captured drafts

    def decodes(self, request: CaptureRequest) -> CapturedPasses | None:
        config, tokens = self._config, request.tokens
        sizes = self._sizes(tokens, request.max_rows)
        if not sizes:
            return None
        graphs = DecodeGraphs(
            request,
            sizes,
            self._caches.kv_heads,
            config.page_size,
            self._device,
            not config.disable_graph_padding,
            self._memory.put,
            self._memory.put_pinned,
        )
        if not graphs.sizes:
            return None
        if (
            tokens > 1 and request.states is None and not request.bounded
        ):  # so that no step waits for its kernel; it writes to the null page
            nothing = chain(torch.zeros((1, tokens), dtype=torch.int64, device=self._device))
            null_pages = np.zeros((1, -(-tokens // config.page_size)), dtype=np.int32)
            graphs.verify(np.zeros(1, dtype=np.int64), null_pages, nothing)

        def decode(batch: ForwardBatch, size: int = 0) -> Tensor | None:
            plan = _any_plan(batch)
            return None if plan is None else graphs.run(batch, plan, size)

        return CapturedPasses(
            tuple(graphs.sizes),
            decode,
            verify=None if request.bounded else graphs.verify,  # rows of bounded groups come with a batch
            accept_outputs=graphs.accept_outputs,
            states=graphs.states,
            run_sized=decode,
        )

    def steps(self, request: StepCaptureRequest) -> CapturedSteps | None:
        config, sizes = self._config, self._sizes(1, request.max_rows)
        if not sizes:
            return None
        graphs = StepGraphs(
            request,
            sizes,
            self._caches.kv_heads,
            config.page_size,
            not config.disable_graph_padding,
            self._memory.put,
        )
        if not graphs.sizes:
            return None
        prompts = self.prompt_steps(request, min(request.max_rows, max(graphs.sizes)))
        return CapturedSteps(tuple(graphs.sizes), graphs.run, prompts)

    def prompt_steps(
        self, request: StepCaptureRequest, max_rows: int
    ) -> Callable[[PromptTokens], CapturedStepResult | None] | None:
        """Whole steps with chunks of prompts, of up to ``max_rows`` rows."""
        config = self._config
        if config.disable_prompt_graphs or config.disable_graph_padding:  # no two such steps have the same numbers
            return None
        if any(isinstance(group.group.spec, State) for group in request.bounded):  # run by segments of any length
            return None
        largest = min(
            config.max_step_tokens, config.graph_max_tokens or max(config.graph_tokens, default=_PROMPT_TOKENS)
        )
        graphs = PromptGraphs(
            request,
            prompt_sizes(config.graph_tokens, largest, max_rows),
            self._caches.kv_heads,
            config.page_size,
            not config.all_prompt_graphs,
            self._memory.fits_step,
            self._memory.put,
        )
        return graphs.run if graphs.sizes else None

    def draft(self, run: Callable[[], None]) -> Callable[[], None] | None:
        if self._config.disable_graphs or self._experts.reads_back:
            return None
        self._pool, captured = capture_draft(run, self._pool, self._device)
        return captured

    def precompile(self, passes: Callable[[], None]) -> None:
        precompile_passes(passes, self._device)

    def _sizes(self, tokens: int, max_rows: int) -> list[int]:
        config = self._config
        if config.disable_graphs or self._experts.reads_back:
            return []
        largest = config.graph_max_rows or self._default_graph_rows()
        return graph_sizes(
            config.graph_rows, largest if tokens == 1 else max(_DRAFTING_ROWS, largest // tokens), max_rows
        )

    def _default_graph_rows(self) -> int:
        """Largest batch of graphs by default: graphs take memory and time to capture, so smaller on small devices."""
        total = self._memory.usage().total
        return 32 if total <= 24 * _GIB else 160 if total <= 60 * _GIB else 512


def _any_plan(batch: ForwardBatch) -> AttentionPlan | None:
    """All have the same rows. A model whose layers all keep windows has none of the main pages; None: no layer attends
    to tokens."""
    plans = (*batch.plans.values(), *(rows.plan for rows in batch.bounded.values()))
    return next((plan for plan in plans if plan is not None), None)
