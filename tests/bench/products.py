"""What the CPU's native products take, by shape and rows, in process.

    python -m tests.bench products [--kinds bf16 int8 grouped-8] [--rows 1 32 512] [--against CHECKOUT]

Shapes are those of Qwen3-0.6B's layers, each of more weights than a last-level cache holds. TFLOP/s count a product's
multiplications and additions, GB/s the bytes of its weight. ``--against``: another checkout of Troupe, measured in
turns with this one; the ratio is old time over new. ``--clock cpu`` counts processor time of all threads.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tests.bench._options import command_line

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))
KINDS = ("bf16", "int8", "grouped-8", "grouped-4")
_BYTES = 512 << 20  # of a shape's weights together
_GROUP = 64


class _Products:
    """Weights of one shape and kind, multiplied one after another."""

    def __init__(self, kind: str, inputs: int, outputs: int, threads: int) -> None:
        import torch

        from kernels.devices.cpu.native.library import open_library
        from kernels.devices.cpu.native_grouped import NativeGrouped
        from kernels.devices.cpu.native_int8 import NativeInt8
        from kernels.devices.cpu.operators import Native, NativeWeight
        from kernels.weights.quantization.weights import GroupedWeight, quantize_int8

        library = open_library()
        assert library is not None, "there are no native products here: see --cpu-isa, and install a C++ compiler"
        self.native = Native(library, threads)
        dense = torch.randn(outputs, inputs, dtype=torch.bfloat16)
        make: Any
        if kind == "bf16":
            make, self.call = lambda: NativeWeight(self.native, dense), self.native.linear
        elif kind == "int8":
            weight = quantize_int8(dense)
            make, self.call = lambda: NativeInt8(library, weight), self.native.linear_int8
        else:
            bits = 8 if kind == "grouped-8" else 4
            values = torch.randint(0, 256, (outputs, inputs * bits // 8), dtype=torch.uint8)
            scales = torch.rand(outputs, inputs // _GROUP)
            grouped = GroupedWeight(values, scales, None, _GROUP, bits)
            make, self.call = lambda: NativeGrouped(library, grouped), self.native.linear_grouped
        self.weights = [make()]
        self.nbytes = self.weights[0].memory.nbytes
        self.weights += [make() for _ in range(_BYTES // self.nbytes)]
        self.inputs = inputs
        self.number = 0

    def time(self, rows: int, clock: str) -> float:
        """Milliseconds of one product, the median."""
        import torch

        now = time.process_time if clock == "cpu" else time.perf_counter
        x = torch.randn(rows, self.inputs).to(torch.bfloat16)
        times = []
        for _ in range(max(5, min(60, 4096 // rows))):
            self.number = (self.number + 1) % len(self.weights)
            begun = now()
            self.call(x, self.weights[self.number], None)
            times.append(now() - begun)
        return 1e3 * statistics.median(times)


def _child(kind: str, inputs: int, outputs: int, threads: int, clock: str) -> None:
    """Answer each line of the input, a number of rows, with its milliseconds."""
    from kernels.devices.cpu.native.library import build

    build()
    products = _Products(kind, inputs, outputs, threads)
    print(products.nbytes, flush=True)
    for line in sys.stdin:
        print(products.time(int(line), clock), flush=True)


def _measure(kind: str, inputs: int, outputs: int, arguments: argparse.Namespace) -> None:
    from tests.bench._checkout import Checkout  # which another checkout may not have
    from tests.bench._record import record

    roots = [ROOT] if arguments.against is None else [ROOT, arguments.against.resolve()]
    point = kind, inputs, outputs, arguments.threads, arguments.clock
    sides = [Checkout(root, __file__, *point) for root in roots]
    for rows in arguments.rows:
        times: list[list[float]] = [[] for _ in sides]
        for turn in range(arguments.rounds):
            for side in (range(len(sides)), reversed(range(len(sides))))[turn % 2]:
                times[side].append(sides[side].ask(rows))
        new = statistics.median(times[0])
        rates = f"{2 * rows * inputs * outputs / new / 1e9:.2f} | {sides[0].weight_bytes / new / 1e6:.1f}"
        ratio = statistics.median(old / now for now, old in zip(times[0], times[-1], strict=True))
        against = f" {statistics.median(times[1]):.3f} | {ratio:.2f} |" if len(sides) > 1 else ""
        print(f"| {kind} | {inputs} x {outputs} | {rows} | {new:.3f} | {rates} |{against}", flush=True)
        record(f"{kind} {inputs} x {outputs}, {rows} rows", "time", times[0], "ms")
    for side in sides:
        side.close()


def main(argv: list[str] | None = None) -> int:
    if argv is None and sys.argv[1:2] == ["--child"]:
        _child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
        return 0
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--against", type=Path, help="another checkout of Troupe")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=(1, 8, 32, 128, 512, 2048), help="tokens of each product"
    )
    parser.add_argument("--kinds", nargs="+", default=("bf16",), choices=KINDS, help="of weights")
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement; medians count")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of a product")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="wall: elapsed time; cpu: processor time"
    )
    arguments = parser.parse_args(argv)
    from tests.bench._needs import need_native_operators  # which another checkout may not have

    need_native_operators()
    ratio = " old ms | old/new |" if arguments.against else ""
    print(f"| weight | inputs x outputs | rows | ms | TFLOP/s | GB/s |{ratio}\n|{'---|' * (8 if ratio else 6)}")
    for kind in arguments.kinds:
        for inputs, outputs in SHAPES:
            _measure(kind, inputs, outputs, arguments)
    return 0


if __name__ == "__main__":
    main()
