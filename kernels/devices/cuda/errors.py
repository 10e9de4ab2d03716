"""Translates errors of CUDA for users: the first cause, the device, and a remedy."""

from __future__ import annotations

from kernels.contract.errors import UnsupportedError
from kernels.devices.device_error import DeviceError, out_of_memory

__all__ = ["DeviceError", "explain"]


_WHICH = "run with CUDA_LAUNCH_BLOCKING=1 and --disable-cuda-graph to see which"

_ADVICE: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("illegal memory access", "misaligned address", "illegal address", "device-side assert", "illegal instruction"),
        f"a kernel failed on the device, often at a bad address: {_WHICH}",
    ),
    (("launch timed out", "the launch timed out"), f"a kernel did not end in its time: {_WHICH}"),
    (
        ("uncorrectable ecc", "hardware stack error", "unspecified launch failure", "nvlink"),
        "the device or its memory failed: see nvidia-smi -q, and Xid lines in the kernel's log; it may need service",
    ),
    (
        ("nccl",),
        "a collective failed or a peer is gone: see which of the other workers died first; NCCL_DEBUG=INFO says more",
    ),
    (("capture",), "work could not be captured into a graph or replayed: run with --disable-cuda-graph"),
    (
        (
            "no cuda-capable device",
            "invalid device ordinal",
            "device is busy",
            "unavailable",
            "system not yet initialized",
        ),
        "the device is not there or is taken: check it with nvidia-smi and CUDA_VISIBLE_DEVICES",
    ),
    (
        ("no kernel image", "unsupported ptx", "insufficient driver", "driver version"),
        "this PyTorch was not built for the device or its driver: install one that was (pip install torch)",
    ),
    (
        ("cublas", "cudnn"),
        f"a library of the device failed, often for lack of memory: lower --mem-fraction-static, or {_WHICH}",
    ),
)


def explain(error: BaseException, device: str) -> Exception | None:
    """The error to raise instead of ``error``; None if the device did not cause it. ``device``: its name for the
    user."""
    if isinstance(error, UnsupportedError | DeviceError):
        return None
    text = str(error)
    short = out_of_memory(error, device, _line(text), "nvidia-smi")
    if short is not None:
        return short
    lower = text.lower()
    if not isinstance(error, RuntimeError) or not any(word in lower for word in ("cuda", "nccl", "cublas", "cudnn")):
        return None
    advice = next((words for marks, words in _ADVICE if any(mark in lower for mark in marks)), _WHICH)
    return DeviceError(f"{device} failed ({_line(text)}); {advice}")


def _line(text: str) -> str:
    """The first non-empty line."""
    return next((line.strip()[:300] for line in text.splitlines() if line.strip()), "no message")
