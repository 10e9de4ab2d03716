"""The platform that a draft runs on: the target's, or on an NPU one whose attention is by other kernels."""

from __future__ import annotations

import msgspec

from kernels.platforms.base import Platform, PlatformError
from kernels.platforms.select import select_platform
from kernels.speculative.settings import SpeculativeSettings
from kernels.step import RunnerConfig

__all__ = ["draft_platform"]


def draft_platform(
    config: RunnerConfig, settings: SpeculativeSettings, platform: Platform, stored: str | None
) -> Platform:
    """``platform``: the target's. ``stored``: the target's dtype, as its checkpoint says. Raises PlatformError."""
    backend = settings.draft_attention_backend
    if config.device != "npu" and settings.attention_mode != "prefill":
        raise PlatformError(
            f"--speculative-attention-mode {settings.attention_mode} chooses between kernels of an NPU; leave it out "
            f"with --device {config.device}"
        )
    if not backend:
        return platform
    if config.device != "npu":
        raise PlatformError(
            f"--speculative-draft-attention-backend {backend} names kernels of an NPU; leave it out with --device "
            f"{config.device}"
        )
    own = select_platform(
        msgspec.structs.replace(
            config, attention_backend=backend, prefill_attention_backend="", decode_attention_backend=""
        )
    )
    own.dtype(config.dtype, stored)
    if platform.cache_dtype is not None:
        own.check_cache_dtype(platform.cache_dtype)
    own.cache_dtype = platform.cache_dtype
    return own
