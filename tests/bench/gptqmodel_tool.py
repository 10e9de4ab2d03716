"""The included model, quantized by GPTQModel, for the table of accuracy: what such a tool writes is read.

    python -m tests.bench gptqmodel_tool DIR [--schemes W4A16 W4A16-act-order W8A16 AWQ-W4A16]
    python -m tests.bench quantization --schemes --shapes --made DIR/*

The first in an environment of its own, which needs no GPU (7.7 was tried). The tool asks for the newest torch, whose
packages bring CUDA: a CPU build of 2.13 and ``pip install --no-deps gptqmodel`` with what it imports will do. It
calibrates over documents that are neither trained on nor asked about.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

from app.understudy import MODEL_DIR
from tests.bench._calibration import calibration_texts
from tests.bench._options import command_line

__all__ = ["main"]

DOCUMENTS = 64
SCHEMES: dict[str, dict[str, Any]] = {
    "W4A16": {"bits": 4, "desc_act": False},
    "W4A16-act-order": {"bits": 4, "desc_act": True},
    "W8A16": {"bits": 8, "desc_act": False},
    "AWQ-W4A16": {"bits": 4, "quant_method": "awq", "format": "gemm"},
}
"""Settings of each, in groups of 64."""


def main(argv: list[str]) -> None:
    parser = command_line(__name__, __doc__)
    parser.add_argument("directory", type=Path, help="where the checkpoints go")
    parser.add_argument(
        "--schemes", nargs="*", default=list(SCHEMES), choices=list(SCHEMES), help="bits of weights and of inputs"
    )
    given = parser.parse_args(argv)
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # with one it does not start
    given.directory.mkdir(parents=True, exist_ok=True)
    directory = given.directory.resolve()
    with tempfile.TemporaryDirectory() as logs, contextlib.chdir(logs):  # it leaves its logs where it runs
        for scheme in given.schemes:
            _write(directory / f"gptqmodel-{scheme}", SCHEMES[scheme])


def _write(target: Path, settings: dict[str, Any]) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    model = GPTQModel.load(str(MODEL_DIR), QuantizeConfig(group_size=64, **settings), device="cpu")
    model.quantize(calibration_texts(DOCUMENTS), batch_size=4, tokenizer=tokenizer)
    model.save(str(target))
    tokenizer.save_pretrained(target)
