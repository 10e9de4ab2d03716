"""Which platform a device name stands for."""

from __future__ import annotations

from kernels.platforms.base import Platform, PlatformError
from kernels.step import RunnerConfig

__all__ = ["select_platform"]


def select_platform(config: RunnerConfig) -> Platform:
    """The platform of ``config.device``: cpu or npu. Raises PlatformError for one that is not known, or not there."""
    if config.device == "cpu":
        from kernels.platforms.cpu import CpuPlatform

        return CpuPlatform(config.threads, config.tp_size)
    if config.device == "npu":
        try:
            from kernels.platforms.npu import NpuPlatform
        except ImportError as error:
            raise PlatformError(
                f"torch_npu cannot be loaded ({error}); install it (pip install 'troupe-llm[npu]'), and CANN, whose "
                "set_env.sh must be sourced; or use --device cpu"
            ) from error

        return NpuPlatform(config)
    raise PlatformError(f"device {config.device!r} is not supported; use --device cpu or npu")
