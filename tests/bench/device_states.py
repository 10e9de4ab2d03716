"""Decodes of gated delta nets on a GPU: ``python -m tests.bench device --only states``.

No model is loaded. Of Qwen3-Next's heads (16 of keys, 32 of values, each of 128 numbers): microseconds a layer for the
convolution, the rule and what goes with the states, by the kernels and by plain torch, as steps run them, one launch
after the other; and the bytes of states that the kernels read and write in a second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from tests.bench._record import record

__all__ = ["states"]

KEY_HEADS, HEADS, DIM, TAPS = 16, 32, 128, 4
ROWS = (1, 16, 64, 256)
LAYERS = 8
ROUNDS = 7


def states() -> None:
    """Measure, print and record each row."""
    import torch

    with torch.inference_mode():
        print("\n| rows | kernels | plain torch | states by the kernels |\n|---|---|---|---|", flush=True)
        for rows in ROWS:
            kernels, plain = _layer_seconds(rows, True), _layer_seconds(rows, False)
            rate = 2 * rows * HEADS * DIM * DIM * 4 / statistics.median(kernels)
            point = f"states {rows} rows"
            record(point, "time a layer", [each * 1e6 for each in kernels], "us")
            record(point, "time a layer, plain torch", [each * 1e6 for each in plain], "us")
            record(point, "states", rate / 1e12, "TB/s")
            times = (f"{statistics.median(each) * 1e6:.1f} us" for each in (kernels, plain))
            print(f"| {rows} | {' | '.join(times)} | {rate / 1e12:.2f} TB/s |", flush=True)


def _layer_seconds(rows: int, own: bool) -> list[float]:
    import numpy as np
    import torch

    from kernels.devices.cuda.delta_rule import CudaDeltaRule
    from kernels.devices.delta_rule import DeltaInputs, DeltaRule
    from kernels.devices.state_cache import make_states, plan_segments
    from kernels.models.layers.delta_net import DeltaConfig, run_segments
    from kernels.models.layers.recurrent import CausalConvolution

    device = torch.device("cuda")
    delta = DeltaConfig(KEY_HEADS, HEADS, DIM, DIM, TAPS)
    caches = [make_states(delta.state(), rows + 1, device) for _ in range(LAYERS)]
    pages = 1 + np.arange(rows, dtype=np.int32)[:, None]
    counts = np.ones(rows, dtype=np.int64)
    segments = plan_segments(counts * 9, counts, pages, 1024, lambda array: torch.from_numpy(array).to(device))
    convolution = CausalConvolution(torch.randn(delta.channels, 1, TAPS, device=device))
    mixed = torch.randn(rows, delta.channels, device=device, dtype=torch.bfloat16)
    betas, decays = torch.rand(rows, HEADS, device=device), -torch.rand(rows, HEADS, 1, device=device)
    inputs = DeltaInputs(mixed, mixed, betas, decays)
    out = torch.empty(rows, HEADS, DIM, device=device, dtype=torch.bfloat16)
    rule = CudaDeltaRule() if own else DeltaRule()

    def run() -> None:
        for cache in caches:
            run_segments(delta, rule, convolution, inputs, cache, segments, out=out)

    return [each / LAYERS for each in _seconds(run)]


def _seconds(call: Callable[[], None]) -> list[float]:
    """Seconds of a call, launches included, in each round."""
    import torch

    for _ in range(3):
        call()
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found
