"""The Ascend NPU: Atlas A2, A3 and A5 through torch_npu."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch_npu

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import UnsupportedError
from kernels.devices.base import Device, DeviceTraits
from kernels.devices.communication import Communication
from kernels.devices.device_error import visible_index
from kernels.devices.dtypes import accelerator_dtype
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.npu.attention import NpuAttention
from kernels.devices.npu.backends import ASCEND, AttentionBackends
from kernels.devices.npu.cache import NpuCaches
from kernels.devices.npu.capture import NpuCapture
from kernels.devices.npu.drawing import KernelDraw, TorchDraw
from kernels.devices.npu.errors import explain
from kernels.devices.npu.experts import NpuExpertLayers
from kernels.devices.npu.features import FEATURES
from kernels.devices.npu.linear import NpuLinearLayers
from kernels.devices.npu.operators import NpuElementwise, ascend_top_k_top_p
from kernels.devices.npu.soc import soc_of
from kernels.devices.npu_triton.operators import REFERENCES
from kernels.devices.npu_triton.selection import OwnDraw, select_kernels
from kernels.devices.sampling import SamplingKernels
from kernels.devices.staged_memory import StagedMemory

__all__ = ["NpuDevice"]

_log = logging.getLogger("troupe.kernels.npu")


class NpuDevice(Device):
    """One NPU of this process: ``config.device_index`` counts those that ASCEND_RT_VISIBLE_DEVICES shows.

    Raises UnsupportedError if the device is missing or its generation is not supported.
    """

    def __init__(self, config: RunnerConfig) -> None:
        index = config.device_index
        try:
            count = torch.npu.device_count()
        except RuntimeError as error:
            raise UnsupportedError(
                f"the NPU driver does not respond ({error}); is it installed, and CANN's set_env.sh sourced?"
            ) from error
        if index >= count:
            raise UnsupportedError(
                f"there is no NPU {index}: this process sees {count}; see --base-gpu-id and ASCEND_RT_VISIBLE_DEVICES"
            )
        device = self.torch_device = torch.device("npu", index)
        torch.npu.set_device(device)  # before anything else: other calls would wake device 0
        self.soc = soc = soc_of(torch_npu.npu.get_soc_version(), torch.npu.get_device_name(device))
        if soc.nz_weights:
            torch.npu.config.allow_internal_format = True
        if soc.generation != "A5":  # A5 never compiles at launch and rejects the setting
            torch.npu.set_compile_mode(jit_compile=False)
        if config.op_timeout:
            torch.npu.set_op_timeout_ms(int(1000 * config.op_timeout))
        if config.sampling_backend == ASCEND and not soc.filters_logits:
            raise UnsupportedError("--sampling-backend ascend needs a kernel that Atlas A5 does not have; use pytorch")
        self._config = config
        self.name = f"npu ({soc.generation}, {soc.name})"
        self.traits = DeviceTraits(memory_fraction=0.85, overlaps=True)
        self.communication = Communication(FEATURES.collectives)
        self.backends = AttentionBackends(config, native_only=config.invariant)
        self.memory = StagedMemory(device, pinned_reads=False, copy_stream=False, autotunes=False)
        self.elementwise = NpuElementwise(device)
        fallbacks = Fallbacks()
        self.linear = NpuLinearLayers(self.elementwise, fallbacks, soc)
        self.experts = NpuExpertLayers(self.linear, fallbacks, soc)
        caches = NpuCaches(self.memory, self.backends, config.page_size)
        self.cache = self._caches = caches
        self._use(select_kernels(device))

    def _use(self, own: frozenset[str]) -> None:
        """Run our own kernels ``own``, and torch_npu's operators for the rest."""
        self._own, config, caches = own, self._config, self._caches
        self.attention = NpuAttention(caches, self.memory, self.backends, self.soc, own)
        own_draw = "draw" in own and not config.sampling_backend
        # Beside our own kernel, which cuts ties by their ids: the vendor's keeps all ties, and a request would get
        # other tokens once it has a penalty or log-probabilities.
        filters = self.soc.filters_logits and config.sampling_backend != "pytorch" and not own_draw
        self.sampling = SamplingKernels(
            draw=OwnDraw(self.memory.put) if own_draw else None,
            top_k_top_p=ascend_top_k_top_p if filters else None,
        )
        draw = KernelDraw(self.torch_device) if own_draw else TorchDraw(filters)
        self.capture = NpuCapture(config, self.memory, caches, self.experts, self.backends, draw)

    def agree(self, minimum: Callable[[int], int]) -> bool:
        own = frozenset(name for name in REFERENCES if minimum(int(name in self._own)))
        rest = self._own - own
        if rest:
            _log.warning("Our own kernels %s are not used: another rank does without.", ", ".join(sorted(rest)))
            self._use(own)
        return bool(rest)

    def bind_thread(self) -> None:
        torch.npu.set_device(self.torch_device)

    def select_dtype(self, requested: str, stored: str | None) -> torch.dtype:
        result = accelerator_dtype(requested, stored, "npu")
        self.backends.select(result)
        return result

    def explain(self, error: BaseException) -> Exception | None:
        index = visible_index("ASCEND_RT_VISIBLE_DEVICES", self._config.device_index)
        return explain(error, f"NPU {index} ({self.soc.name})")
