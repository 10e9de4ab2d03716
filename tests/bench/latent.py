"""Attention over a latent cache in plain torch: milliseconds of one layer for one row, in the latent space and with
keys and values that are made for it, over prefixes and new tokens.

    python -m tests.bench latent [--prefix 0 2048 8192] [--tokens 1 64 128 256 512 1024] [--threads 2]

The heads are DeepSeek-V2-Lite's: 16 of 128 + 64 numbers, values of 128, vectors of 512 + 64, in bfloat16.
"""

from __future__ import annotations

import time
from unittest.mock import patch

import numpy as np
import torch

from kernels.core.attention_rows import AttentionRows
from kernels.devices import latent_attention
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
    parser.add_argument("--threads", type=int, default=2, help="of torch's operators")
    parser.add_argument("--repeats", type=int, default=3, help="measurements; the least counts")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    keys, values = torch.randn(_HEADS, _PLAIN, _RANK) * 0.05, torch.randn(_HEADS, _RANK, _VALUE) * 0.05
    heads = LatentHeads(keys.bfloat16(), values.bfloat16())
    pages = -(-(max(arguments.prefix) + max(arguments.tokens)) // _PAGE)
    cache = make_latent(pages, _PAGE, _RANK + _ROPE, torch.bfloat16, torch.device("cpu")).normal_()
    print(f"{'prefix':>8}{'tokens':>8}" + "".join(f"{name:>12}" for name in _FORMS) + "  milliseconds")
    for prefix in arguments.prefix:
        for tokens in arguments.tokens:
            rows = AttentionRows(np.array([prefix]), np.array([tokens]), np.arange(pages, dtype=np.int32)[None], 0)
            queries = torch.randn(tokens, _HEADS, _PLAIN + _ROPE).bfloat16()
            cells = []
            for name, minimum in _FORMS.items():
                with patch.object(latent_attention, "_EXPANDED", minimum), torch.inference_mode():
                    cells.append(min(_time(queries, cache, rows, heads) for _ in range(arguments.repeats)))
                record(f"{tokens} tokens behind {prefix}, {name}", "time", cells[-1], "ms")
            print(f"{prefix:>8}{tokens:>8}" + "".join(f"{cell:12.2f}" for cell in cells), flush=True)
    return 0


def _time(queries: torch.Tensor, cache: torch.Tensor, rows: AttentionRows, heads: LatentHeads) -> float:
    started = time.perf_counter()
    attend_latent_heads(queries, cache, rows, heads, 0.07)
    return (time.perf_counter() - started) * 1e3


if __name__ == "__main__":
    raise SystemExit(main())
