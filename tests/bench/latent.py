"""Attention over a latent cache on a CPU: milliseconds of one layer over prefixes and new tokens, in plain torch in the
latent space and with keys and values that are made for it, and by native operators, which take rows of few tokens.

    python -m tests.bench latent [--prefix 0 2048 8192] [--tokens 1 64 128 256 512 1024] [--rows 1] [--threads 2]

The heads are DeepSeek-V2-Lite's: 16 of 128 + 64 numbers, values of 128, vectors of 512 + 64, in bfloat16.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.devices import latent_attention
from kernels.devices.cpu.device import CpuDevice
from kernels.devices.cpu.paged_attention import SHORT, native_latent
from kernels.devices.latent_attention import LatentHeads, attend_latent_heads
from kernels.devices.latent_cache import make_latent
from tests.bench._options import command_line
from tests.bench._record import record

__all__ = ["main"]

_HEADS, _PLAIN, _ROPE, _VALUE, _RANK = 16, 128, 64, 128, 512
_PAGE = 16
_FORMS = {"latent": 1 << 30, "expanded": 1}
"""From how many tokens of a row on keys and values are made."""


def main(argv: list[str] | None = None) -> int:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--prefix", type=int, nargs="+", default=[0, 2048, 8192], help="tokens in the cache before")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 128, 256, 512, 1024], help="of the row")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="each with as many tokens")
    parser.add_argument("--threads", type=int, default=2, help="of each operator")
    parser.add_argument("--repeats", type=int, default=3, help="measurements; the least counts")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    keys, values = torch.randn(_HEADS, _PLAIN, _RANK) * 0.05, torch.randn(_HEADS, _RANK, _VALUE) * 0.05
    heads = LatentHeads(keys.bfloat16(), values.bfloat16())
    device = CpuDevice(arguments.threads)
    device.select_dtype("bfloat16", None)
    native = device.native.wait()
    each = -(-(max(arguments.prefix) + max(arguments.tokens)) // _PAGE)
    count = max(arguments.rows)
    cache = make_latent(count * each, _PAGE, _RANK + _ROPE, torch.bfloat16, torch.device("cpu")).normal_()
    pages = np.arange(count * each, dtype=np.int32).reshape(count, each)
    names = [*_FORMS, "native"]
    print(f"{'rows':>6}{'prefix':>8}{'tokens':>8}" + "".join(f"{name:>12}" for name in names) + "  milliseconds")
    for number, prefix, tokens in itertools.product(arguments.rows, arguments.prefix, arguments.tokens):
        decodes = number if tokens == 1 else 0
        rows = AttentionRows(np.full(number, prefix), np.full(number, tokens), pages[:number], decodes)
        queries = torch.randn(number * tokens, _HEADS, _PLAIN + _ROPE).bfloat16()

        def plain(queries: Tensor = queries, rows: AttentionRows = rows) -> Tensor:
            return attend_latent_heads(queries, cache, rows, heads, 0.07)

        def by_native(queries: Tensor = queries, rows: AttentionRows = rows) -> Tensor:
            assert native is not None
            return native_latent(queries, cache, rows, heads, 0.07, native)

        cells: dict[str, float] = {}
        for name, minimum in _FORMS.items():
            with patch.object(latent_attention, "_EXPANDED", minimum), torch.inference_mode():
                cells[name] = min(_time(plain) for _ in range(arguments.repeats))
        if native is not None and tokens <= SHORT:
            with torch.inference_mode():
                cells["native"] = min(_time(by_native) for _ in range(arguments.repeats))
        rows_of = f"{number} rows of " if number > 1 else ""
        for name, cell in cells.items():
            record(f"{rows_of}{tokens} tokens behind {prefix}, {name}", "time", cell, "ms")
        found = "".join(f"{cells[name]:12.2f}" if name in cells else f"{'-':>12}" for name in names)
        print(f"{number:>6}{prefix:>8}{tokens:>8}{found}", flush=True)
    return 0


def _time(attend: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    attend()
    return (time.perf_counter() - started) * 1e3


if __name__ == "__main__":
    raise SystemExit(main())
