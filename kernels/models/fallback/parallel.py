"""Divides the modules of transformers' code over ranks, by the plan that the model brings, and quantizes linear layers.

Linear layers by outputs and then by inputs, and experts by their inner dimension, as Shoeybi et al. (Megatron-LM, arXiv
1909.08053, section 3) divide them. What the plan divides and gathers again stays whole on every rank.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kernels.contract.errors import ConfigError
from kernels.core.operators import Linear
from kernels.devices.base import Device
from kernels.distributed.group import Group
from kernels.weights.quantization.online import ONLINE
from kernels.weights.tensors import Shard

__all__ = ["divide", "quantize", "sum_over_ranks"]

_WHOLE = frozenset(
    ("colwise_gather_output", "rowwise_split_input", "embedding_rowwise", "replicated_with_grad_allreduce")
)
"""Styles of what stays whole on every rank."""
_EXPERTS = frozenset(("packed_colwise", "rowwise", "moe_tp_experts"))


def divide(model: Any, shard: Shard) -> list[str]:
    """Keep the rank's part of each parameter that the model's plan divides. -> the paths of the modules whose results
    are summed over ranks. Raises ConfigError."""
    name, plan = type(model).__name__, dict(model.tp_plan or {})
    if not plan:
        raise ConfigError(f"{name} has no plan for tensor parallelism (base_model_tp_plan); leave out --tp-size")
    summed: list[str] = []
    for path, module in list(model.named_modules()):
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if style is None or style in _WHOLE:
            continue
        if style == "moe_tp_experts":
            _divide_experts(module, path, shard)
            summed.append(path)
        elif isinstance(module, nn.Linear) and style == "colwise":
            module.weight = _part(module.weight, 0, shard, path)
            if module.bias is not None:
                module.bias = _part(module.bias, 0, shard, path)
            module.out_features = len(module.weight)
        elif isinstance(module, nn.Linear) and style == "rowwise":
            module.weight = _part(module.weight, 1, shard, path)
            if shard.rank:
                module.register_parameter("bias", None)  # the sum holds it once
            module.in_features = module.weight.shape[1]
            summed.append(path)
        else:
            raise ConfigError(
                f"the plan of {name} divides {path} by {style}, which is not supported; leave out --tp-size"
            )
    return summed


def _divide_experts(module: nn.Module, path: str, shard: Shard) -> None:
    parameters = dict(module.named_parameters(recurse=False))
    gate_up, down = parameters.get("gate_up_proj"), parameters.get("down_proj")
    if parameters.keys() != {"gate_up_proj", "down_proj"} or gate_up is None or down is None:
        raise ConfigError(
            f"{path} has experts with {', '.join(parameters)}, which are not divided; leave out --tp-size"
        )
    if down.ndim != 3 or gate_up.shape != (down.shape[0], 2 * down.shape[2], down.shape[1]):
        raise ConfigError(f"{path} has experts of another layout, which are not divided; leave out --tp-size")
    halves = tuple(_part(half, 1, shard, path) for half in gate_up.detach().chunk(2, 1))
    module.gate_up_proj = _parameter(torch.cat(halves, 1))
    module.down_proj = _part(down, 2, shard, path)


def _part(tensor: Tensor, dimension: int, shard: Shard, path: str) -> nn.Parameter:
    size = tensor.shape[dimension]
    if size % shard.size:
        raise ConfigError(f"{path} has {size} numbers, which {shard.size} ranks do not divide; give another --tp-size")
    each = size // shard.size
    return _parameter(tensor.detach().narrow(dimension, shard.rank * each, each).clone())


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.contiguous(), requires_grad=False)


def sum_over_ranks(model: Any, paths: list[str], group: Group) -> None:
    """Let results of the modules at ``paths`` be the sum of every rank's."""
    for path in paths:
        model.get_submodule(path).register_forward_hook(
            lambda module, given, found: group.all_reduce(found.contiguous())
        )


class CodeLinear(nn.Module):
    """A linear layer of a device, in place of ``nn.Linear``."""

    def __init__(self, linear: Linear, outputs: int) -> None:
        super().__init__()
        self.linear, self.outputs = linear, outputs

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]"""
        return self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.outputs)


def quantize(model: Any, kind: str, device: Device, dtype: torch.dtype) -> int:
    """Replace linear layers by quantized ones on the device, one by one; the output and the choice of experts stay as
    they are. ``kind``: one of ``ONLINE``. ``dtype``: of activations. -> bytes of the quantized weights. Raises
    ConfigError where there is none."""
    size = 0
    for parent, name, linear in list(_linears(model)):
        weight = linear.weight.detach().to(device.torch_device)
        quantized = dataclasses.replace(ONLINE[kind](weight), dtype=dtype)
        bias = None if linear.bias is None else linear.bias.detach().to(device.torch_device)
        made = CodeLinear(device.linear.make_projection(quantized, bias), len(weight))
        setattr(parent, name, made)
        linear.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
        size += quantized.nbytes
    if not size:
        raise ConfigError(
            f"{type(model).__name__} has no linear layers of torch, which --quantization {kind} needs; leave it out"
        )
    return size


def _linears(model: Any) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    head = model.get_output_embeddings()
    for parent in model.modules():
        children = dict(parent.named_children())
        for name, child in children.items():
            if type(child) is nn.Linear and child is not head and "experts" not in children:
                yield parent, name, child
