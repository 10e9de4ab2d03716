"""A GPU platform without a GPU: tensors have no memory, kernels are compiled and not launched, graphs are not replayed.

A model can be loaded on it, steps can be captured and run: whatever reads a number back to the host, which no graph may
hold, fails, since there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kernels.devices.cuda.capture
import kernels.devices.cuda.device
import kernels.devices.cuda.graphs.decode_graphs
import kernels.devices.cuda.graphs.prompt_graphs
import kernels.devices.cuda.graphs.step_graphs
import kernels.devices.cuda.invariant
import kernels.weights.loading
from kernels.contract.config import RunnerConfig
from kernels.devices.cuda.device import CudaDevice
from kernels.devices.cuda.invariant import InvariantCudaDevice
from kernels.devices.cuda.launch import is_precompiling
from kernels.devices.cuda.matmul.autotune import Choices
from kernels.devices.cuda.precompile import precompile_passes
from kernels.devices.memory import MemoryUsage
from kernels.devices.staged_memory import StagedMemory

__all__ = ["install"]

META = torch.device("meta")


class _EveryWay:
    """In place of ``Choices``, which it is while looking ahead: all ways are taken, so that all are compiled."""

    def __init__(self) -> None:
        self._own = Choices(META)

    def run(
        self,
        shape: Any,
        ways: Mapping[str, Callable[[], Tensor]],
        trial: Callable[[], Mapping[str, Callable[[], Tensor]]] | None = None,
        preferred: str = "",
    ) -> Tensor:
        if is_precompiling():
            return self._own.run(shape, ways, trial, preferred)
        first, *_ = [way() for way in ways.values()]
        return first

    def name(
        self, shape: Any, trial: Callable[[], Mapping[str, Callable[[], Tensor]]], preferred: str = ""
    ) -> str | None:
        if is_precompiling():
            return self._own.name(shape, trial, preferred)
        ways = trial()
        for way in ways.values():
            way()
        return next(reversed(ways))


class _Memory(StagedMemory):
    def __init__(self) -> None:
        super().__init__(META, pinned_reads=False, copy_stream=False, autotunes=False)

    def usage(self) -> MemoryUsage:
        return MemoryUsage(1 << 40, 1 << 40)

    def put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.copy()).to(META)

    def fetch(self, tensors: Sequence[Tensor], lasting: bool = False) -> Callable[[], list[Tensor]]:
        """Numbers that there are not are zeros; but rows that verified (``VerifyResult.outcome``) accepted their
        roots."""
        found = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        for tensor in found:
            if tensor.dtype == torch.int64 and tensor.dim() == 2:
                tensor[:, 0] = 1
        return lambda: found

    def measure_step(self, step: Callable[[], None]) -> int:
        step()
        return 0


class _Absent(CudaDevice):
    def __init__(self, config: RunnerConfig) -> None:
        choices: Any = _EveryWay()
        self.compose(config, "no GPU", _Memory(), choices)

    def bind_thread(self) -> None:
        return None


class _AbsentInvariant(InvariantCudaDevice, _Absent):
    """Invariant where the other is only absent."""


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let cuda be this platform. -> what is captured and replayed from then on."""
    reported: list[str] = []

    def capture_each(sizes: Sequence[Any], run: Callable[[Any], Any], *_: object) -> dict[Any, Any]:
        if is_precompiling():
            return own_capture_each(sizes, run, META, lambda could: could)
        return {size: (lambda: reported.append("replayed"), run(size)) for size in sizes}

    def launches_last(run: Callable[[], object], device: torch.device) -> bool:
        assert not is_precompiling()  # there is nothing to measure
        return True

    def capture_draft(run: Callable[[], None], pool: Any, _: object) -> tuple[Any, Callable[[], None] | None]:
        if is_precompiling():
            return own_capture_draft(run, pool, META)
        run()
        reported.append("draft_tokens")
        return pool, lambda: reported.append("drafted")

    own_capture_each, own = kernels.devices.cuda.graphs.decode_graphs.capture_each, torch.Generator
    own_capture_draft = kernels.devices.cuda.graphs.decode_graphs.capture_draft

    class Generator:  # of a device that has none
        def __new__(cls, device: object = None) -> Any:
            return own()

    monkeypatch.setattr(kernels.devices.cuda.graphs.decode_graphs, "capture_each", capture_each)
    monkeypatch.setattr(kernels.devices.cuda.graphs.step_graphs, "capture_each", capture_each)
    monkeypatch.setattr(kernels.devices.cuda.graphs.prompt_graphs, "capture_each", capture_each)
    monkeypatch.setattr(kernels.devices.cuda.graphs.prompt_graphs, "launches_last", launches_last)
    monkeypatch.setattr(kernels.devices.cuda.capture, "capture_draft", capture_draft)
    if kernels.devices.cuda.capture.precompile_passes is precompile_passes:  # else a test wants to see it
        monkeypatch.setattr(kernels.devices.cuda.capture, "precompile_passes", lambda passes, device: None)
    monkeypatch.setattr(kernels.devices.cuda.device, "CudaDevice", _Absent)
    monkeypatch.setattr(kernels.devices.cuda.invariant, "InvariantCudaDevice", _AbsentInvariant)
    monkeypatch.setattr(kernels.weights.loading, "_check_finite", lambda name, floats: None)  # there are no numbers
    monkeypatch.setattr(torch, "Generator", Generator)
    return reported
