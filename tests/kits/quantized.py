"""Writes quantized checkpoints from floats, in the layouts that public tools write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.weights.tensors import Role
from tests.kits.declared import declared

__all__ = ["fp8_blocks", "fp8_rows", "rewrite"]

Change = Callable[[str, Tensor], dict[str, Tensor]]
"""A projection's module and its weight in float32 -> the quantized tensors."""


def rewrite(source: Path, target: Path, change: Change, settings: dict[str, Any] | None = None) -> Path:
    """A copy of the checkpoint ``source`` whose projections are changed. ``settings``: its quantization_config."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, target / path.name)
    config = json.loads((source / "config.json").read_text())
    if settings is not None:
        config["quantization_config"] = settings
    (target / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    specs = declared(source)

    def is_changed(name: str) -> bool:
        spec = specs.get(name)
        if spec is None:  # a draft's tensor, which no family declares
            return name.endswith("_proj.weight")
        return spec.quantizable and spec.role is not Role.OUTPUT

    for name, tensor in load_file(source / "model.safetensors").items():
        if is_changed(name):
            tensors.update(change(name.removesuffix(".weight"), tensor.float()))
        else:
            tensors[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def fp8_rows(module: str, weight: Tensor) -> dict[str, Tensor]:
    """``quant_method: fp8`` with a scale for each output."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {f"{module}.weight": (weight / scale).to(torch.float8_e4m3fn), f"{module}.weight_scale": scale}


def fp8_blocks(rows: int, columns: int) -> Change:
    """``quant_method: fp8`` with ``weight_block_size`` [rows, columns]."""

    def change(module: str, weight: Tensor) -> dict[str, Tensor]:
        high, wide = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        scales, values = torch.empty(high, wide), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for i in range(high):
            for j in range(wide):
                block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = weight[block].abs().max() / 448
                values[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
        return {f"{module}.weight": values, f"{module}.weight_scale_inv": scales}

    return change
