"""The CPU: native operators for bf16 on AMX, AVX-512 with BF16, VNNI and VBMI, AVX2 or NEON, unless the user limits it
to none; else plain torch operators, bf16 through oneDNN, and float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.cpu_isa import IsaError, chosen_isa
from kernels.contract.errors import UnsupportedError
from kernels.core.logit_blocks import greedy_tokens
from kernels.core.operators import Draws, Masks
from kernels.devices.base import Device, DeviceTraits
from kernels.devices.communication import Communication
from kernels.devices.cpu.attention import CpuAttention
from kernels.devices.cpu.cache import CpuCaches
from kernels.devices.cpu.capture import CpuCapture
from kernels.devices.cpu.dense_linear import bf16_is_fast
from kernels.devices.cpu.elementwise import CpuElementwise
from kernels.devices.cpu.experts import CpuExpertLayers
from kernels.devices.cpu.host import usable_cores
from kernels.devices.cpu.linear import CpuLinearLayers
from kernels.devices.cpu.memory import CpuMemory
from kernels.devices.cpu.native_operators import NativeOperators
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.sampling import SamplingKernels

__all__ = ["CpuDevice"]


class CpuDevice(Device):
    """``threads``: of each operator. 0: one per usable core for native operators, whose threads take chunks of work as
    they become free; one less for torch's, where a step is as slow as its slowest thread: on two busy cores, of which
    the event loop wants one now and then, one thread decodes nearly twice as fast as two.

    The default cache is a compromise between the prompts that it finds again and the memory of a small host: with it a
    server of the included model stays under 700 MB.
    ``ranks``: how many processes run the model together. ``host_workers``: how many processes share the cores and the
    memory of this host.
    ``batch_invariant``: whether a row's result must depend on no other; see ``InvariantCpuDevice``.
    """

    name = "cpu"
    cache: CpuCaches

    def __init__(
        self, threads: int = 0, ranks: int = 1, batch_invariant: bool = False, *, host_workers: int = 1
    ) -> None:
        try:
            isa = chosen_isa()
        except IsaError as error:
            raise UnsupportedError(f"TROUPE_CPU_ISA: {error}") from None
        self.torch_device = torch.device("cpu")
        self.traits = DeviceTraits(
            memory_fraction=0.25,
            cache_tokens=40960,
            verify_budget=64,  # four tiles of rows: up to there tokens cost less than one each, then as much
            verifies_without_prefills=True,  # beside a prompt each costs as much as a token of it
            cpu_isa=str(isa),
        )
        self.threads = threads or max(1, (usable_cores() - 1) // host_workers)
        self.native = NativeOperators(isa, threads or max(1, usable_cores() // host_workers), batch_invariant)
        self.communication = Communication("gloo")
        self.memory = CpuMemory(host_workers)
        fallbacks = Fallbacks()
        self.elementwise = CpuElementwise(self.native)
        linear = CpuLinearLayers(self.elementwise, fallbacks, self.native)
        self.linear = linear
        self.experts = CpuExpertLayers(linear, fallbacks, self.native)
        self.cache = CpuCaches(self.native)
        attention = CpuAttention(self.cache, self.native)
        self.attention = attention
        self.sampling = SamplingKernels(greedy=self._greedy, draw=self._draw)
        self.capture = CpuCapture(self.native, attention, ranks)

    def bind_thread(self) -> None:
        torch.set_num_threads(self.threads)  # OpenMP keeps it by calling thread

    def select_dtype(self, requested: str, stored: str | None) -> torch.dtype:
        if requested == "auto":
            requested = "float32" if stored in (None, "float32") or not self._has_bf16() else "bfloat16"
        if requested not in ("bfloat16", "float32"):
            raise UnsupportedError(f"dtype {requested!r} is not supported on cpu; use auto, bfloat16 or float32")
        if requested == "float32":
            return torch.float32
        self.native.open()
        return torch.bfloat16

    def _has_bf16(self) -> bool:
        """Whether bf16 is faster than float32: by oneDNN, or by native operators, now or once they are compiled."""
        if bf16_is_fast():
            return True
        self.native.open()
        return self.native.current is not None or self.native.building is not None

    @property
    def operators(self) -> str:
        return self.native.origin

    def finish_operators(self) -> None:
        self.native.wait()

    def renew_operators(self) -> bool:
        return self.native.renew()

    def _greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See ``operators.Greedy``."""
        native = self.native.fitting(logits.dtype, True)
        return greedy_tokens(logits) if native is None else native.greedy(logits)

    def _draw(
        self,
        logits: Tensor,
        draws: Draws,
        positions: Tensor,
        ids: Tensor | None,
        vocab: int,
        masks: Masks | None = None,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """See ``operators.Draw``."""
        native = self.native.fitting(logits.dtype, True)
        return None if native is None else native.draw(logits, draws, positions, ids, vocab, masks, rows)
