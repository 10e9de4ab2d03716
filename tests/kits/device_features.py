"""What a device does, read from its capabilities."""

from __future__ import annotations

import torch

from kernels.contract.errors import UnsupportedError
from kernels.devices.base import Device
from kernels.devices.capture import Capture
from kernels.devices.features import DeviceFeatures
from kernels.weights.quantization.cache import CACHE_DTYPES

__all__ = ["features_of"]


def features_of(device: Device) -> DeviceFeatures:
    """The features that ``device`` has."""
    return DeviceFeatures(
        collectives=device.communication.backend,
        cache_dtypes=frozenset(name for name, dtype in CACHE_DTYPES.items() if _keeps(device, dtype)),
        captures=type(device.capture).decodes is not Capture.decodes,
        plans_latent=device.attention.plans_latent,
        plans=device.attention.plans,
        captures_states=device.capture.holds_states,
    )


def _keeps(device: Device, dtype: torch.dtype) -> bool:
    try:
        device.cache.check_dtype(dtype)
    except UnsupportedError:
        return False
    return True
