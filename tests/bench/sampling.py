"""What sampling costs a step: milliseconds for each kind of request, over vocabulary sizes and batch sizes.

    python -m tests.bench sampling [--vocab 32000 151936] [--rows 1 32] [--threads 1]

The logits are peaked as a language model's are (a few likely tokens over a wide tail), or flat, as random weights give.
"""

from __future__ import annotations

import statistics
import time

import torch

from kernels.contract.step import SlotSampling
from kernels.sampling.sampler import Sampler
from tests.bench._options import command_line
from tests.bench._record import record

__all__ = ["main"]

_KINDS = {
    "greedy": SlotSampling(temperature=0.0),
    "temperature 0.8": SlotSampling(temperature=0.8),
    "top-k 50": SlotSampling(top_k=50),
    "top-p 0.9": SlotSampling(top_p=0.9),
    "top-k 20, top-p 0.8": SlotSampling(temperature=0.7, top_k=20, top_p=0.8),
    "min-p 0.05": SlotSampling(min_p=0.05),
    "repetition 1.05": SlotSampling(temperature=0.0, repetition_penalty=1.05),
    "frequency 0.5": SlotSampling(temperature=0.0, frequency_penalty=0.5),
    "logit bias": SlotSampling(temperature=0.0, bias_ids=(5, 6), bias_values=(1.0, -1.0)),
    "greedy, 5 logprobs": SlotSampling(temperature=0.0, logprobs=5),
}


def _peaked(rows: int, vocab: int) -> torch.Tensor:
    logits = torch.randn(rows, vocab) * 2.0
    return logits.scatter_add_(1, torch.randint(vocab, (rows, 40)), torch.rand(rows, 40) * 16.0)


def _milliseconds(sampler: Sampler, logits: torch.Tensor, history: torch.Tensor, repeats: int) -> float:
    rows = len(logits)
    slots = torch.arange(rows)
    times = []
    for repeat in range(repeats + 2):
        positions = torch.full((rows,), 1000 + repeat)
        started = time.perf_counter()
        sampler.sample(logits, slots, positions, history, host_slots=range(rows))
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:]) * 1e3


def main(argv: list[str] | None = None) -> int:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 151936], help="tokens of each vocabulary")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32], help="of each step")
    parser.add_argument("--threads", type=int, default=1, help="of torch's operators")
    parser.add_argument("--repeats", type=int, default=7, help="measurements; their median counts")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(
        f"milliseconds a call (median of {arguments.repeats}), float32 logits, torch threads: {torch.get_num_threads()}"
    )
    shapes = [(rows, vocab) for vocab in arguments.vocab for rows in arguments.rows]
    cases = [(rows, vocab, name) for rows, vocab in shapes for name in ("peaked", "flat")]
    print(f"{'':22}" + "".join(f"{f'{rows}x{vocab // 1000}k {name}':>17}" for rows, vocab, name in cases))
    for kind, sampling in _KINDS.items():
        cells = []
        for rows, vocab, name in cases:
            logits = _peaked(rows, vocab) if name == "peaked" else torch.randn(rows, vocab) * 0.5
            sampler = Sampler(vocab, rows)
            for slot in range(rows):
                sampler.admit(slot, sampling if sampling.temperature == 0 else _with_seed(sampling, slot), 500)
            history = torch.randint(vocab, (rows, 2048), dtype=torch.int32)
            cells.append(_milliseconds(sampler, logits, history, arguments.repeats))
            record(f"{kind}, {rows} x {vocab // 1000}k {name}", "time", cells[-1], "ms")
        print(f"{kind:22}" + "".join(f"{cell:17.2f}" for cell in cells), flush=True)
    return 0


def _with_seed(sampling: SlotSampling, seed: int) -> SlotSampling:
    return SlotSampling(
        temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p, seed=seed
    )


if __name__ == "__main__":
    raise SystemExit(main())
