"""The dtypes that accelerators compute in."""

from __future__ import annotations

import torch

from kernels.contract.errors import UnsupportedError

__all__ = ["accelerator_dtype"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def accelerator_dtype(requested: str, stored: str | None, device: str) -> torch.dtype:
    """As ``Device.select_dtype``. ``device``: for the message."""
    if requested == "auto":
        requested = "float16" if stored == "float16" else "bfloat16"
    result = _DTYPES.get(requested)
    if result is None:
        raise UnsupportedError(f"dtype {requested!r} is not supported on {device}; use bfloat16, float16 or float32")
    return result
