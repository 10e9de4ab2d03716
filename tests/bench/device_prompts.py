"""Attention of prompts on a GPU, by each kernel that has it: ``python -m tests.bench device --only prompts``.

No model is loaded. Of each shape, and of chunks of so many tokens behind so many in the cache: microseconds and
TFLOP/s, what a query does not see left out. Calls follow one another in CUDA graphs, and kernels take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

from tests.bench._device_rows import PAGE_SIZE, SHAPES

__all__ = ["prompts"]

CHUNKS: dict[str, list[tuple[int, int]]] = {
    "4 x 4096": [(0, 4096)] * 4,
    "16384": [(0, 16384)],
    "8 x 2048 behind 2048": [(2048, 2048)] * 8,
    "2048 behind 2048": [(2048, 2048)],
    "2048": [(0, 2048)],
    "1024": [(0, 1024)],
    "32 x 512": [(0, 512)] * 32,
    "4 x 512": [(0, 512)] * 4,
    "128 x 128": [(0, 128)] * 128,
    "128": [(0, 128)],
    "16 x 32 behind 2000": [(2000, 32)] * 16,
    "mixed": [(0, 3000), (512, 2000), (3000, 100), (0, 64), (100, 700), (7, 1500)],
}
"""Tokens in the cache, and of the chunk."""
ROUNDS = 7
LONG = 2e-3  # seconds of a graph, about


def prompts(names: Sequence[str]) -> None:
    """Measure and print each row."""
    import torch

    with torch.inference_mode():
        print("\n| model | chunks | | plain | | specialized | times |\n|" + "---|" * 7, flush=True)
        for name in names:
            for chunks, rows in CHUNKS.items():
                _measure(name, chunks, rows)


def _measure(name: str, chunks: str, given: Sequence[tuple[int, int]]) -> None:
    import numpy as np
    import torch

    from kernels.core.attention_rows import AttentionRows
    from kernels.devices.cuda.attention.prefill import attend_prefills, plan_prefills
    from kernels.devices.cuda.attention.prefill_warp_specialized import attend_prompts

    device, config = torch.device("cuda"), SHAPES[name]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", config["hidden_size"] // heads)
    starts, counts = np.array(given).T
    columns = int(-(-(starts + counts).max() // PAGE_SIZE))
    order = 1 + np.random.default_rng(1).permutation(len(given) * columns).astype(np.int32)
    rows = AttentionRows(starts, counts, order.reshape(len(given), columns), 0)
    plan = plan_prefills(rows, 0, lambda array: torch.from_numpy(array).to(device))
    every = torch.randn(int(counts.sum()), heads + 2 * kv_heads, dim, device=device, dtype=torch.bfloat16)
    cache = torch.randn(1 + order.size, 2, kv_heads, PAGE_SIZE, dim, device=device, dtype=torch.bfloat16)
    queries, scale = every[:, :heads], dim**-0.5
    found = torch.empty(2, *queries.shape, device=device, dtype=torch.bfloat16)
    work = 4 * heads * dim * float((counts * starts + counts * (counts + 1) / 2).sum())
    times = _times(
        [
            partial(attend_prefills, queries, cache, plan, 0, scale, found[0]),
            partial(attend_prompts, queries, cache, plan, scale, found[1]),
        ],
        max(3, int(LONG / (work / 4e14))),
    )
    assert (found[0].float() - found[1].float()).norm() <= 5e-3 * found[0].float().norm()
    cells = " | ".join(f"{each * 1e6:.1f} us | {work / each / 1e12:.0f} TFLOP/s" for each in times)
    print(f"| {name} | {chunks} | {cells} | {times[0] / times[1]:.2f} |", flush=True)


def _times(calls: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    """Median seconds on the device, measured in turns."""
    import torch

    graphs = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for _ in range(repeats):
                call()
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for graph, each in zip(graphs, taken, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            each.append(begin.elapsed_time(end) / repeats / 1e3)
    return [statistics.median(each) for each in taken]
