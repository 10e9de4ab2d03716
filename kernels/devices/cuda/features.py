"""What every NVIDIA GPU does."""

from __future__ import annotations

from kernels.devices.features import DeviceFeatures
from kernels.weights.quantization.cache import CACHE_DTYPES

__all__ = ["FEATURES"]

FEATURES = DeviceFeatures(
    collectives="nccl",
    cache_dtypes=frozenset(CACHE_DTYPES),  # fp8 from compute capability 8.9 on
    captures=True,
    plans_latent=True,
    plans=frozenset({"caps", "sinks", "chunks", "growth", "sizes", "wide"}),
    captures_states=True,
)
