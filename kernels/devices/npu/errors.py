"""Translates errors of CANN for users: the first cause, the device, and a remedy.

A failed kernel is reported by a later call that synchronizes, with a long log of the runtime. The error code matters;
torch_npu writes it in several formats, and the first one in the text is the cause.
"""

from __future__ import annotations

import re

from kernels.contract.errors import UnsupportedError
from kernels.devices.device_error import DeviceError, out_of_memory

__all__ = ["DeviceError", "explain", "first_code"]


_ADVICE: tuple[tuple[tuple[int, ...], str], ...] = (
    (
        (207001, 507053, 507054, 507055, 207018),
        "the device's memory failed or ran out: lower --mem-fraction-static or --max-total-tokens, and look for other "
        "processes on the device with npu-smi info; if it says ECC, the device needs service",
    ),
    (
        (207005, 207007, 207008),
        "the device has no stream or event left: capture fewer graphs (--cuda-graph-max-bs, --cuda-graph-bs) or none "
        "(--disable-cuda-graph), or update the driver to HDK 25.5.1 or later",
    ),
    (
        (561002, 561103, 561000, 161001, 161002),
        "a kernel refused its arguments: this is a fault of the engine or of its CANN version; try --attention-backend "
        "torch_native and report it",
    ),
    (
        (507014, 507034, 507017),
        "a kernel did not end in its time: run with ASCEND_LAUNCH_BLOCKING=1 and --disable-cuda-graph to see which, "
        "and lower --chunked-prefill-size",
    ),
    (
        (507015, 507016, 507018, 507035, 507036),
        "a kernel failed on the device, often at a bad address: run with ASCEND_LAUNCH_BLOCKING=1 and "
        "--disable-cuda-graph to see which",
    ),
    (
        (507048, 507049, 507046, 507047, 507056, 507057),
        "a collective or a link to another device hung: see which of the other workers died first; HCCL_EXEC_TIMEOUT "
        "says after how many seconds one gives up",
    ),
    (
        (107024, 107025, 107027, 107028, 107030, 107031, 107033, 107038, 107040, 107041),
        "work could not be captured into a graph or replayed: run with --disable-cuda-graph",
    ),
    (
        (107001, 107002, 507033, 507899, 507901, 507010),
        "the device is not there or was lost: check it with npu-smi info and ASCEND_RT_VISIBLE_DEVICES",
    ),
)

_CODE = re.compile(
    r"(?:error\s*code(?:\s*is)?|errcode|err\s*code|return\s*code|ret(?:urned)?|error)[\s:=\[(]{0,4}(\d{6})", re.I
)
_CAUSE = re.compile(r"\b(E[A-Z0-9]\d{4})\b[:\s]*([^\n]{0,300})")


def first_code(text: str) -> int | None:
    """The first error code in the text."""
    result = _CODE.search(text)
    return int(result[1]) if result else None


def explain(error: BaseException, device: str) -> Exception | None:
    """The error to raise instead of ``error``; None if the device did not cause it. ``device``: its name for the
    user."""
    if isinstance(error, UnsupportedError | DeviceError):
        return None
    text = str(error)
    short = out_of_memory(error, device, _line(text), "npu-smi info")
    if short is not None:
        return short
    code = first_code(text)
    if code is None:
        return None
    advice = next((words for codes, words in _ADVICE if code in codes), None)
    if advice is None:
        advice = "see the runtime's log in ~/ascend/log, or run with ASCEND_LAUNCH_BLOCKING=1 to see which call it was"
    return DeviceError(f"{device} failed with error {code} ({_cause(text)}); {advice}")


def _cause(text: str) -> str:
    """CANN's description: an error quoted from its log, or the text after torch_npu's [Error], or the first line."""
    logged = _CAUSE.search(text)
    if logged:
        return f"{logged[1]}: {logged[2].strip()}"
    _, marked, rest = text.partition("[Error]:")
    words = [line.strip() for line in rest.splitlines() if line.strip() and "Rectify the fault" not in line]
    return " ".join(words)[:300] if marked and words else _line(text)


def _line(text: str) -> str:
    """The first non-empty line, without the source position at its start."""
    for line in text.splitlines():
        words = re.sub(r"^\s*\[[^\]]*\]\s*", "", line).strip()
        if words:
            return words[:300]
    return "no message"
