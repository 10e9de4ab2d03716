"""Which platform a device name stands for."""

from __future__ import annotations

from kernels.platforms.base import Platform, PlatformError

__all__ = ["select_platform"]


def select_platform(device: str, threads: int = 0) -> Platform:
    """``device`` as the command line gives it: ``cpu``. Raises PlatformError for one that this build does not know."""
    if device == "cpu":
        from kernels.platforms.cpu import CpuPlatform

        return CpuPlatform(threads)
    raise PlatformError(f"device {device!r} is not supported; use --device cpu")
