"""The products of a layer as they follow one another on a GPU: ``python -m tests.bench device --only chain``.

A chain of layers, each its four products, the norms before two of them (another stands for attention) and the sums
behind two, is one CUDA graph, in which a launch may start while the one before it ends. Microseconds of a layer for
each way to make all products, the median of replays in turns, and below it the share of the time that reading the
weights takes at ``PEAK``. Layers together are several times what the L2 cache holds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tests.bench.device_products import PEAK, projections

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.core.operators import PendingResidual

__all__ = ["chain"]

WITHIN = ", norms within"
SINGLE = (
    "single",
    *(name + norms for name in ("warps of a row", "rows of a warp") for norms in ("", WITHIN)),
)
KINDS = {
    "bf16": (
        2.0,
        {
            1: ("vector",),
            16: ("cuBLAS", "bulk"),
            32: ("cuBLAS", "bulk"),
            64: ("cuBLAS", "bulk"),
        },
    ),
    "int8": (1.0, {1: ("vector", "skinny", *SINGLE)}),
    "fp8": (1.0, {1: ("vector", "skinny", *SINGLE)}),
    "4 bits": (0.5 + 2 / 128, {1: ("tiles of 64", "tiles of 128", *SINGLE)}),
}
"""Bytes of a number, and the ways of so many tokens. What ends in "within": the norm is made by the product."""
ROUNDS = 9
BYTES = 2 << 30  # of a chain's weights, at least


class _Forced:
    """Replaces ``Choices``: forces the kernel of a given name where there is one, else the last or none."""

    def __init__(self) -> None:
        self.way = ""

    def run(self, shape: object, ways: Mapping[str, Callable[[], Tensor]], *_: object) -> Tensor:
        wanted = self.way.removesuffix(WITHIN)
        return ways[wanted if wanted in ways else next(reversed(ways))]()

    def name(self, shape: object, trial: object, preferred: str = "") -> str | None:
        return self.way.removesuffix(WITHIN) if "within" in self.way or preferred else None


def chain(names: Sequence[str]) -> None:
    """Measure and print each kind of weight."""
    import torch

    with torch.inference_mode():
        for name in names:
            print(f"\n| {name} | tokens | way | us a layer | of the memory's rate |\n|---|---|---|---|---|", flush=True)
            for kind in KINDS:
                _measure(name, kind)


def _measure(name: str, kind: str) -> None:
    import torch

    from kernels.devices.cuda.elementwise.norms import CudaNorm
    from kernels.devices.cuda.matmul.norm_then_linear import CudaNormThenLinear, Fuses
    from kernels.devices.cuda.matmul.residual_linear import CudaResidualLinear
    from kernels.devices.linear import NormThenLinear

    each, ways = KINDS[kind]
    shapes = [shape for what, shape in projections(name).items() if what != "head"]
    size = sum(outputs * inputs for outputs, inputs, _ in shapes) * each
    forced = _Forced()
    layers = [[_linear(kind, *shape, forced) for shape in shapes] for _ in range(int(BYTES / size) + 1)]
    hidden, attended = shapes[0][1], shapes[1][1]
    norm, other = (CudaNorm(torch.ones(wide, dtype=torch.bfloat16, device="cuda"), 1e-5) for wide in (hidden, attended))

    into = [[CudaResidualLinear(linear) for linear in (layer[1], layer[3])] for layer in layers]
    behind = [
        [
            CudaNormThenLinear(norm, linear, forced) if isinstance(linear, Fuses) else NormThenLinear(norm, linear)
            for linear in (layer[0], layer[2])
        ]
        for layer in layers
    ]

    def run(first: Tensor) -> Tensor:
        unadded: PendingResidual = first
        residual = first.clone()
        for (output, down), (qkv, gates) in zip(into, behind, strict=True):
            x, residual = qkv.add(unadded, residual)
            unadded, residual = output(other(x[:, :attended]), residual)
            x, residual = gates.add(unadded, residual)
            unadded, residual = down(x, residual)
        return residual

    for tokens, some in ways.items():
        first = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
        graphs = {}
        for forced.way in some:
            run(first)
            torch.cuda.synchronize()
            graphs[forced.way] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[forced.way]):
                run(first)
        taken: dict[str, list[float]] = {way: [] for way in graphs}
        for _ in range(ROUNDS):
            for way, graph in graphs.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                taken[way].append(begin.elapsed_time(end) / 2 / len(layers) * 1e3)
        for way, times in taken.items():
            time = statistics.median(times)
            share = size / PEAK * 1e6 / time
            print(f"| {kind} | {tokens} | {way} | {time:.1f} | {share:.0%} |", flush=True)


def _linear(kind: str, outputs: int, inputs: int, gated: bool, forced: Any) -> Callable[[Tensor], Tensor]:
    import torch

    from kernels.devices.cuda.matmul.eight_bit import EightBitLinear
    from kernels.devices.cuda.matmul.grouped import GroupedLinear, WideWeight
    from kernels.devices.cuda.matmul.linear import CudaLinear
    from kernels.weights.quantization.weights import GroupedWeight, quantize_fp8, quantize_int8

    if kind == "4 bits":
        values = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device="cuda")
        scales = (torch.rand(outputs, inputs // 128, device="cuda") / inputs**0.5 / 4).half()
        weight = GroupedWeight(values, scales, None, 128, 4, dtype=torch.bfloat16)
        return GroupedLinear(weight, None, WideWeight(values.device), forced, gated)
    floats = torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda") / inputs**0.5
    if kind == "bf16":
        return CudaLinear(floats, None, forced, gated)
    return EightBitLinear((quantize_int8 if kind == "int8" else quantize_fp8)(floats), None, forced, gated)
