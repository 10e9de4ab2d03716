"""The one interface between models and hardware: a device is a set of capabilities.

A model calls these operators and never asks which device it runs on. Shapes are static for a given number of tokens and
rows, and no operator reads a tensor back to the host, so that a forward pass can be captured into a graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.devices.attention import Attention
from kernels.devices.cache import KvCaches
from kernels.devices.capture import Capture
from kernels.devices.communication import Communication
from kernels.devices.convolution import Convolution
from kernels.devices.delta_rule import DeltaRule
from kernels.devices.draft_kernels import DraftKernels
from kernels.devices.elementwise import Elementwise
from kernels.devices.experts import ExpertLayers
from kernels.devices.linear import LinearLayers
from kernels.devices.memory import DeviceMemory
from kernels.devices.sampling import SamplingKernels
from kernels.devices.state_space import StateSpace

__all__ = ["Device", "DeviceTraits"]


@dataclass(frozen=True)
class DeviceTraits:
    """Facts about a device.

    ``memory_fraction``: the default share of memory for weights and cache. ``cache_tokens``: the default bound of the
    cache; 0: memory alone bounds it.
    ``overlaps``: whether the device works asynchronously, so that a step is prepared while another runs.
    ``compiles``: whether kernels are compiled at their first launch, which takes long.
    ``samples_row_by_row``: whether each row is sampled by itself, so that its scores do not depend on the batch.
    ``verify_budget``: decodes and draft tokens of a step beyond which verifying more does not pay; 0: unknown.
    ``verifies_without_prefills``: whether verifying draft tokens pays only in steps without prefills.
    ``cpu_isa``: the instruction set that operators may use on a CPU; "" elsewhere.
    """

    memory_fraction: float
    cache_tokens: int = 0
    overlaps: bool = False
    compiles: bool = False
    samples_row_by_row: bool = False
    verify_budget: int = 0
    verifies_without_prefills: bool = False
    cpu_isa: str = ""


class Device(ABC):
    """One device of one kind, made of capabilities; ``drafting`` is None where it has no kernels for it."""

    name: str
    torch_device: torch.device
    traits: DeviceTraits
    communication: Communication
    memory: DeviceMemory
    elementwise: Elementwise
    linear: LinearLayers
    experts: ExpertLayers
    cache: KvCaches[Any]
    attention: Attention[Any, Any]
    sampling: SamplingKernels
    capture: Capture
    drafting: DraftKernels | None = None
    delta: DeltaRule = DeltaRule()
    space: StateSpace = StateSpace()
    convolution: Convolution = Convolution()

    @abstractmethod
    def bind_thread(self) -> None:
        """Prepare the calling thread to run the model (current device, intra-op threads)."""

    @abstractmethod
    def select_dtype(self, requested: str, stored: str | None) -> torch.dtype:
        """The dtype to compute in from now on. ``requested``: auto or a name. ``stored``: the checkpoint's. Raises
        UnsupportedError."""

    def agree(self, minimum: Callable[[int], int]) -> bool:
        """Keep only kernels that every rank of the model uses, so that all make the same collectives and sample alike.

        ``minimum``: the least of all ranks' values. All ranks call it when they have met, before the model is made.
        -> whether kernels were given up.
        """
        return False

    @property
    def operators(self) -> str:
        """Where native operators come from: "wheel", "compiled" on this machine, "pending" while they are compiled, or
        "none". "": the device has no such choice."""
        return ""

    def finish_operators(self) -> None:
        """Wait for operators that are still compiled: what is made from now on keeps its form."""
        return

    def renew_operators(self) -> bool:
        """Called between steps while no request is running. -> whether operators were replaced by faster ones, so that
        decodes must be captured again."""
        return False

    def explain(self, error: BaseException) -> Exception | None:
        """The error to raise in place of an error of the device, with a remedy; None for other errors."""
        return None
