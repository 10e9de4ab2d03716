"""The GPU platform on the CPU: Triton's interpreter runs its kernels, and what is captured is run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kernels.cuda.graphs
import kernels.cuda.prompts
import kernels.cuda.steps
import kernels.platforms.cuda
from kernels.cuda.decode import DecodeScratch
from kernels.cuda.grouped import WideWeight
from kernels.platforms.base import Memory
from kernels.platforms.cuda import CudaPlatform
from kernels.platforms.operators import Acceptance
from kernels.step import RunnerConfig

__all__ = ["install"]

CPU = torch.device("cpu")


class _First:
    """In place of ``Choices``: of the ways to make a product the first."""

    def run(self, shape: Any, ways: Mapping[str, Callable[[], Tensor]], *_: object) -> Tensor:
        return next(iter(ways.values()))()

    def name(self, shape: Any, *_: object) -> str | None:
        return None


class _Interpreted(CudaPlatform):
    def __init__(self, config: RunnerConfig) -> None:
        self.device, self.name = CPU, "no GPU"
        self.greedy, self.candidates = kernels.platforms.cuda.likeliest, kernels.platforms.cuda.candidates
        self._config, self._kv_heads, self._pool = config, 1, None
        self._begins: dict[tuple[int, ...], Tensor] = {}
        self._scratch, self._wide = DecodeScratch(CPU), WideWeight(CPU)
        self._choices: Any = _First()
        self._step_bytes, self._beside = 0, None

    def bind_thread(self) -> None:
        return None

    def put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.copy())

    def show(self, array: np.ndarray) -> Tensor:
        return self.put(array)

    def fetch(self, tensors: Sequence[Tensor], lasting: bool = False) -> Callable[[], list[Tensor]]:
        found = [tensor.clone() for tensor in tensors]
        return lambda: found

    def memory(self) -> Memory:
        return Memory(1 << 34, 1 << 34)

    def compile_ahead(self, passes: Callable[[], None]) -> None:
        return None

    def step_memory(self, step: Callable[[], None]) -> int:
        return 0


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

    def capture_guesses(run: Callable[[], None], pool: Any, _: object) -> tuple[Any, Callable[[], None]]:
        run()
        return pool, run

    for module in (kernels.cuda.graphs, kernels.cuda.steps, kernels.cuda.prompts):
        monkeypatch.setattr(module, "capture_each", capture_each)
    monkeypatch.setattr(kernels.cuda.prompts, "launches_last", lambda run, device: False)
    monkeypatch.setattr(kernels.platforms.cuda, "capture_guesses", capture_guesses)
    monkeypatch.setattr(kernels.platforms.cuda, "CudaPlatform", _Interpreted)
