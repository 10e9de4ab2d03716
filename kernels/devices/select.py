"""Which device a name stands for."""

from __future__ import annotations

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import UnsupportedError
from kernels.devices.base import Device

__all__ = ["select_device"]


def select_device(config: RunnerConfig) -> Device:
    """The device that ``config.device`` names: cpu, npu or cuda. Raises UnsupportedError if it is not available."""
    if config.device == "cpu":
        from kernels.devices.cpu.device import CpuDevice
        from kernels.devices.cpu.invariant import InvariantCpuDevice

        if config.invariant:
            return InvariantCpuDevice(config)
        return CpuDevice(config.threads, config.tp_size, host_workers=config.host_workers)
    if config.device == "npu":
        try:
            from kernels.devices.npu.device import NpuDevice
            from kernels.devices.npu.invariant import InvariantNpuDevice
        except (ImportError, RuntimeError) as error:  # RuntimeError: beside a PyTorch built for another accelerator
            raise UnsupportedError(
                f"torch_npu cannot be loaded ({error}); install it (pip install 'troupe-llm[npu]'), and CANN, whose "
                "set_env.sh must be sourced; or use --device cpu"
            ) from error

        return InvariantNpuDevice(config) if config.invariant else NpuDevice(config)
    if config.device == "cuda":
        try:
            from kernels.devices.cuda.device import CudaDevice
            from kernels.devices.cuda.invariant import InvariantCudaDevice
        except (ImportError, RuntimeError) as error:
            raise UnsupportedError(
                f"the CUDA kernels cannot be loaded ({error}); install a PyTorch built for CUDA, which brings triton, "
                "or use --device cpu"
            ) from error

        return InvariantCudaDevice(config) if config.invariant else CudaDevice(config)
    raise UnsupportedError(f"device {config.device!r} is not supported; use --device cpu, npu or cuda")
