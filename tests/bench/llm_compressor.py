"""The included model, quantized by llm-compressor, for the table of accuracy: what such a tool writes is read.

    python -m tests.bench llm_compressor DIR [--schemes FP8_DYNAMIC W8A8 W4A16 MXFP4A16] [--gptq]
    python -m tests.bench quantization --schemes --shapes --made DIR/*

The first in an environment of its own (pip install llmcompressor; 0.14 was tried): it wants other versions of
transformers than the newest. ``--gptq``: W4A16 by GPTQ as well, over documents that are neither trained on nor asked
about, which takes minutes.
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
    parser.add_argument("--schemes", nargs="*", default=["FP8_DYNAMIC", "W8A8", "W4A16"], help="by the tool's names")
    parser.add_argument("--gptq", action="store_true", help="W4A16 by GPTQ as well")
    given = parser.parse_args(argv)
    for scheme in given.schemes:
        _write(given.directory / f"llm-compressor-{scheme}", scheme, gptq=False)
    if given.gptq:
        _write(given.directory / "llm-compressor-GPTQ-W4A16", "W4A16", gptq=True)


def _write(target: Path, scheme: str, gptq: bool) -> None:
    import torch
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    common: dict[str, Any] = {"targets": "Linear", "scheme": scheme, "ignore": ["lm_head"]}
    if gptq:
        samples: dict[str, Any] = {
            "dataset": _documents(tokenizer),
            "num_calibration_samples": DOCUMENTS,
            "max_seq_length": LENGTH,
        }
        oneshot(model=model, recipe=[GPTQModifier(**common)], **samples)
    else:
        oneshot(model=model, recipe=[QuantizationModifier(**common)])
    model.save_pretrained(target, save_compressed=True)
    tokenizer.save_pretrained(target)


def _documents(tokenizer: Any) -> Any:
    from datasets import Dataset

    texts = calibration_texts(DOCUMENTS)
    return Dataset.from_list([dict(tokenizer(text, max_length=LENGTH, truncation=True)) for text in texts])
