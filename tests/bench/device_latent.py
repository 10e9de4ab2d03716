"""Attention over a latent cache (MLA) on a GPU: ``python -m tests.bench device --only latent``.

No model is loaded. Of DeepSeek-V2-Lite's 16 heads and DeepSeek-V3's 128: microseconds a layer, and the bytes of latent
vectors that are read in a second as a share of what a sum over 1 GiB reads. Prompts are measured with the products that
lead into the latent space and out of it, or that make keys and values: in the form that is chosen, and in the latent
space. Layers with caches of their own follow one another in a CUDA graph, so that none finds its cache in L2.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.bench._device_rows import PAGE_SIZE
from tests.bench._record import record

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from kernels.devices.cuda.attention.plan import AttentionPlan

__all__ = ["latent", "random_values", "seconds_of", "step_plan"]

PLAIN, RANK, ROPE = 128, 512, 64
DECODES = (
    (16, 1, 4096),
    (16, 1, 32768),
    (16, 16, 4096),
    (16, 64, 4096),
    (16, 256, 4096),
    (128, 1, 4096),
    (128, 16, 4096),
)
"""Heads, rows, and cached tokens."""
PROMPTS = ((16, 0, 256), (16, 0, 1024), (16, 0, 4096), (16, 4096, 256), (16, 30720, 2048), (128, 0, 1024))
"""Heads, cached tokens, and tokens of the prompt."""
ROUNDS = 7


def latent() -> None:
    """Measure, print and record each row."""
    import torch

    with torch.inference_mode():
        data = torch.ones(1 << 30, dtype=torch.int8, device="cuda").view(torch.int64)
        rate = data.nbytes / statistics.median(seconds_of(data.sum, 4))
        print(
            f"\nmemory reads {rate / 1e12:.2f} TB/s\n\n| heads | rows | time a layer | |\n|---|---|---|---|", flush=True
        )
        for heads, rows, cached in DECODES:
            layers = max(2, min(27, (256 << 12) // (rows * cached)))
            times = _layer_seconds(heads, rows, cached, layers)
            share = rows * (cached + 1) * (RANK + ROPE) * 2 / statistics.median(times) / rate
            point = f"latent {heads} heads, {rows} x {cached}"
            record(point, "time a layer", [each * 1e6 for each in times], "us")
            record(point, "of memory's rate", share)
            print(f"| {heads} | {rows} x {cached} | {statistics.median(times) * 1e6:.1f} us | {share:.2f} of it |")
        for heads, cached, tokens in PROMPTS:
            chosen, space = _prompt_seconds(heads, cached, tokens)
            point = f"latent {heads} heads, prompt of {tokens} behind {cached}"
            record(point, "time a layer", [each * 1e6 for each in chosen], "us")
            record(point, "time a layer in the latent space", [each * 1e6 for each in space], "us")
            both = " | ".join(f"{statistics.median(each) * 1e6:.0f} us" for each in (chosen, space))
            print(f"| {heads} | prompt of {tokens} behind {cached} | {both} in the latent space |")


def step_plan(rows: int, cached: int, tokens: int, window: int = 0, kv_heads: int = 1) -> tuple[AttentionPlan, int]:
    """The plan of rows of so many tokens behind cached ones, and pages of the cache."""
    import numpy as np

    from kernels.core.attention_rows import AttentionRows
    from kernels.devices.cuda.attention.plan import plan_attention

    columns = -(-(cached + tokens) // PAGE_SIZE)
    pages = 1 + np.random.default_rng(1).permutation(rows * columns).astype(np.int32).reshape(rows, columns)
    step = AttentionRows(np.full(rows, cached), np.full(rows, tokens), pages, rows if tokens == 1 else 0)
    return plan_attention(step, window, kv_heads, _put), 1 + rows * columns


def _put(array: np.ndarray) -> Tensor:
    import torch

    return torch.from_numpy(array.copy()).to("cuda")


def _layer_seconds(heads: int, rows: int, cached: int, layers: int) -> list[float]:
    from kernels.devices.cuda.attention.decode import DecodeScratch
    from kernels.devices.cuda.attention.latent import attend_latent

    plan, pages = step_plan(rows, cached, 1)
    caches = [random_values(pages, PAGE_SIZE, RANK + ROPE) for _ in range(layers)]
    queries, rotated, scratch = (
        random_values(rows, heads, RANK),
        random_values(rows, heads, ROPE),
        DecodeScratch(random_values(1).device),
    )

    def run() -> None:
        for cache in caches:
            attend_latent(queries, rotated, cache, plan, 0.1, scratch)

    return [each / layers for each in seconds_of(run, 1)]


def _prompt_seconds(heads: int, cached: int, tokens: int) -> tuple[list[float], list[float]]:
    """In the form that is chosen, and in the latent space."""
    from kernels.devices.cuda.attention.decode import DecodeScratch
    from kernels.devices.cuda.attention.latent_prompts import LatentPlan, attend_latent_rows, plan_latent
    from kernels.devices.latent_attention import LatentHeads

    step, pages = step_plan(1, cached, tokens)
    cache, queries = random_values(pages, PAGE_SIZE, RANK + ROPE), random_values(tokens, heads, PLAIN + ROPE)
    made = LatentHeads(random_values(heads, PLAIN, RANK) / RANK**0.5, random_values(heads, RANK, PLAIN) / RANK**0.5)
    plans = plan_latent(step, made, ROPE, _put), LatentPlan(step, step, tokens)
    scratch = DecodeScratch(cache.device)

    def seconds(plan: LatentPlan) -> list[float]:
        return seconds_of(lambda: attend_latent_rows(queries, cache, plan, made, 0.1, scratch), 2)

    return seconds(plans[0]), seconds(plans[1])


def random_values(*shape: int) -> Tensor:
    import torch

    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def seconds_of(call: Callable[[], object], repeats: int) -> list[float]:
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
