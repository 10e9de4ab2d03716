"""Declared tensors for tests: of a whole model, of one weight, and the files that are read by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kernels.models.config_loader import read_config
from kernels.models.registry import tensors
from kernels.weights.gguf.checkpoint import GgufCheckpoint
from kernels.weights.gguf.header import read_header
from kernels.weights.tensors import Role, Tensors, TensorSpec

__all__ = ["declared", "made_up_model", "open_gguf", "shapes_of", "spec_of"]


def declared(path: str | Path) -> Tensors:
    """The tensors of the model in a directory or GGUF file, whether or not it is quantized."""
    return tensors(read_config(path, quantized=True))


def shapes_of(path: str | Path) -> dict[str, tuple[int, ...]]:
    return {name: spec.shape for name, spec in declared(path).items()}


def made_up_model(path: Path, config: dict[str, Any], scale: float) -> Path:
    """A model of ``config`` in the directory ``path``: matrices of bfloat16 random numbers times ``scale``, norms about
    one."""
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(shape, generator=generator).mul_(scale).add_(len(shape) == 1).bfloat16()
        for name, shape in shapes_of(path).items()
    }
    save_file(weights, path / "model.safetensors")
    return path


def open_gguf(file: str | Path) -> GgufCheckpoint:
    """Its tensors by the names that the model declares."""
    return GgufCheckpoint(read_header(file), declared(file))


def spec_of(module: str, shape: tuple[int, ...]) -> TensorSpec:
    """A projection's weight [outputs, inputs]; ``lm_head`` is the output of a model."""
    role = Role.OUTPUT if module == "lm_head" else Role.DOWN if module.endswith("down_proj") else Role.PROJECTION
    return TensorSpec(f"{module}.weight", (shape[0], shape[1]), role)
