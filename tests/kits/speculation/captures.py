"""A decoder whose hidden states are captured."""

from __future__ import annotations

from kernels.distributed.group import Group
from kernels.models.config_loader import read_config
from kernels.models.layers.builder import ModelBuilder
from kernels.models.registry import build, tensors
from kernels.weights.loading import CheckpointFiles, Placement, open_weights

__all__ = [
    "decoder",
]


def decoder(path, paged, captures):
    config = read_config(path)
    dtype, device = paged.dtype, paged.platform.torch_device
    weights = open_weights(CheckpointFiles(str(path)), tensors(config), Placement(dtype, device))
    return config, build(config, ModelBuilder(weights, paged.platform, Group(), dtype, captures=captures))
