"""Checkpoints of Ascend's ModelSlim: ``quant_model_description.json`` gives each tensor a type of its own.

The tensors of a projection [outputs, inputs], by type:

    W8A8           weight I8, input_scale, input_offset [1], quant_bias I32 [outputs], deq_scale [outputs]: F32, or of
                   float16 models I64 with the bits of an F32 in its low half. ``(x @ weight.T + quant_bias) *
                   deq_scale`` in integers; quant_bias includes the offset's share and the layer's bias.
    W8A8_DYNAMIC   weight I8, weight_scale [outputs, 1]; weight_offset, all zeros
    W8A8_MIX       both: static for decoding on its own, dynamic where prompts run too, as they do here
    W4A4_DYNAMIC   as W8A8_DYNAMIC, with values of -8 to 7; inputs are quantized to 8 bits here, which is finer
    W4A8_DYNAMIC   weight I8 [outputs / 2, inputs], two outputs to a byte, in older files [outputs, inputs];
                   weight_scale [outputs, 1], and with a group_size weight_scale_second [outputs, groups], the factor
                   of a group; scale_bias, which the vendor's product subtracts, and offsets, all zeros
    W8A16          weight I8, weight_scale and weight_offset [outputs, groups]: ``(weight + offset) * scale``
    W4A16          weight_packed I32 [outputs, inputs / 8], eight values + 8 each, the first in the lowest bits;
                   weight_scale [outputs, groups]; weight_shape
    W8A8_MXFP8     weight e4m3, weight_scale e8m0 [outputs, inputs / 32]
    FLOAT          weight in floats

ModelSlim's suppression of outliers shifts the outputs of norms: ``input_layernorm.bias`` is added after the norm, and
projections get biases that the model otherwise does not have. The description names these tensors too.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.contract.errors import ConfigError, LoadError
from kernels.weights.quantization.four_bits import four_by_eight, signed, stored_pairs
from kernels.weights.quantization.microscaling import MX_GROUP, exponents
from kernels.weights.quantization.packed import FLOATS
from kernels.weights.quantization.scheme import Files, Scheme, StoredTensor
from kernels.weights.quantization.weights import Fp8Weight, GroupedWeight, Int8Weight, QuantizedWeight, StaticActivation
from kernels.weights.tensors import Role, Tensors, TensorSpec

__all__ = ["ModelSlim", "description_file", "read_description"]

_STATIC, _PACKED, _MX, _PAIRS = "W8A8", "W4A16", "W8A8_MXFP8", "W4A8_DYNAMIC"
_DYNAMIC = ("W8A8_DYNAMIC", "W8A8_MIX", "W4A4_DYNAMIC")
_TYPES = ("FLOAT", _STATIC, *_DYNAMIC, _PAIRS, "W8A16", _PACKED, _MX)
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.lm_head.", "lm_head."),
)


def description_file(model_path: str | Path) -> Path | None:
    """The description in a directory, if there is one. Raises ConfigError for several."""
    found = sorted(Path(model_path).glob("quant_model_description*.json"))
    if len(found) > 1:
        raise ConfigError(
            f"{model_path} has {' and '.join(file.name for file in found)}; keep the one that was written with the "
            "weights"
        )
    return found[0] if found else None


def read_description(file: Path) -> dict[str, Any]:
    """The object of a description. Raises ConfigError."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); download the checkpoint again") from error
    if not isinstance(result, dict):
        raise ConfigError(f"{file} must hold a JSON object of types by tensor; download the checkpoint again")
    return result


class ModelSlim(Scheme):
    """``description``: the object of quant_model_description.json. Raises ConfigError."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        self._types: dict[str, str] = {}
        for key, value in description.items():
            if isinstance(value, str) and "." in key:
                self._types[_plain(key)] = value
        group = description.get("group_size") or 0
        if type(group) is not int or group < 0:
            raise ConfigError(f"quant_model_description.json: group_size must be a whole number, and is {group!r}")
        self._group = group
        kinds = sorted({kind for kind in self._types.values() if kind in _TYPES and kind != "FLOAT"})
        self.name = f"modelslim {', '.join(kinds)}"

    def adapt(self, tensors: Tensors) -> Tensors:
        weights = [spec for spec in tensors.values() if spec.quantizable]
        wrong = [spec for spec in weights if not (self._named(spec) and self._kind(spec.module) in _TYPES)]
        if wrong:
            more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            raise ConfigError(f"quant_model_description.json: {'; '.join(map(self._wrong, wrong[:4]))}{more}")
        result = dict(tensors)
        for spec in tensors.values():
            if spec.role in (Role.BIAS, Role.EMBEDDING):
                continue
            bias = spec.bias()
            if spec.quantizable and self._kind(spec.module) == _STATIC:
                result.pop(bias.name, None)
            elif bias.name in self._types and spec.role is not Role.OUTPUT:
                result[bias.name] = bias
        return result

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor] | None:
        module, shape = weight.module, weight.matrix
        kind = self._kind(module)
        outputs, inputs = shape
        column = ((outputs, 1), (outputs,))
        if kind == "FLOAT":
            return None
        if kind == _MX:
            scales = (outputs, -(-inputs // MX_GROUP))
            return {
                f"{module}.weight": StoredTensor(("F8_E4M3",), (shape,)),
                f"{module}.weight_scale": StoredTensor(("U8", "F8_E8M0"), (scales,)),
            }
        if kind == _PACKED:
            return {
                f"{module}.weight_packed": StoredTensor(("I32",), ((outputs, inputs // 8),)),
                f"{module}.weight_scale": StoredTensor(FLOATS, (self._grouped(module, shape),)),
                f"{module}.weight_shape": StoredTensor(("I64", "I32"), ((2,),), optional=True),
            }
        if kind == _PAIRS:
            return self._pairs(module, shape)
        result = {f"{module}.weight": StoredTensor(("I8",), (shape,))}
        if kind == _STATIC:
            result[f"{module}.input_scale"] = StoredTensor(FLOATS, ((1,), ()))
            result[f"{module}.input_offset"] = StoredTensor(("I8", *FLOATS), ((1,), ()))
            result[f"{module}.quant_bias"] = StoredTensor(("I32",), ((outputs,),))
            result[f"{module}.deq_scale"] = StoredTensor(("F32", "I64"), ((outputs,),))
            result[f"{module}.weight_scale"] = StoredTensor(FLOATS, column, optional=True)
            result[f"{module}.weight_offset"] = StoredTensor(("I8", *FLOATS), column, optional=True)
            return result
        groups = (self._grouped(module, shape),) if kind == "W8A16" and self._group else column
        result[f"{module}.weight_scale"] = StoredTensor(FLOATS, groups)
        result[f"{module}.weight_offset"] = StoredTensor(("I8", *FLOATS), groups, optional=True)
        return result

    def read(self, files: Files, weight: TensorSpec) -> QuantizedWeight:
        module, shape = weight.module, weight.matrix
        kind = self._kind(module)
        if kind == _STATIC:
            return _static(files, module)
        if kind == _MX:
            scales = exponents(files, f"{module}.weight_scale")
            return Fp8Weight(files.read(f"{module}.weight"), scales, (1, MX_GROUP))
        scales = _positive(files, f"{module}.weight_scale").reshape(shape[0], -1)
        if kind == _PACKED:
            values = files.read(f"{module}.weight_packed").contiguous().view(torch.uint8)
            return _in_groups(values, scales, None, shape[1], 4)
        if kind == _PAIRS:
            for tensor in ("weight_offset", "weight_offset_second"):
                if files.has(f"{module}.{tensor}") and bool(files.read(f"{module}.{tensor}").any()):
                    raise LoadError(f"{module}.{tensor} must be zeros, as weights of {kind} are symmetric, and is not")
            if self._group:
                scales = scales * _positive(files, f"{module}.weight_scale_second")
            return four_by_eight(signed(f"{module}.weight", files.read(f"{module}.weight"), shape[0]), scales)
        values = files.read(f"{module}.weight")
        name = f"{module}.weight_offset"
        offsets = files.read(name).float().reshape(shape[0], -1) if files.has(name) else torch.zeros(1)
        shifted = bool(offsets.any())
        if kind in _DYNAMIC and shifted:
            raise LoadError(f"{name} must be zeros, as weights of {kind} have their zero in the middle, and is not")
        if kind in _DYNAMIC:
            return Int8Weight(values, scales.flatten())
        if not shifted and scales.shape[1] == 1:
            return Int8Weight(values, scales.flatten(), None)
        zeros = 128 - offsets.expand_as(scales)
        if bool((zeros != zeros.round()).any() or (zeros < 0).any() or (zeros > 255).any()):
            raise LoadError(f"{name} must be integers of -127 to 128, and is not; quantize the checkpoint again")
        unsigned = (values.to(torch.int16) + 128).to(torch.uint8)
        return _in_groups(unsigned, scales, zeros.to(torch.uint8), shape[1], 8)

    def _pairs(self, module: str, shape: tuple[int, int]) -> dict[str, StoredTensor]:
        column, groups = ((shape[0], 1), (shape[0],)), (self._grouped(module, shape),)
        result = {
            f"{module}.weight": stored_pairs(shape),
            f"{module}.weight_scale": StoredTensor(FLOATS, column),
            f"{module}.weight_offset": StoredTensor(("I8", *FLOATS), column, optional=True),
            f"{module}.scale_bias": StoredTensor(FLOATS, (*column, (shape[0], 16)), optional=True),
        }
        if self._group:
            result[f"{module}.weight_scale_second"] = StoredTensor(FLOATS, groups)
            result[f"{module}.weight_offset_second"] = StoredTensor(("I8", *FLOATS), groups, optional=True)
        return result

    def ignores(self, name: str, tensors: Tensors) -> bool:
        module, _, tensor = name.rpartition(".")
        if tensor.startswith("kv_cache_"):
            return True  # read by kernels.state.cache_dtype
        static = ("input_scale", "input_offset", "quant_bias", "deq_scale")
        kind = self._types.get(f"{module}.weight")
        return (kind == _STATIC and tensor == "bias") or (kind == "W8A8_MIX" and tensor in static)

    def _kind(self, module: str) -> str:
        """The type of a module; ``FLOAT`` for an output layer that the description does not name."""
        result = self._types.get(f"{module}.weight") or self._types.get(f"{module}.weight_packed")
        return result or "FLOAT"

    def _named(self, weight: TensorSpec) -> bool:
        """Whether the description gives the weight a type. The output layer needs none."""
        names = (f"{weight.module}.{name}" for name in ("weight", "weight_packed"))
        return weight.role is Role.OUTPUT or any(name in self._types for name in names)

    def _wrong(self, weight: TensorSpec) -> str:
        """The problem of a weight without a usable entry."""
        module = weight.module
        if not self._named(weight):
            near = difflib.get_close_matches(f"{module}.weight", self._types, 3, 0.0)
            return (
                f"{module}.weight is not named; the nearest keys are {', '.join(near) or 'none'}: is it the "
                "description of another model?"
            )
        return (
            f"{module}.weight is {self._kind(module)}, which is not read; those that are read are {', '.join(_TYPES)}: "
            "export the layer as one of them"
        )

    def _grouped(self, module: str, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape of a weight's group scales. Raises LoadError."""
        if not self._group:
            return shape[0], 1
        if shape[1] % self._group:
            raise LoadError(
                f"quant_model_description.json: group_size {self._group} does not divide the {shape[1]} inputs of "
                f"{module}; is it the description of another model?"
            )
        return shape[0], shape[1] // self._group


def _plain(key: str) -> str:
    """A key of the description as the name of a decoder's tensor."""
    for prefix, instead in _PREFIXES:
        if key.startswith(prefix):
            return instead + key.removeprefix(prefix)
    return key


def _positive(files: Files, name: str) -> Tensor:
    """Scales in float32. Raises LoadError if one is negative or not finite."""
    stored = files.read(name)
    result = stored.to(torch.int32).view(torch.float32) if stored.dtype == torch.int64 else stored.float()
    if not bool((result.isfinite() & (result >= 0)).all()):
        raise LoadError(f"{name} must be finite and not below 0, and is not; is it another tensor's?")
    return result


def _static(files: Files, module: str) -> Int8Weight:
    scale = _positive(files, f"{module}.input_scale").reshape(1)
    if not bool(scale):
        raise LoadError(f"{module}.input_scale must be above 0, and is not; was the layer calibrated?")
    offset = files.read(f"{module}.input_offset").float().reshape(1)
    if not bool((offset.abs() <= 255) & (offset == offset.round())):
        raise LoadError(f"{module}.input_offset must be a whole number of -255 to 255, and is not; is it another's?")
    return Int8Weight(
        files.read(f"{module}.weight"),
        _positive(files, f"{module}.deq_scale") / scale,
        StaticActivation(scale, offset),
        files.read(f"{module}.quant_bias"),
    )


def _in_groups(values: Tensor, scales: Tensor, zeros: Tensor | None, inputs: int, bits: int) -> GroupedWeight:
    return GroupedWeight(values, scales, zeros, inputs // scales.shape[1], 4 if bits == 4 else 8)
