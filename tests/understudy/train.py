"""Train the understudy: `python -m tests.understudy.train tokenizer`, then `python -m tests.understudy.train weights`.

The first command learns the tokenizer and writes the small files of the model directory (about a minute on one core).
The second encodes the corpus on all cores and fits the weights on one GPU; without a GPU it runs too, on the processor,
and serves only to see that it works. README.md beside this file has the numbers of the recorded run.
"""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernels.contract.environment import NO_AUTOLOAD

os.environ.update(NO_AUTOLOAD)
# isort: split
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from app.understudy import MODEL_DIR
from tests.understudy.corpus import Mix
from tests.understudy.lexicon import CONFIG, train_tokenizer, write_model_files
from tests.understudy.network import Weights, initial_weights, loss, rotation
from tests.understudy.packing import LEARN, Stream, encode_corpus, rows, split_by_length

__all__ = ["blended", "fit", "main", "save", "stored"]

SHORT = 512


class Rows:
    """Rows of one stream on the device, padded to `size` tokens and to one number of documents, over and over."""

    def __init__(self, stream: Stream, size: int, longest: int, device: str) -> None:
        lengths = np.diff(stream.bounds)
        self.size, self.longest, self.device = size, longest, device
        self.ranges = list(rows(stream, size))
        if len(self.ranges) > 1:
            del self.ranges[-1]  # it is mostly padding
        self.bounds = stream.bounds
        self.most = max((last - first for first, last in self.ranges), default=0) + 1  # the padding counts as one
        learned = (stream.tokens & LEARN) != 0
        learned[stream.bounds[:-1]] = False  # nothing precedes a document's first token
        ids = (stream.tokens & (LEARN - 1)).astype(np.int32)
        targets = np.full(len(ids), -100, dtype=np.int32)
        targets[:-1] = np.where(learned[1:], ids[1:], -100)
        positions = np.arange(len(ids), dtype=np.int64) - np.repeat(stream.bounds[:-1], lengths)
        self.columns = [torch.from_numpy(column.astype(np.int32)).to(device) for column in (ids, targets, positions)]

    def __iter__(self) -> Iterator[tuple[tuple[Any, ...], int]]:
        fills = (0, -100, 0)
        while self.ranges:
            for first, last in self.ranges:
                start, end = int(self.bounds[first]), int(self.bounds[last])
                columns = []
                for column, fill in zip(self.columns, fills, strict=True):
                    row = torch.full((self.size,), fill, dtype=torch.int64, device=self.device)
                    row[: end - start] = column[start:end]
                    columns.append(row)
                bounds = np.full(self.most + 1, self.size, dtype=np.int32)
                bounds[: last - first + 1] = self.bounds[first : last + 1] - start
                yield (*columns, torch.from_numpy(bounds).to(self.device, non_blocking=True)), self.longest


def _mixed(streams: list[Rows]) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Rows of all streams, each stream as often as its share of the tokens."""
    total = sum(len(stream.ranges) for stream in streams)
    running = [iter(stream) for stream in streams]
    debts = [0.0 for _ in streams]
    while True:
        for at, stream in enumerate(streams):
            debts[at] += len(stream.ranges) / total
        at = max(range(len(streams)), key=debts.__getitem__)
        debts[at] -= 1
        yield next(running[at])


def fit(weights: Weights, config: dict[str, Any], streams: list[Rows], steps: int, rate: float, device: str) -> Weights:
    """Train `weights` for `steps` rows: AdamW, a short warm-up, a plateau, and a linear way down over the last 60 %."""
    tables = rotation(config, device)
    matrices = [w for name, w in weights.items() if w.dim() == 2 and "embed" not in name]
    others = [w for name, w in weights.items() if w.dim() == 1 or "embed" in name]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=rate,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )
    compute = torch.compile(loss, dynamic=False) if device == "cuda" else loss
    warm, plateau = max(1, min(200, steps // 10)), 0.4 * steps
    started = time.monotonic()
    for step, (row, longest) in enumerate(_mixed(streams), 1):
        scale = min(1.0, step / warm, (steps - step + 1) / (steps - plateau))
        for group in optimizer.param_groups:
            group["lr"] = rate * scale
        value = compute(weights, config, tables, row, longest)
        value.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(1, steps // 40) == 0 or step in (1, 20, 100):
            seconds = time.monotonic() - started
            print(f"step {step}/{steps}  loss {float(value.detach()):.4f}  {seconds:.0f} s", flush=True)
        if step == steps:
            break
    return weights


def stored(directory: Path, device: str) -> Weights:
    """The weights that `save` wrote, in float32, to be trained further."""
    tensors = load_file(str(directory / "model.safetensors"))
    return {name: weight.float().to(device).requires_grad_() for name, weight in tensors.items()}


def blended(trained: Weights, start: Weights, keep: float) -> Weights:
    """The mean of two sets of weights, `keep` the share of `start`: what both have learned errs less than either.

    Follows "Robust fine-tuning of zero-shot models" (arXiv 2109.01903).
    """
    return {name: torch.lerp(trained[name].detach(), start[name].detach(), keep) for name in trained}


def save(weights: Weights, directory: Path) -> None:
    """Write the weights as one safetensors file in bfloat16."""
    tensors = {name: weight.detach().to(torch.bfloat16).cpu().contiguous() for name, weight in weights.items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})


def main(argv: list[str] | None = None) -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.understudy.train", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("what", choices=("tokenizer", "weights"))
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="directory to write (default: the included model)")
    parser.add_argument("--start", type=Path, help="directory of weights to train further (default: new weights)")
    parser.add_argument("--keep", type=float, default=0.0, help="share of --start's weights in those that are saved")
    parser.add_argument("--documents", type=int, default=4_000_000, help="documents of the corpus")
    parser.add_argument("--steps", type=int, default=16_000, help="rows to train on")
    parser.add_argument("--row", type=int, default=131072, help="tokens in a row")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=7, help="of the corpus and of new weights")
    parser.add_argument(
        "--emphasis",
        nargs="+",
        default=[],
        metavar="LESSON=FACTOR",
        help="lessons that come more often, for example arithmetic.compare=4; all others stay in the corpus",
    )
    parser.add_argument("--thinking", type=float, default=Mix().thinking, help="share of conversations with thoughts")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(argv)
    if given.what == "tokenizer":
        write_model_files(given.out, train_tokenizer(given.seed, min(given.documents, 120_000)))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.monotonic()
    context = CONFIG["max_position_embeddings"]
    try:
        mix = Mix(
            {name: float(factor) for name, _, factor in (e.partition("=") for e in given.emphasis)}, given.thinking
        )
    except ValueError as error:
        parser.error(f"--emphasis: {error}")
    tokenizer = MODEL_DIR / "tokenizer.json"
    tokens, lengths = encode_corpus(tokenizer, given.seed, given.documents, given.cores, context, mix)
    print(f"{len(lengths)} documents, {len(tokens)} tokens in {time.monotonic() - started:.0f} s", flush=True)
    short, long = split_by_length(tokens, lengths, SHORT)
    streams = [Rows(short, given.row, SHORT, device), Rows(long, given.row, context, device)]
    weights = stored(given.start, device) if given.start else initial_weights(CONFIG, given.seed, device)
    fit(weights, CONFIG, [stream for stream in streams if stream.ranges], given.steps, given.rate, device)
    if given.start and given.keep:
        weights = blended(weights, stored(given.start, device), given.keep)
    save(weights, given.out)
    if given.out != MODEL_DIR:
        write_model_files(given.out, Tokenizer.from_file(str(tokenizer)))
    print(f"saved to {given.out} after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
