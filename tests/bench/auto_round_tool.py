"""Quantize the included model with AutoRound, for the accuracy table of checkpoints that tools write.

    python -m tests.bench auto_round_tool DIR [--schemes W4A16 W8A16] [--formats auto_round auto_round:auto_awq]
    python -m tests.bench quantization --schemes --shapes --made DIR/*

The first in an environment of its own (pip install auto-round; 0.15 was tried). It calibrates over documents that are
neither trained on nor asked about, and takes minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.understudy import MODEL_DIR
from tests.bench._calibration import calibration_texts
from tests.bench._options import command_line

__all__ = ["main"]

DOCUMENTS, LENGTH = 64, 128


def main(argv: list[str]) -> None:
    parser = command_line(__name__, __doc__)
    parser.add_argument("directory", type=Path, help="where the checkpoints go")
    parser.add_argument(
        "--schemes",
        nargs="*",
        default=["W4A16", "W8A16"],
        choices=["W4A16", "W8A16"],
        help="bits of weights and of inputs",
    )
    parser.add_argument(
        "--formats", nargs="*", default=["auto_round"], help="auto_round, auto_round:auto_awq, auto_gptq"
    )
    parser.add_argument("--iterations", type=int, default=50, help="of tuning a layer")
    given = parser.parse_args(argv)
    for scheme in given.schemes:
        for form in given.formats:
            name = f"{form.replace(':', '-')}-{scheme}"
            _write(given.directory / f"auto-round-{name}", scheme, form, given.iterations)


def _write(target: Path, scheme: str, form: str, iterations: int) -> None:
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    tool = AutoRound(
        model,
        tokenizer,
        scheme=scheme,
        group_size=64,
        iters=iterations,
        nsamples=DOCUMENTS,
        seqlen=LENGTH,
        batch_size=8,
        dataset=_documents(tokenizer),
        device_map="cpu",
    )
    tool.quantize_and_save(str(target), format=form)
    for folder in [path for path in target.iterdir() if path.is_dir()]:  # it makes one of its own there
        for file in folder.iterdir():
            file.rename(target / file.name)
        folder.rmdir()


def _documents(tokenizer: Any) -> Any:
    """Tokens [1, LENGTH] of one long text each."""
    import torch

    tokens = torch.tensor(tokenizer.encode("".join(calibration_texts(8 * DOCUMENTS))))
    return [row[None] for row in tokens[: DOCUMENTS * LENGTH].view(-1, LENGTH)]
