"""Limits of npu_moe_distribute_dispatch_v2 and npu_moe_distribute_combine_v2, from the vendor's documentation. These
operators send tokens to the ranks of their experts and add up the results."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["exchange_algorithm", "exchange_limit"]

_MAX_CHOSEN = 16
_MIB = 1 << 20


@dataclass(frozen=True)
class _Limits:
    """Limits of an NPU generation. ``rows``: most tokens of a rank. ``ranks``: possible numbers of ranks. ``places``:
    most expert places over all ranks. ``widths``: possible hidden sizes, which are multiples of ``multiple``."""

    rows: int
    ranks: range
    places: int
    widths: range
    multiple: int


_LIMITS = {
    "A2": _Limits(256, range(2, 9), 512, range(32, 7169), 32),  # more ranks would need several nodes
    "A3": _Limits(512, range(2, 769), 1024, range(1024, 8193), 32),
}


def exchange_algorithm(generation: str) -> str:
    """The argument ``comm_alg`` of the operators."""
    return "fullmesh" if generation == "A2" else ""


def exchange_limit(generation: str, width: int, local: int, chosen: int, ranks: int) -> int:
    """The most tokens of a rank that the operators support; 0: they do not support these sizes. ``width``: hidden size.
    ``local``: expert places of a rank. ``chosen``: experts of a token. The environment's HCCL_BUFFSIZE is the buffer of
    a communicator in MiB, 200 by default."""
    limits = _LIMITS.get(generation)
    fits = limits is not None and ranks in limits.ranks and local * ranks <= limits.places
    if limits is None or not fits or width not in limits.widths or width % limits.multiple or chosen > _MAX_CHOSEN:
        return 0
    text = os.environ.get("HCCL_BUFFSIZE", "")
    buffer = (int(text) if text.isdecimal() else 200) * _MIB
    if generation == "A2":
        left, each = buffer // 2 - 2 * _MIB, ranks * min(local, chosen) * width * 2
    else:
        row = _aligned(_aligned(2 * width, 32) + 64, 512)
        left, each = buffer // 2, local * ranks * row + chosen * _aligned(2 * width, 512)
    return max(0, min(limits.rows, left // each))


def _aligned(size: int, unit: int) -> int:
    return -(-size // unit) * unit
