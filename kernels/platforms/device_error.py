"""An error of a device, whichever it is."""

from __future__ import annotations

import torch

__all__ = ["DeviceError", "out_of_memory"]


class DeviceError(RuntimeError):
    """The device failed. It holds no state that can be relied on: the worker must be started anew."""


def out_of_memory(error: BaseException, device: str, line: str, tool: str) -> DeviceError | None:
    """What to raise where ``error`` says so. ``device``: its name for the user; ``line``: what of the error to tell;
    ``tool``: a command that shows what else is on the device."""
    if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error).lower():
        return None
    return DeviceError(
        f"{device} is out of memory ({line}); lower --mem-fraction-static, --max-total-tokens or "
        f"--chunked-prefill-size, or look for other processes on the device with {tool}"
    )
