"""Layers with states on a GPU: ``python -m tests.bench device --only states``.

No model is loaded. Microseconds a layer for the convolution, the rule and what goes with the states, as steps run them,
one launch after the other. Decodes by the kernels and by plain torch, and the bytes of states that the kernels read and
write in a second: gated delta nets with Qwen3-Next's heads (16 of keys, 32 of values, each of 128 numbers), Mamba 2
with Nemotron-H's (128 of 64 numbers in 8 groups, with states of 128). Sixteen prompts of 31 to 991 tokens in a delta
net, together and one by one by plain torch, and together with the kernel that scans their chunks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.bench._record import record

if TYPE_CHECKING:
    import torch

    from kernels.core.batch import StateSegments

__all__ = ["states"]

KEY_HEADS, HEADS, DIM, TAPS = 16, 32, 128, 4
MAMBA_HEADS, MAMBA_DIM, GROUPS, STATE = 128, 64, 8, 128
ROWS = (1, 16, 64, 256)
PROMPTS = 31 + 64 * np.random.default_rng(1).permutation(16)
PAGE_TOKENS = 1024
LAYERS = 8
ROUNDS = 7


def states() -> None:
    """Measure, print and record each row."""
    import torch

    from kernels.devices.cuda.delta_rule import CudaDeltaRule
    from kernels.devices.cuda.state_space import CudaStateSpace
    from kernels.devices.delta_rule import DeltaRule
    from kernels.devices.state_space import StateSpace

    device = torch.device("cuda")
    kinds: list[tuple[str, int, Callable[..., list[float]], Any, Any]] = [
        ("states", HEADS * DIM * DIM, _delta_seconds, CudaDeltaRule(), DeltaRule()),
        ("mamba", MAMBA_HEADS * MAMBA_DIM * STATE, _mamba_seconds, CudaStateSpace(), StateSpace()),
    ]
    with torch.inference_mode():
        print("\n| layers | rows | kernels | plain torch | states by the kernels |\n|---|---|---|---|---|", flush=True)
        for name, numbers, seconds, own, plain in kinds:
            for rows in ROWS:
                segments = _decodes(rows, device)
                kernels, torchs = (seconds(rule, rows, rows, segments, device) for rule in (own, plain))
                rate = 2 * rows * numbers * 4 / statistics.median(kernels)
                point = f"{name} {rows} rows"
                record(point, "time a layer", [each * 1e6 for each in kernels], "us")
                record(point, "time a layer, plain torch", [each * 1e6 for each in torchs], "us")
                record(point, "states", rate / 1e12, "TB/s")
                times = (f"{statistics.median(each) * 1e6:.1f} us" for each in (kernels, torchs))
                print(f"| {name} | {rows} | {' | '.join(times)} | {rate / 1e12:.2f} TB/s |", flush=True)
        prompts(device)


def prompts(device: torch.device) -> None:
    """Measure, print and record prompts of unequal lengths."""
    from kernels.devices.delta_rule import DeltaRule

    tokens = int(PROMPTS.sum())
    kinds: list[tuple[str, Any, tuple[StateSegments, ...]]] = [
        ("together", DeltaRule(), _prompts(device)),
        ("one by one", DeltaRule(), _prompts_alone(device)),
    ]
    if device.type == "cuda":
        from kernels.devices.cuda.delta_rule import CudaDeltaRule

        kinds.append(("together, scanned by the kernel", CudaDeltaRule(), _prompts(device)))
    for name, rule, segments in kinds:
        seconds = _delta_seconds(rule, len(PROMPTS), tokens, segments, device)
        record(f"states {len(PROMPTS)} prompts", f"time a layer, {name}", [each * 1e3 for each in seconds], "ms")
        print(f"{len(PROMPTS)} prompts, {tokens} tokens, {name}: {statistics.median(seconds) * 1e3:.2f} ms a layer")


def _decodes(rows: int, device: torch.device) -> tuple[StateSegments, ...]:
    counts = np.ones(rows, dtype=np.int64)
    return _segments(counts * 9, counts, 1 + np.arange(rows, dtype=np.int32)[:, None], None, device)


def _prompts(device: torch.device) -> tuple[StateSegments, ...]:
    pages = 1 + np.arange(len(PROMPTS), dtype=np.int32)[:, None]
    return _segments(np.zeros_like(PROMPTS), PROMPTS, pages, None, device)


def _prompts_alone(device: torch.device) -> tuple[StateSegments, ...]:
    offsets, result = np.cumsum(PROMPTS) - PROMPTS, list[Any]()
    for row in range(len(PROMPTS)):
        one, page = slice(row, row + 1), np.array([[1 + row]], dtype=np.int32)
        result += _segments(np.zeros(1, dtype=np.int64), PROMPTS[one], page, offsets[one], device)
    return tuple(result)


def _segments(starts: Any, counts: Any, pages: Any, offsets: Any, device: torch.device) -> tuple[StateSegments, ...]:
    import torch

    from kernels.devices.state_cache import plan_segments

    return plan_segments(starts, counts, pages, PAGE_TOKENS, lambda array: torch.from_numpy(array).to(device), offsets)


def _delta_seconds(
    rule: Any, rows: int, tokens: int, segments: tuple[StateSegments, ...], device: torch.device
) -> list[float]:
    import torch

    from kernels.devices.delta_rule import DeltaInputs
    from kernels.devices.state_cache import make_states
    from kernels.models.layers.delta_net import DeltaConfig, run_segments
    from kernels.models.layers.recurrent import CausalConvolution

    delta = DeltaConfig(KEY_HEADS, HEADS, DIM, DIM, TAPS)
    caches = [make_states(delta.state(), rows + 1, device) for _ in range(LAYERS)]
    convolution = CausalConvolution(torch.randn(delta.channels, 1, TAPS, device=device))
    mixed = torch.randn(tokens, delta.channels, device=device, dtype=torch.bfloat16)
    betas, decays = torch.rand(tokens, HEADS, device=device), -torch.rand(tokens, HEADS, 1, device=device)
    inputs = DeltaInputs(mixed, mixed, betas, decays)
    out = torch.empty(tokens, HEADS, DIM, device=device, dtype=torch.bfloat16)

    def run() -> None:
        for cache in caches:
            run_segments(delta, rule, convolution, inputs, cache, segments, out=out)

    return [each / LAYERS for each in _seconds(run, device)]


def _mamba_seconds(
    space: Any, rows: int, tokens: int, segments: tuple[StateSegments, ...], device: torch.device
) -> list[float]:
    import torch

    from kernels.devices.state_cache import make_states
    from kernels.devices.state_space import SpaceInputs
    from kernels.models.layers.mamba import MambaConfig, run_segments
    from kernels.models.layers.recurrent import CausalConvolution

    mamba = MambaConfig(MAMBA_HEADS, MAMBA_DIM, GROUPS, STATE, TAPS, 0)
    caches = [make_states(mamba.state(), rows + 1, device) for _ in range(LAYERS)]
    convolution = CausalConvolution(
        torch.randn(mamba.channels, 1, TAPS, device=device), torch.randn(mamba.channels, device=device)
    )
    mixed = torch.randn(tokens, mamba.channels, device=device, dtype=torch.bfloat16)
    steps, rates = torch.rand(tokens, MAMBA_HEADS, device=device), -torch.rand(MAMBA_HEADS, device=device)
    inputs = SpaceInputs(mixed, steps, rates, torch.rand(MAMBA_HEADS, device=device))
    out = torch.empty(tokens, mamba.inner, device=device)

    def run() -> None:
        for cache in caches:
            run_segments(mamba, space, convolution, inputs, cache, segments, out=out)

    return [each / LAYERS for each in _seconds(run, device)]


def _seconds(call: Callable[[], None], device: torch.device) -> list[float]:
    """Seconds of a call, launches included, in each round."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3 if device.type == "cuda" else 1):
        call()
    result = []
    for _ in range(ROUNDS):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        result.append(time.perf_counter() - begin)
    return result
