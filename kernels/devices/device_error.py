"""Errors of a device while it runs."""

from __future__ import annotations

import os

import torch

__all__ = ["DeviceError", "out_of_memory", "visible_index"]


class DeviceError(RuntimeError):
    """The device failed. Its state is not reliable any more: the worker must be started anew."""


def out_of_memory(error: BaseException, device: str, line: str, tool: str) -> DeviceError | None:
    """The error to raise if ``error`` means that memory is exhausted. ``device``: its name for the user; ``line``: the
    part of the error to quote; ``tool``: a command that shows what else is on the device."""
    if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error).lower():
        return None
    return DeviceError(
        f"{device} is out of memory ({line}); lower --mem-fraction-static, --max-total-tokens or "
        f"--chunked-prefill-size, or look for other processes on the device with {tool}"
    )


def visible_index(variable: str, index: int) -> str:
    """The host's name of this process's device ``index``, where the environment ``variable`` lists visible devices."""
    visible = [part.strip() for part in os.environ.get(variable, "").split(",") if part.strip()]
    return visible[index] if index < len(visible) else str(index)
