"""The results of tasks that make vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import LoadError
from kernels.contract.pooling import PoolingConfig
from kernels.weights.loading import read_tensor, stored_shapes

__all__ = ["DenseLayers", "Put", "activated", "normalized"]

Put = Callable[[Any], Tensor]
"""``DeviceMemory.put``."""


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
}


class DenseLayers:
    """The linear layers behind a model's pooling, in float32; without any, vectors stay as they are.

    Raises LoadError where the weights are not those that the configuration says.
    """

    def __init__(self, config: RunnerConfig, pooling: PoolingConfig | None, device: torch.device) -> None:
        self._layers: list[tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]] = []
        generator = torch.Generator().manual_seed(config.random_seed)
        for layer in pooling.dense if pooling is not None else ():
            shapes: dict[str, tuple[int, ...]] = {"linear.weight": (layer.outputs, layer.inputs)}
            if layer.bias:
                shapes["linear.bias"] = (layer.outputs,)
            if config.load_format == "dummy":
                found = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
            else:
                found = _read_dense(Path(config.model_path) / layer.path, shapes)
            weights = [found[name].to(device, torch.float32) for name in shapes]
            self._layers.append((weights[0], weights[1] if layer.bias else None, _ACTIVATIONS[layer.activation]))

    def __call__(self, vectors: Tensor) -> Tensor:
        """``vectors`` [rows, inputs] -> [rows, outputs]."""
        for weight, bias, activation in self._layers:
            vectors = activation(F.linear(vectors.float(), weight, bias))
        return vectors


def _read_dense(directory: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    stored = stored_shapes(directory)
    if stored != shapes:
        raise LoadError(
            f"{directory} holds the tensors {stored}, and its config.json says {shapes}; download the model again"
        )
    return {name: read_tensor(directory, name) for name in shapes}


def normalized(vectors: Tensor, wanted: Sequence[bool], put: Put) -> Tensor:
    """``vectors`` [rows, n] in float32, those that are ``wanted`` so of length 1."""
    wide = vectors.float()
    lengths = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp_min(1e-12)
    return torch.where(_column(wanted, put), wide / lengths, wide)


def activated(
    numbers: Tensor, activation: Literal["softmax", "sigmoid", "none"], wanted: Sequence[bool], put: Put
) -> Tensor:
    """``numbers`` [rows, labels] in float32, those that are ``wanted`` so as probabilities."""
    wide = numbers.float()
    if activation == "none":
        return wide
    result = wide.softmax(-1) if activation == "softmax" else wide.sigmoid()
    return torch.where(_column(wanted, put), result, wide)


def _column(flags: Sequence[bool], put: Put) -> Tensor:
    return put(np.array(flags, dtype=np.int64)).bool().unsqueeze(1)
