"""The GPU platform on the CPU: Triton's interpreter runs its kernels, and what is captured is run again."""

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
from kernels.contract.config import RunnerConfig
from kernels.core.operators import Acceptance
from kernels.devices.cuda.capture import CudaCapture
from kernels.devices.cuda.device import CudaDevice
from kernels.devices.memory import MemoryUsage
from kernels.devices.staged_memory import StagedMemory

__all__ = ["install"]

CPU = torch.device("cpu")


class _First:
    """In place of ``Choices``: of the ways to make a product the first."""

    def run(self, shape: Any, ways: Mapping[str, Callable[[], Tensor]], *_: object) -> Tensor:
        return next(iter(ways.values()))()

    def name(self, shape: Any, *_: object) -> str | None:
        return None


class _Memory(StagedMemory):
    def __init__(self) -> None:
        super().__init__(CPU, pinned_reads=False, copy_stream=False, autotunes=False)

    def usage(self) -> MemoryUsage:
        return MemoryUsage(1 << 34, 1 << 34)

    def put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.copy())

    def fetch(self, tensors: Sequence[Tensor], lasting: bool = False) -> Callable[[], list[Tensor]]:
        found = [tensor.clone() for tensor in tensors]
        return lambda: found

    def measure_step(self, step: Callable[[], None]) -> int:
        return 0


class _Capture(CudaCapture):
    def precompile(self, passes: Callable[[], None]) -> None:
        return None


class _Interpreted(CudaDevice):
    def __init__(self, config: RunnerConfig) -> None:
        choices: Any = _First()
        memory = _Memory()
        self.compose(config, "no GPU", memory, choices)
        self.capture = _Capture(config, memory, self.cache, self.experts)

    def bind_thread(self) -> None:
        return None


def _leaves(held: Any) -> list[Tensor]:
    if isinstance(held, Tensor):
        return [held]
    if isinstance(held, Acceptance):
        return [held.packed]
    if isinstance(held, tuple | list):
        return [leaf for part in held for leaf in _leaves(part)]
    return [leaf for leaf in vars(held).values() if isinstance(leaf, Tensor)] if hasattr(held, "__dict__") else []


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cuda be this platform. What was captured leaves its results where they were when it was."""

    def capture_each(sizes: Sequence[Any], run: Callable[[Any], Any], *_: object) -> dict[Any, Any]:
        found = {}
        for size in sizes:
            held = run(size)

            def replay(size: Any = size, held: Any = held) -> None:
                for here, there in zip(_leaves(held), _leaves(run(size)), strict=True):
                    here.copy_(there)

            found[size] = replay, held
        return found

    def capture_draft(run: Callable[[], None], pool: Any, _: object) -> tuple[Any, Callable[[], None]]:
        run()
        return pool, run

    for module in (
        kernels.devices.cuda.graphs.decode_graphs,
        kernels.devices.cuda.graphs.step_graphs,
        kernels.devices.cuda.graphs.prompt_graphs,
    ):
        monkeypatch.setattr(module, "capture_each", capture_each)
    monkeypatch.setattr(kernels.devices.cuda.graphs.prompt_graphs, "launches_last", lambda run, device: False)
    monkeypatch.setattr(kernels.devices.cuda.capture, "capture_draft", capture_draft)
    monkeypatch.setattr(kernels.devices.cuda.device, "CudaDevice", _Interpreted)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
