"""What every NPU does."""

from __future__ import annotations

from kernels.devices.features import DeviceFeatures

__all__ = ["FEATURES"]

FEATURES = DeviceFeatures(
    collectives="hccl",
    cache_dtypes=frozenset({"bfloat16", "int8"}),
    captures=True,
    plans_latent=True,
    plans=frozenset({"sinks", "sizes"}),
)
