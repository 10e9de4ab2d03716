"""Which platform a device name stands for."""

from __future__ import annotations

from kernels.platforms.base import Platform, PlatformError
from kernels.step import RunnerConfig

__all__ = ["select_platform"]


def select_platform(config: RunnerConfig) -> Platform:
    """The platform of ``config.device``: cpu, npu or cuda. Raises PlatformError where there is none."""
    if config.device == "cpu":
        from kernels.platforms.cpu import CpuPlatform
        from kernels.platforms.cpu_invariant import InvariantCpuPlatform

        return InvariantCpuPlatform(config) if config.invariant else CpuPlatform(config.threads, config.tp_size)
    if config.device == "npu":
        try:
            from kernels.platforms.npu import NpuPlatform
            from kernels.platforms.npu_invariant import InvariantNpuPlatform
        except (ImportError, RuntimeError) as error:  # RuntimeError: beside a PyTorch built for another accelerator
            raise PlatformError(
                f"torch_npu cannot be loaded ({error}); install it (pip install 'troupe-llm[npu]'), and CANN, whose "
                "set_env.sh must be sourced; or use --device cpu"
            ) from error

        return InvariantNpuPlatform(config) if config.invariant else NpuPlatform(config)
    if config.device == "cuda":
        try:
            from kernels.platforms.cuda import CudaPlatform
            from kernels.platforms.cuda_invariant import InvariantCudaPlatform
        except (ImportError, RuntimeError) as error:
            raise PlatformError(
                f"the CUDA kernels cannot be loaded ({error}); install a PyTorch built for CUDA, which brings triton, "
                "or use --device cpu"
            ) from error

        return InvariantCudaPlatform(config) if config.invariant else CudaPlatform(config)
    raise PlatformError(f"device {config.device!r} is not supported; use --device cpu, npu or cuda")
