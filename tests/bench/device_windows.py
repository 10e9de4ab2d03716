"""Attention of decodes with windows, sinks and capped scores on a GPU: ``python -m tests.bench device --only windows``.

No model is loaded. Of gpt-oss-20b's heads and Gemma 2 9B's, behind 4,096 tokens: microseconds a layer, and the bytes of
keys and values that are read in a second as a share of what a sum over 1 GiB reads. Layers with caches of their own
follow one another in a CUDA graph, so that none finds its cache in L2.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from tests.bench._device_rows import PAGE_SIZE
from tests.bench._record import record
from tests.bench.device_latent import random_values, seconds_of, step_plan

__all__ = ["windows"]

CACHED = 4096
ROWS = (1, 64)


class Kind(NamedTuple):
    """``size``: of a head. ``window``: tokens, 0 for all; ``cap``: 0 for none."""

    name: str
    heads: int
    kv_heads: int
    size: int
    window: int = 0
    cap: float = 0.0
    sinks: bool = False


KINDS = (
    Kind("gpt-oss", 64, 8, 64),
    Kind("gpt-oss, sinks", 64, 8, 64, sinks=True),
    Kind("gpt-oss, sinks and a window of 128", 64, 8, 64, window=128, sinks=True),
    Kind("gemma-2", 16, 8, 256),
    Kind("gemma-2, capped", 16, 8, 256, cap=50.0),
)


def windows() -> None:
    """Measure, print and record each row."""
    import torch

    with torch.inference_mode():
        data = torch.ones(1 << 30, dtype=torch.int8, device="cuda").view(torch.int64)
        rate = data.nbytes / statistics.median(seconds_of(data.sum, 4))
        print(
            f"\nmemory reads {rate / 1e12:.2f} TB/s\n\n| heads | rows | time a layer | |\n|---|---|---|---|", flush=True
        )
        for kind in KINDS:
            for rows in ROWS:
                times = _layer_seconds(kind, rows)
                tokens = min(kind.window or CACHED + 1, CACHED + 1)
                share = rows * tokens * 4 * kind.kv_heads * kind.size / statistics.median(times) / rate
                point = f"{kind.name}, {rows} x {CACHED}"
                record(point, "time a layer", [each * 1e6 for each in times], "us")
                record(point, "of memory's rate", share)
                print(
                    f"| {kind.name} | {rows} x {CACHED} | {statistics.median(times) * 1e6:.1f} us | {share:.2f} of it |"
                )


def _layer_seconds(kind: Kind, rows: int) -> list[float]:
    import torch

    from kernels.devices.cuda.attention.decode import DecodeScratch
    from kernels.devices.cuda.attention.plan import attention
    from kernels.devices.row_attention import CapAndSinks

    plan, pages = step_plan(rows, CACHED, 1, kind.window, kind.kv_heads)
    layers = max(2, min(24, (1 << 30) // (rows * CACHED * 4 * kind.kv_heads * kind.size)))
    caches = [random_values(pages, 2, kind.kv_heads, PAGE_SIZE, kind.size) for _ in range(layers)]
    queries, scratch = random_values(rows, kind.heads, kind.size), DecodeScratch(caches[0].device)
    extra = CapAndSinks(kind.cap, torch.zeros(kind.heads, device="cuda") if kind.sinks else None)

    def run() -> None:
        for cache in caches:
            attention(queries, cache, plan, kind.size**-0.5, scratch, extra)

    return [each / layers for each in seconds_of(run, 1)]
