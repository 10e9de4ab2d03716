"""Products of few tokens on a GPU, every way there is to make them: ``python -m tests.bench device --only products``.

No model is loaded. Of each projection of a shape, and of each number of tokens: microseconds of the weight in bfloat16
by cuBLAS and by our own kernels, in int8 and e4m3, and in 4 bits in groups of 128; below it what share of the time that
reading the weight takes at ``PEAK``. The L2 cache is flushed before each product, and what runs before it has ended:
the gain of starting early (``kernels.devices.cuda.launch``) is not in these numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tests.bench._device_rows import SHAPES

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PEAK", "products", "projections"]

PEAK = 4.8e12  # bytes a second: the H200's data sheet
TOKENS = (1, 4, 16, 64)
ROUNDS = 9
FLUSHED = 256 << 20


def products(names: Sequence[str]) -> None:
    """Measure and print each projection."""
    import torch

    with torch.inference_mode():
        for name in names:
            print(f"\n| {name} | tokens | " + " | ".join(WAYS) + " |\n|" + "---|" * (2 + len(WAYS)), flush=True)
            for projection, (outputs, inputs, gated) in projections(name).items():
                _measure(projection, outputs, inputs, gated)


def projections(name: str) -> dict[str, tuple[int, int, bool]]:
    """Outputs, inputs, and whether the first half of the outputs goes through silu."""
    config = SHAPES[name]
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim", hidden // heads)
    keys = config["num_key_value_heads"] * dim
    return {
        "q, k, v": (heads * dim + 2 * keys, hidden, False),
        "output": (hidden, heads * dim, False),
        "gate, up": (2 * inner, hidden, True),
        "down": (hidden, inner, False),
        "head": (config["vocab_size"], hidden, False),
    }


WAYS = ("cuBLAS", "one", "narrow", "narrow, short", "bulk", "int8 many", "int8", "int8 skinny", "fp8 many", "fp8",
        "fp8 skinny", "4 bits, 64", "4 bits, 128", "4 bits, wide")  # fmt: skip


def _measure(projection: str, outputs: int, inputs: int, gated: bool) -> None:
    import torch

    from kernels.devices.cuda.matmul.eight_bit import EightBitLinear
    from kernels.devices.cuda.matmul.gemm_small_quantized import Tiles
    from kernels.devices.cuda.matmul.grouped import GroupedLinear, WideWeight
    from kernels.devices.cuda.matmul.linear import CudaLinear, _multiply
    from kernels.devices.cuda.matmul.packing import tile_words
    from kernels.weights.quantization.weights import GroupedWeight, quantize_fp8, quantize_int8

    device = torch.device("cuda")
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) * 0.02
    plain = CudaLinear(weight, None, gated=gated)
    whole = EightBitLinear(quantize_int8(weight), None, gated=gated)
    eighth = EightBitLinear(quantize_fp8(weight), None, gated=gated)
    values = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=device)
    scales = torch.rand(outputs, inputs // 128, device=device).to(torch.float16) * 0.01
    packed = GroupedWeight(values, scales, None, 128, 4)
    four = GroupedLinear(packed, None, WideWeight(device), gated=gated)
    words = tile_words(packed)
    for tokens in TOKENS:
        x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
        ways: dict[str, tuple[float, Callable[[], Tensor]]] = {
            "cuBLAS": (2, lambda x=x: plain._many(x)),
            "int8 many": (1, lambda x=x: whole._many(x)),
            "fp8 many": (1, lambda x=x: eighth._many(x)),
            "int8 skinny": (1, lambda x=x: whole._ways(x)["skinny"]()),
            "fp8 skinny": (1, lambda x=x: eighth._ways(x)["skinny"]()),
            "4 bits, 64": (0.5, lambda x=x: four._few(x, Tiles(64, words, 6, 4))),
            "4 bits, 128": (0.5, lambda x=x: four._few(x, Tiles(128, words, 4, 8))),
            "4 bits, wide": (0.5, lambda x=x: four._wide(x)),
        }
        if tokens == 1:
            ways["one"] = (2, lambda x=x: _multiply(x, weight, None, gated))
            ways["int8"] = (1, lambda x=x: whole._vector(x))
            ways["fp8"] = (1, lambda x=x: eighth._vector(x))
        else:
            ways |= {name: (2, way) for name, way in plain._ways(x).items()}
        if tokens > 16:
            del ways["4 bits, 64"]
        times = _times({name: way for name, (_, way) in ways.items()})
        cells = []
        for name in WAYS:
            if name not in ways:
                cells.append("")
                continue
            floor = ways[name][0] * outputs * inputs / PEAK * 1e6
            cells.append(f"{times[name]:.1f} ({100 * floor / times[name]:.0f} %)")
        print(f"| {projection} | {tokens} | " + " | ".join(cells) + " |", flush=True)


def _times(ways: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Median microseconds on the device, measured in turns."""
    import torch

    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()  # compiles
    for _ in range(ROUNDS):
        marks = []
        for name, way in ways.items():
            flushed.zero_()
            flushed.zero_()  # long enough for the host to be ahead
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            way()
            end.record()
            marks.append((name, begin, end))
        torch.cuda.synchronize()
        for name, begin, end in marks:
            taken[name].append(begin.elapsed_time(end) * 1e3)
    return {name: statistics.median(times) for name, times in taken.items()}
