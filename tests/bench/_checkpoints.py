"""The model in the box in the layouts of quantized checkpoints, by the writers of the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.understudy import MODEL_DIR

__all__ = ["CHECKPOINTS", "write"]

_GROUP = 64


def _words(layout: str) -> Callable[[Path], Path]:
    def make(target: Path) -> Path:
        from tests.quantized import fp8_blocks, rewrite
        from tests.quantized_words import awq, gptq, int8_rows, packed

        bits = int(layout[-1]) if layout[-1].isdigit() else 4
        common: dict[str, Any] = {"bits": bits, "group_size": _GROUP}
        tokens = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        group = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP}
        rows = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        gptq_4 = {"quant_method": "gptq", "desc_act": False, "sym": False, **common}
        if layout == "fp8-blocks":
            change = fp8_blocks(128, 128)
            settings: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        elif layout.startswith("awq"):
            change = awq(bits, _GROUP)
            settings = {"quant_method": "awq", "zero_point": True, "version": "gemm", **common}
        elif layout == "gptq-act-order":
            change, settings = gptq(bits, _GROUP, True), gptq_4 | {"desc_act": True}
        elif layout.startswith("gptq"):
            change, settings = gptq(bits, _GROUP), gptq_4
        elif layout == "compressed-w8a8":
            change, settings = int8_rows(), _compressed("int-quantized", rows, tokens)
        else:
            change, settings = packed(bits, _GROUP), _compressed("pack-quantized", group, None)
        return rewrite(MODEL_DIR, target, change, settings)

    return make


def _compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _modelslim(target: Path) -> Path:
    from tests.modelslim import write as write_modelslim

    return write_modelslim(MODEL_DIR, target, lambda module: "W8A8_DYNAMIC")[0]


def _gguf(kind: str) -> Callable[[Path], Path]:
    def make(target: Path) -> Path:
        from tests.gguf_writer import write_gguf

        return write_gguf(MODEL_DIR, target.with_suffix(".gguf"), kind)

    return make


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "fp8-blocks": _words("fp8-blocks"),
    "awq-4": _words("awq-4"),
    "awq-8": _words("awq-8"),
    "gptq-4": _words("gptq-4"),
    "gptq-8": _words("gptq-8"),
    "gptq-act-order": _words("gptq-act-order"),
    "compressed-w4a16-4": _words("compressed-w4a16-4"),
    "compressed-w8a8": _words("compressed-w8a8"),
    "modelslim-w8a8": _modelslim,
    "gguf-q8": _gguf("Q8_0"),
    "gguf-q4": _gguf("Q4_0"),
}
"""Groups of 64 where there are groups."""


def write(name: str, target: Path) -> Path:
    """The checkpoint ``name`` of ``CHECKPOINTS``, at ``target`` or beside it."""
    return CHECKPOINTS[name](target)
