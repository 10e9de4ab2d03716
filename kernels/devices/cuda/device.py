"""NVIDIA GPUs: CUDA graphs, own kernels in Triton, matrix products by cuBLAS."""

from __future__ import annotations

import torch

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import UnsupportedError
from kernels.devices.base import Device, DeviceTraits
from kernels.devices.communication import Communication
from kernels.devices.cuda.attention.attention import CudaAttention
from kernels.devices.cuda.cache import CudaCaches
from kernels.devices.cuda.capture import CudaCapture
from kernels.devices.cuda.convolution import CudaConvolution
from kernels.devices.cuda.delta_rule import CudaDeltaRule
from kernels.devices.cuda.drafting.draft_kernels import CudaDraftKernels
from kernels.devices.cuda.elementwise.elementwise import CudaElementwise
from kernels.devices.cuda.elementwise.sampling import greedy_tokens, mask_logits
from kernels.devices.cuda.errors import explain
from kernels.devices.cuda.features import FEATURES
from kernels.devices.cuda.linear import CudaLinearLayers
from kernels.devices.cuda.matmul.autotune import Choices
from kernels.devices.cuda.moe.experts import CudaExpertLayers
from kernels.devices.cuda.state_space import CudaStateSpace
from kernels.devices.device_error import visible_index
from kernels.devices.dtypes import accelerator_dtype
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.sampling import SamplingKernels
from kernels.devices.staged_memory import StagedMemory

__all__ = ["CudaDevice"]


class CudaDevice(Device):
    """One GPU of this process: ``config.device_index`` counts those that CUDA_VISIBLE_DEVICES shows.

    Raises UnsupportedError if the device is missing.
    """

    cache: CudaCaches
    memory: StagedMemory

    def __init__(self, config: RunnerConfig) -> None:
        index = config.device_index
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "PyTorch finds no CUDA device: check the driver (nvidia-smi), whether this PyTorch was built for CUDA "
                f"(it says {torch.version.cuda or 'it was not'}), and what does CUDA_VISIBLE_DEVICES say?"
            )
        count = torch.cuda.device_count()
        if index >= count:
            raise UnsupportedError(
                f"there is no GPU {index}: this process sees {count}; see --base-gpu-id and CUDA_VISIBLE_DEVICES"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise UnsupportedError(
                f"{name} has compute capability {major}.{minor}; the kernels need "
                "8.0 (Ampere) or later: use another GPU or --device cpu"
            )
        backends = (config.attention_backend, config.prefill_attention_backend, config.decode_attention_backend)
        if any(backends) or config.sampling_backend == "ascend":
            raise UnsupportedError("attention and sampling backends can be chosen on NPUs only; leave them out")
        # Partial sums are added in float32 for any dtype.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        memory = StagedMemory(device, pinned_reads=True, copy_stream=True, autotunes=True)
        self.compose(config, f"cuda ({name})", memory, Choices(device))

    def compose(self, config: RunnerConfig, name: str, memory: StagedMemory, choices: Choices) -> None:
        """Make the capabilities of a device called ``name`` with this ``memory``. ``choices``: measures kernels."""
        self._config = config
        self.name = name
        self.torch_device = memory.torch_device
        self.traits = DeviceTraits(memory_fraction=0.9, overlaps=True, compiles=True)
        self.communication = Communication(FEATURES.collectives)
        self.memory = memory
        self.elementwise = CudaElementwise(self.torch_device)
        fallbacks = Fallbacks()
        self.linear = CudaLinearLayers(self.elementwise, fallbacks, choices)
        self.experts = CudaExpertLayers(self.linear, fallbacks)
        self.cache = CudaCaches(memory, name)
        self.attention = CudaAttention(self.cache, memory, config.page_size)
        self.sampling = SamplingKernels(greedy=greedy_tokens, mask=mask_logits)
        self.drafting = CudaDraftKernels(memory)
        self.delta = CudaDeltaRule()
        self.space = CudaStateSpace()
        self.convolution = CudaConvolution()
        self.capture = CudaCapture(config, memory, self.cache, self.experts)

    def bind_thread(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def select_dtype(self, requested: str, stored: str | None) -> torch.dtype:
        return accelerator_dtype(requested, stored, "cuda")

    def explain(self, error: BaseException) -> Exception | None:
        index = visible_index("CUDA_VISIBLE_DEVICES", self._config.device_index)
        return explain(error, f"GPU {index} ({self.name})")
