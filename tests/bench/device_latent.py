"""Attention over a latent cache (MLA) on a GPU: ``python -m tests.bench device --only latent``.

No model is loaded. Of DeepSeek-V2-Lite's 16 heads and DeepSeek-V3's 128: microseconds a layer, and the bytes of latent
vectors that are read in a second as a share of what a sum over 1 GiB reads; of prompts TFLOP/s, what a query does not
see left out. Layers with caches of their own follow one another in a CUDA graph, so that none finds its cache in L2.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from tests.bench._device_rows import PAGE_SIZE
from tests.bench._record import record

__all__ = ["latent"]

RANK, ROPE = 512, 64
CACHED = 4096
DECODES = ((16, 1), (16, 16), (16, 64), (16, 256), (128, 1), (128, 16))
"""Heads and rows."""
PROMPTS = ((16, 4096), (128, 1024))
"""Heads and tokens."""
ROUNDS = 7


def latent() -> None:
    """Measure, print and record each row."""
    import torch

    with torch.inference_mode():
        data = torch.ones(1 << 30, dtype=torch.int8, device="cuda").view(torch.int64)
        rate = data.nbytes / statistics.median(_seconds(data.sum, 4))
        print(
            f"\nmemory reads {rate / 1e12:.2f} TB/s\n\n| heads | rows | time a layer | |\n|---|---|---|---|", flush=True
        )
        for heads, rows in DECODES:
            layers = max(2, min(27, 256 // rows))
            times = _layer_seconds(heads, rows, CACHED, 1, layers)
            share = rows * (CACHED + 1) * (RANK + ROPE) * 2 / statistics.median(times) / rate
            point = f"latent {heads} heads, {rows} x {CACHED}"
            record(point, "time a layer", [each * 1e6 for each in times], "us")
            record(point, "of memory's rate", share)
            print(f"| {heads} | {rows} x {CACHED} | {statistics.median(times) * 1e6:.1f} us | {share:.2f} of it |")
        for heads, tokens in PROMPTS:
            times = _layer_seconds(heads, 1, 0, tokens, 2)
            work = heads * tokens * (tokens + 1) * (2 * RANK + ROPE)
            rate = work / statistics.median(times) / 1e12
            record(f"latent {heads} heads, prompt of {tokens}", "throughput", rate, "TFLOP/s")
            print(f"| {heads} | prompt of {tokens} | {statistics.median(times) * 1e6:.0f} us | {rate:.0f} TFLOP/s |")


def _layer_seconds(heads: int, rows: int, cached: int, tokens: int, layers: int) -> list[float]:
    import numpy as np
    import torch

    from kernels.core.attention_rows import AttentionRows
    from kernels.devices.cuda.attention.decode import DecodeScratch
    from kernels.devices.cuda.attention.latent import attend_latent
    from kernels.devices.cuda.attention.plan import plan_attention

    device = torch.device("cuda")
    columns = -(-(cached + tokens) // PAGE_SIZE)
    pages = 1 + np.random.default_rng(1).permutation(rows * columns).astype(np.int32).reshape(rows, columns)
    counts = np.full(rows, tokens)
    step = AttentionRows(np.full(rows, cached), counts, pages, rows if tokens == 1 else 0)
    plan = plan_attention(step, 0, 1, lambda array: torch.from_numpy(array.copy()).to(device))
    shape = (1 + rows * columns, PAGE_SIZE, RANK + ROPE)
    caches = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(layers)]
    queries = torch.randn(rows * tokens, heads, RANK, device=device, dtype=torch.bfloat16)
    rotated = torch.randn(rows * tokens, heads, ROPE, device=device, dtype=torch.bfloat16)
    scratch = DecodeScratch(device)

    def run() -> None:
        for cache in caches:
            attend_latent(queries, rotated, cache, plan, 0.1, scratch)

    return [each / layers for each in _seconds(run, 1)]


def _seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of a call on the device, in each round."""
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    taken = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / repeats / 1e3)
    return taken
