"""Training the drafts of the included model.

    python -m tests.understudy.drafts.train texts      # the target answers prompts of its corpus
    python -m tests.understudy.drafts.train drafts     # every draft, or some: --only eagle3 dflash
    python -m tests.understudy.drafts.train measure    # acceptance on held-out questions

The first two want a GPU; without one they run too, on the processor, and serve only to see that they work.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from kernels.contract.environment import NO_AUTOLOAD

os.environ.update(NO_AUTOLOAD)
# isort: split
import torch

from app.understudy import MODEL_DIR
from app.understudy.drafts import DRAFTS, TOKEN_MAP
from tests.understudy.drafts.decoder import load
from tests.understudy.drafts.fit import fit
from tests.understudy.drafts.measure import held_out, measure
from tests.understudy.drafts.recipes import CONFIGS, create, load_draft, save_draft
from tests.understudy.drafts.texts import frequencies, load_texts, write_texts

__all__ = ["main"]

_FREQUENT = 2048  # tokens of the token map


def _measure(model: Path, directory: Path, names: list[str], device: str, count: int, depths: list[int]) -> None:
    """Print tokens a cycle for each draft: chains of each depth, then combs, and the rates of the deepest."""
    target = load(model, device)
    dialogues = held_out(target, count)
    print(f"{len(dialogues)} questions, {sum(len(one.answer) for one in dialogues)} tokens", flush=True)
    print("| draft | " + " | ".join(f"chain {depth} | comb {depth}" for depth in depths) + " | rates |")
    for name in names:
        draft = load_draft(directory / name, device)
        if name == "standalone":
            draft.dtype = target.dtype
        got = [measure(draft, target, dialogues, depth) for depth in depths]
        cells = " | ".join(f"{one.chain:.2f} | {one.comb:.2f}" for one in got)
        print(f"| {name} | {cells} | {' '.join(f'{rate:.2f}' for rate in got[-1].rates)} |", flush=True)


def main(argv: list[str] | None = None) -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.understudy.drafts.train", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("what", choices=("texts", "drafts", "measure"))
    parser.add_argument("--texts", type=Path, default=Path(tempfile.gettempdir()) / "understudy-texts.npz")
    parser.add_argument("--out", type=Path, default=DRAFTS, help="directory of the drafts' directories")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="directory of the target")
    parser.add_argument("--start", type=Path, help="directory of drafts to train further (default: new weights)")
    in_box = [name for name in CONFIGS if (DRAFTS / name).is_dir()]
    parser.add_argument("--only", nargs="+", choices=tuple(CONFIGS), default=in_box)
    parser.add_argument("--documents", type=int, default=600_000, help="documents of the corpus, half with new answers")
    parser.add_argument("--batch", type=int, default=8192, help="prompts that are answered at once")
    parser.add_argument("--row", type=int, default=24576, help="tokens of a training step")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seconds", type=float, default=300, help="time of the training")
    parser.add_argument("--questions", type=int, default=0, help="held-out questions to measure on (0: all)")
    parser.add_argument("--depths", type=int, nargs="+", default=[3, 4, 5, 7])
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.monotonic()
    if given.what == "measure":
        _measure(given.model, given.out, given.only, device, given.questions, given.depths)
        return
    target = load(given.model, device)
    if given.what == "texts":
        write_texts(given.texts, target, given.documents, given.seed, given.cores, given.batch)
        print(f"{given.texts} after {time.monotonic() - started:.0f} s", flush=True)
        return
    counts = frequencies(given.texts, target.config["vocab_size"])
    if given.start:
        drafts = {name: load_draft(given.start / name, device).requires_grad_().train() for name in given.only}
    else:
        drafts = {name: create(name, target, counts, given.seed).to(device) for name in given.only}
    if "standalone" in drafts:
        drafts["standalone"].dtype = target.dtype
    texts = load_texts(given.texts, device)
    print(f"{len(texts.lengths)} texts, {len(texts.tokens)} tokens", flush=True)
    steps = fit(drafts, target, texts, given.row, given.rate, given.seconds, given.seed)
    for name, draft in drafts.items():
        save_draft(draft, given.out / name)
        print(f"{name}: {sum(weight.numel() for weight in draft.parameters()):,} parameters")
    if given.start:  # the stored token map stays: EAGLE-3 keeps its vocabulary
        print(f"{steps} steps, saved to {given.out} after {time.monotonic() - started:.0f} s", flush=True)
        return
    frequent = counts.argsort(kind="stable")[::-1][:_FREQUENT].tolist()
    (given.out / TOKEN_MAP.name).write_text(json.dumps(frequent) + "\n", encoding="utf-8")
    print(f"{steps} steps, saved to {given.out} after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
