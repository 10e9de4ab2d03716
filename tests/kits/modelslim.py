"""Writes checkpoints in the documented layout of Ascend's ModelSlim, from floats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

__all__ = ["Ranges", "calibrate", "shifted", "write"]

Ranges = Mapping[str, tuple[float, float]]
"""The least and the largest input of each module."""


def calibrate(model: nn.Module, tokens: Sequence[int]) -> Ranges:
    """Run ``tokens`` through a transformers model and keep the ranges of its inputs."""
    found: dict[str, tuple[float, float]] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def see(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                found[name] = (float(inputs[0].min()), float(inputs[0].max()))

            hooks.append(module.register_forward_pre_hook(see))
    with torch.inference_mode():
        model(torch.tensor([list(tokens)]))
    for hook in hooks:
        hook.remove()
    return found


@dataclass
class _Layer:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    stands_for: Tensor | None = None
    folds_bias: bool = False


def _rows(weight: Tensor, max_value: int) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / max_value
    return (weight / scale).round().clamp(-max_value - 1, max_value), scale


def _layer(kind: str, weight: Tensor, bias: Tensor | None, group: int, seen: tuple[float, float] | None) -> _Layer:
    outputs, inputs = weight.shape
    if kind == "FLOAT":
        return _Layer({"weight": weight}, weight)
    if kind in ("W8A8_DYNAMIC", "W4A4_DYNAMIC", "W8A8", "W8A8_MIX"):
        values, scale = _rows(weight, 7 if kind.startswith("W4") else 127)
        made = _Layer({"weight": values.to(torch.int8), "weight_scale": scale}, values * scale)
        made.tensors["weight_offset"] = torch.zeros_like(scale)
        if kind in ("W8A8", "W8A8_MIX"):
            assert seen is not None
            low, high = min(seen[0], 0.0), max(seen[1], 0.0)
            step = float(torch.tensor((high - low) / 255).to(torch.bfloat16))  # as for a model in bfloat16
            offset = max(-128, min(127, round(-128 - low / step)))
            deq = scale[:, 0] * step
            correction = -offset * values.double().sum(1) + (0 if bias is None else bias.double() / deq.double())
            made.tensors |= {
                "input_scale": torch.tensor([step]),
                "input_offset": torch.tensor([offset], dtype=torch.int8),
                "quant_bias": correction.round().to(torch.int32),
                "deq_scale": deq,
            }
            made.folds_bias = kind == "W8A8"
        return made
    grouped = weight.unflatten(1, (-1, group or inputs))
    if kind == "W4A8_DYNAMIC":
        return _pairs(weight, group)
    if kind == "W8A16":
        scale = (grouped.amax(2) - grouped.amin(2)) / 255
        offset = (-128 - grouped.amin(2) / scale).round().clamp(-127, 127)
        values = (grouped / scale[:, :, None] + offset[:, :, None]).round().clamp(-128, 127)
        stands = ((values - offset[:, :, None]) * scale[:, :, None]).flatten(1)
        return _Layer(
            {"weight": values.flatten(1).to(torch.int8), "weight_scale": scale, "weight_offset": -offset}, stands
        )
    if kind == "W4A16":
        scale = grouped.abs().amax(2) / 7
        values = (grouped / scale[:, :, None]).round().clamp(-8, 7)
        nibbles = (values.flatten(1) + 8).to(torch.int64).unflatten(1, (-1, 8))
        words = (nibbles << (4 * torch.arange(8))).sum(2)
        return _Layer(
            {
                "weight_packed": torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32),
                "weight_scale": scale,
                "weight_shape": torch.tensor([outputs, inputs]),
            },
            (values * scale[:, :, None]).flatten(1),
        )
    assert kind == "W8A8_MXFP8"
    blocks = weight.unflatten(1, (-1, 32))
    exponent = (blocks.abs().amax(2).log2().floor() - 8).clamp(-127, 127)
    scale = torch.exp2(exponent)[:, :, None]
    eighths = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return _Layer(
        {"weight": eighths.flatten(1), "weight_scale": (exponent + 127).to(torch.uint8)},
        (eighths.float() * scale).flatten(1),
    )


def _pairs(weight: Tensor, group: int) -> _Layer:
    """Two outputs a byte; with groups, the scale is that of the output times the factor of the group."""
    scale = weight.abs().amax(1, keepdim=True) / 7
    factors = torch.ones_like(scale) if not group else weight.unflatten(1, (-1, group)).abs().amax(2) / 7 / scale
    wide = scale * factors.repeat_interleave(weight.shape[1] // factors.shape[1], 1)
    values = (weight / wide).round().clamp(-8, 7)
    whole = values.to(torch.int8)
    tensors = {
        "weight": (whole[::2] & 15) | (whole[1::2] << 4),
        "weight_scale": scale,
        "weight_offset": torch.zeros_like(scale),
        "scale_bias": (8 * values * wide).sum(1, keepdim=True),
    }
    if group:
        tensors |= {"weight_scale_second": factors, "weight_offset_second": torch.zeros_like(factors)}
    return _Layer(tensors, values * wide)


def write(
    source: Path,
    target: Path,
    kind: Callable[[str], str],
    ranges: Ranges | None = None,
    group: int = 0,
    half: bool = False,
    edit: Callable[[dict[str, Any], dict[str, Tensor]], None] = lambda description, tensors: None,
) -> tuple[Path, Path]:
    """A ModelSlim checkpoint of ``source`` with ``kind`` for each module, and one with the dequantized floats.

    ``half``: deq_scale as for a float16 model. ``edit``: changes the description and the tensors before they are
    written.
    """
    tensors = load_file(source / "model.safetensors")
    made, floats = dict(tensors), dict(tensors)
    description: dict[str, Any] = {"model_quant_type": "W8A8", "version": "1.0.0", "group_size": group}
    description |= dict.fromkeys(tensors, "FLOAT")
    for name in tensors:
        if not name.endswith("_proj.weight"):
            continue
        module = name.removesuffix(".weight")
        chosen = kind(module)
        bias = tensors.get(f"{module}.bias")
        layer = _layer(chosen, tensors[name].float(), bias, group, None if ranges is None else ranges[module])
        del made[name], description[name]
        if half and "deq_scale" in layer.tensors:
            layer.tensors["deq_scale"] = layer.tensors["deq_scale"].view(torch.int32).to(torch.int64)
        if layer.folds_bias:
            made.pop(f"{module}.bias", None)
            description.pop(f"{module}.bias", None)
        for part, tensor in layer.tensors.items():
            made[f"{module}.{part}"] = tensor
            description[f"{module}.{part}"] = chosen
        assert layer.stands_for is not None
        floats[name] = layer.stands_for
    edit(description, made)
    _save(source, target / "modelslim", made)
    (target / "modelslim" / "quant_model_description.json").write_text(json.dumps(description))
    _save(source, target / "floats", floats)
    return target / "modelslim", target / "floats"


def shifted(tensors: Mapping[str, Tensor], seed: int = 3) -> dict[str, Tensor]:
    """The same model with shifted norm outputs, as by outlier suppression: norms and the projections after them get
    biases that cancel each other."""
    generator = torch.Generator().manual_seed(seed)
    found = dict(tensors)
    for name, weight in tensors.items():
        if not name.endswith("layernorm.weight"):
            continue
        layer = name.removesuffix(".weight").rpartition(".")[0]
        shift = torch.randn(weight.shape, generator=generator)
        found[name.removesuffix("weight") + "bias"] = -shift
        after = ("q_proj", "k_proj", "v_proj") if "input" in name else ("gate_proj", "up_proj")
        for part in after:
            module = f"{layer}.{'self_attn' if 'input' in name else 'mlp'}.{part}"
            bias = tensors[f"{module}.weight"].float() @ shift
            if f"{module}.bias" in tensors:
                bias = bias + tensors[f"{module}.bias"]
            found[f"{module}.bias"] = bias
    return found


def _save(source: Path, target: Path, tensors: Mapping[str, Tensor]) -> None:
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, target / path.name)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
