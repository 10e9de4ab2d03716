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

import kernels.cuda.graphs
import kernels.cuda.prompts
import kernels.cuda.steps
import kernels.loading
import kernels.platforms.cuda
import kernels.platforms.cuda_invariant
from kernels.cuda.choosing import Choices
from kernels.cuda.decode import DecodeScratch
from kernels.cuda.grouped import WideWeight
from kernels.cuda.launch import looking_ahead
from kernels.platforms.base import Memory
from kernels.platforms.cuda import CudaPlatform
from kernels.platforms.cuda_invariant import InvariantCudaPlatform
from kernels.step import RunnerConfig

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
        if looking_ahead():
            return self._own.run(shape, ways, trial, preferred)
        first, *_ = [way() for way in ways.values()]
        return first

    def name(
        self, shape: Any, trial: Callable[[], Mapping[str, Callable[[], Tensor]]], preferred: str = ""
    ) -> str | None:
        if looking_ahead():
            return self._own.name(shape, trial, preferred)
        ways = trial()
        for way in ways.values():
            way()
        return next(reversed(ways))


class _Absent(CudaPlatform):
    def __init__(self, config: RunnerConfig) -> None:
        self.device, self.name = META, "no GPU"
        self.greedy, self.candidates = kernels.platforms.cuda.likeliest, kernels.platforms.cuda.candidates
        self._config, self._kv_heads, self._pool = config, 1, None
        self._begins: dict[tuple[int, ...], Tensor] = {}
        self._scratch, self._wide = DecodeScratch(META), WideWeight(META)
        self._choices: Any = _EveryWay()
        self._step_bytes, self._beside = 0, None

    def bind_thread(self) -> None:
        return None

    def put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.copy()).to(META)

    def show(self, array: np.ndarray) -> Tensor:
        return self.put(array)

    def fetch(self, tensors: Sequence[Tensor], lasting: bool = False) -> Callable[[], list[Tensor]]:
        """Numbers that there are not are zeros; but rows that verified (``Verified.outcome``) accepted their roots."""
        found = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        for tensor in found:
            if tensor.dtype == torch.int64 and tensor.dim() == 2:
                tensor[:, 0] = 1
        return lambda: found

    def memory(self) -> Memory:
        return Memory(1 << 40, 1 << 40)

    def compile_ahead(self, passes: Callable[[], None]) -> None:
        return None  # whoever wants to see it puts it here

    def step_memory(self, step: Callable[[], None]) -> int:
        step()
        return 0


class _AbsentInvariant(InvariantCudaPlatform, _Absent):
    """Invariant where the other is only absent."""


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let cuda be this platform. -> what is captured and replayed from then on."""
    told: list[str] = []

    def capture_each(sizes: Sequence[Any], run: Callable[[Any], Any], *_: object) -> dict[Any, Any]:
        if looking_ahead():
            return own_capture_each(sizes, run, META, lambda could: could)
        return {size: (lambda: told.append("replayed"), run(size)) for size in sizes}

    def launches_last(run: Callable[[], object], device: torch.device) -> bool:
        assert not looking_ahead()  # there is nothing to measure
        return True

    def capture_guesses(run: Callable[[], None], pool: Any, _: object) -> tuple[Any, Callable[[], None] | None]:
        if looking_ahead():
            return own_capture_guesses(run, pool, META)
        run()
        told.append("guesses")
        return pool, lambda: told.append("guessed")

    own_capture_each, own = kernels.cuda.graphs.capture_each, torch.Generator
    own_capture_guesses = kernels.cuda.graphs.capture_guesses

    class Generator:  # of a device that has none
        def __new__(cls, device: object = None) -> Any:
            return own()

    monkeypatch.setattr(kernels.cuda.graphs, "capture_each", capture_each)
    monkeypatch.setattr(kernels.cuda.steps, "capture_each", capture_each)
    monkeypatch.setattr(kernels.cuda.prompts, "capture_each", capture_each)
    monkeypatch.setattr(kernels.cuda.prompts, "launches_last", launches_last)
    monkeypatch.setattr(kernels.platforms.cuda, "capture_guesses", capture_guesses)
    monkeypatch.setattr(kernels.platforms.cuda, "CudaPlatform", _Absent)
    monkeypatch.setattr(kernels.platforms.cuda_invariant, "InvariantCudaPlatform", _AbsentInvariant)
    monkeypatch.setattr(kernels.loading, "_check_finite", lambda name, floats: None)  # there are no numbers
    monkeypatch.setattr(torch, "Generator", Generator)
    return told
