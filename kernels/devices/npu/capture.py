"""Captures on an NPU: graphs of decodes and drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contract.config import RunnerConfig
from kernels.core.batch import ForwardBatch
from kernels.devices.capture import Capture, CaptureRequest, StepCaptureRequest
from kernels.devices.experts import ExpertLayers
from kernels.devices.graphs import graph_sizes
from kernels.devices.memory import DeviceMemory
from kernels.devices.npu.attention import AttentionPlan
from kernels.devices.npu.backends import NATIVE, AttentionBackends
from kernels.devices.npu.cache import NpuCaches
from kernels.devices.npu.drawing import DrawTokens
from kernels.devices.npu.graphs import DecodeGraphs
from kernels.devices.npu.int8_cache import DequantizedPart
from kernels.devices.npu.step_graphs import StepGraphs
from kernels.devices.prepared import CapturedPasses, CapturedSteps

__all__ = ["NpuCapture"]

_GIB = 1 << 30


class NpuCapture(Capture):
    spans_ranks = True

    def __init__(
        self,
        config: RunnerConfig,
        memory: DeviceMemory,
        caches: NpuCaches,
        experts: ExpertLayers,
        backends: AttentionBackends,
        draw: DrawTokens,
    ) -> None:
        self._config, self._memory, self._caches, self._draw = config, memory, caches, draw
        self._experts, self._backends = experts, backends

    def decodes(self, request: CaptureRequest) -> CapturedPasses | None:
        config, mask, tokens = self._config, self._caches.mask, request.tokens
        backend = self._backends.decode if tokens == 1 else self._backends.verify
        if not self._captures(backend) or mask is None:
            return None
        if self._caches.dtype == torch.int8 and (tokens > 1 or any(request.windows)):
            return None  # a varying number of its pages is dequantized
        sizes = self._sizes(request.max_rows)
        if tokens > 1:  # each padding token of a row needs a separate slot of the null page
            sizes = [size for size in sizes if size * tokens <= config.page_size]
        if not sizes:
            return None
        graphs = DecodeGraphs(
            request,
            sizes,
            lambda part: AttentionPlan((part,)),
            config.page_size,
            mask,
            not config.disable_graph_padding,
            self._memory.put,
        )

        def decode(batch: ForwardBatch, size: int = 0) -> Tensor | None:
            plan = next(iter(batch.plans.values()))
            only = plan.parts[0] if len(plan.parts) == 1 else None
            pages = None if only is None or isinstance(only, DequantizedPart) else only.pages
            return graphs.run(batch, plan.rows, pages, size)

        if not graphs.sizes:
            return None
        return CapturedPasses(tuple(graphs.sizes), decode, states=graphs.states, run_sized=decode)

    def steps(self, request: StepCaptureRequest) -> CapturedSteps | None:
        config, mask = self._config, self._caches.mask
        if not self._captures(self._backends.decode) or mask is None or request.bounded:
            return None
        if self._caches.dtype == torch.int8 and any(request.windows):
            return None
        graphs = StepGraphs(
            request,
            self._sizes(request.max_rows),
            lambda part: AttentionPlan((part,)),
            config.page_size,
            mask,
            not config.disable_graph_padding,
            self._memory,
            self._draw,
        )
        return CapturedSteps(tuple(graphs.sizes), graphs.run, draws=True) if graphs.sizes else None

    def _captures(self, backend: str) -> bool:
        return not (self._config.disable_graphs or self._experts.reads_back or backend == NATIVE)

    def _sizes(self, max_rows: int) -> list[int]:
        """Rows of the graphs."""
        largest = self._config.graph_max_rows or self._default_graph_rows()
        return graph_sizes(self._config.graph_rows, largest, max_rows)

    def _default_graph_rows(self) -> int:
        """Largest batch of graphs by default: graphs take memory and streams, so smaller on small devices."""
        return 16 if self._memory.usage().total <= 32 * _GIB else 64
