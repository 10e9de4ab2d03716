"""Checkpoints of AMD's Quark (https://quark.docs.amd.com): ``quant_method: quark``.

``global_quant_config`` says how a projection [outputs, inputs] is stored, ``layer_quant_config`` it for the modules
that a shell pattern names. By ``weight``:

    fp8_e4m3, per_tensor or per_channel    weight e4m3, weight_scale [] or [outputs]
    int8, per_tensor or per_channel        weight int8, weight_scale [] or [outputs]; symmetric alone
    fp4, per_group of 32 (MXFP4)           weight U8 [outputs, inputs / 2], two e2m1 a byte, the low half first;
                                           weight_scale e8m0 [outputs, inputs / 32]

``input_tensors``: none, dynamic, or static with an ``input_scale``. Which modules stay in floats (``exclude``) follows
from what the files store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from kernels.contract.errors import ConfigError
from kernels.weights.quantization.microscaling import MX_GROUP, exponents, from_e2m1
from kernels.weights.quantization.mxfp4 import Mxfp4Weight
from kernels.weights.quantization.packed import FLOATS, groups_of
from kernels.weights.quantization.scheme import Files, Scheme, StoredTensor
from kernels.weights.quantization.weights import Activation, Fp8Weight, Int8Weight, QuantizedWeight, StaticActivation
from kernels.weights.tensors import Tensors, TensorSpec
from kernels.weights.wrapped import wrapped_names

__all__ = ["Quark"]

_DTYPES: Mapping[str, str] = {"fp8_e4m3": "F8_E4M3", "int8": "I8", "fp4": "U8"}
"""Dtypes in safetensors by Quark's names."""
_ROTATIONS = ("r3", "r4", "online_r1_rotation")
"""Settings of rotations that a model computes while it runs."""
_UNREAD = (
    *(".input_scale", ".output_scale", ".prob_output_scale"),
    *(".output_zero_point", ".weight_zero_point", ".input_zero_point"),
)
"""Ends of names of tensors that may stand in files: caches and inputs of MXFP4 have scales of their own here."""


@dataclass(frozen=True)
class _Kind:
    """How modules are stored. ``dtype``: one of ``_DTYPES``. ``activation``: as ``Fp8Weight``'s."""

    dtype: str
    activation: Literal["dynamic", "static"] | None

    @property
    def name(self) -> str:
        inputs = "" if self.activation is None else f", {self.activation} inputs"
        return f"{'mxfp4' if self.dtype == 'fp4' else self.dtype}{inputs}"


class Quark(Scheme):
    """``settings``: quantization_config. Raises ConfigError."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        algorithms = settings.get("algo_config") or []
        algorithms = [algorithms] if isinstance(algorithms, Mapping) else algorithms
        if not isinstance(algorithms, list) or not all(isinstance(one, Mapping) for one in algorithms):
            raise ConfigError("quantization_config: algo_config must be a list of objects")
        for algorithm in algorithms:
            online = [key for key in _ROTATIONS if algorithm.get(key)]
            if online:
                raise ConfigError(
                    f"quantization_config: algo_config has {online[0]}, a rotation that the model computes while it "
                    "runs, which is not supported; use a checkpoint without it"
                )
        if settings.get("layer_type_quant_config"):
            raise ConfigError("quantization_config: layer_type_quant_config is not supported; supported is none")
        self._all = _kind(settings.get("global_quant_config"), "global_quant_config")
        layers = settings.get("layer_quant_config") or {}
        if not isinstance(layers, Mapping):
            raise ConfigError("quantization_config: layer_quant_config must be an object")
        self._layers = {str(name): _kind(own, f"layer_quant_config.{name}") for name, own in layers.items()}
        self.name = f"quark {'; '.join(dict.fromkeys(kind.name for kind in (self._all, *self._layers.values())))}"

    def _kind(self, weight: TensorSpec) -> _Kind:
        modules = (weight.module, *(alias.removesuffix(".weight") for alias in weight.aliases))
        names = [name for module in modules for name in (module, *wrapped_names(module))]
        found = (own for name, own in self._layers.items() if any(fnmatchcase(one, name) for one in names))
        return next(found, self._all)

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor] | None:
        module, (outputs, inputs), kind = weight.module, weight.matrix, self._kind(weight)
        name, scale, dtype = f"{module}.weight", f"{module}.weight_scale", _DTYPES[kind.dtype]
        if kind.dtype == "fp4":
            groups = groups_of(module, MX_GROUP, inputs)
            return {
                name: StoredTensor((dtype,), ((outputs, inputs // 2),)),
                scale: StoredTensor(("U8", "F8_E8M0"), ((outputs, groups),)),
            }
        result = {name: StoredTensor((dtype,), ((outputs, inputs),))}
        result[scale] = StoredTensor(FLOATS, ((outputs,), (outputs, 1), (), (1,)))
        if kind.activation == "static":
            result[f"{module}.input_scale"] = StoredTensor(FLOATS, ((), (1,)))
        return result

    def read(self, files: Files, weight: TensorSpec) -> QuantizedWeight:
        module, kind = weight.module, self._kind(weight)
        values, scale = files.read(f"{module}.weight"), f"{module}.weight_scale"
        if kind.dtype == "fp4":
            powers = exponents(files, scale)
            if weight.stacked is not None:  # experts, which devices multiply in four bits
                blocks = values.unflatten(1, (-1, MX_GROUP // 2))
                return Mxfp4Weight.from_blocks(blocks, powers.view(torch.uint8), torch.bfloat16)
            return Fp8Weight(from_e2m1(values), powers, (1, MX_GROUP), "dynamic" if kind.activation else None)
        scales = files.read(scale).float().flatten().expand(weight.shape[0]).contiguous()
        activation: Activation = "dynamic" if kind.activation == "dynamic" else None
        if kind.activation == "static":
            activation = StaticActivation(files.read(f"{module}.input_scale").float().reshape(1))
        if kind.dtype == "int8":
            return Int8Weight(values, scales, activation)
        return Fp8Weight(values, scales, None, activation)

    def ignores(self, name: str, tensors: Tensors) -> bool:
        return name.endswith(_UNREAD)


def _kind(settings: object, field: str) -> _Kind:
    """What ``field`` of quantization_config says. Raises ConfigError."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"quantization_config: {field} must be an object")
    weight, inputs = settings.get("weight"), settings.get("input_tensors")
    if not isinstance(weight, Mapping) or not isinstance(inputs or {}, Mapping):
        raise ConfigError(f"quantization_config: {field}.weight and {field}.input_tensors must be objects")
    dtype, scheme = str(weight.get("dtype")), weight.get("qscheme")
    if dtype == "fp4":
        good = scheme == "per_group" and weight.get("group_size") == MX_GROUP and weight.get("scale_format") == "e8m0"
    else:
        good = dtype in _DTYPES and scheme in ("per_tensor", "per_channel")
    if not good or (dtype == "int8" and weight.get("symmetric") is False):
        raise ConfigError(
            f"quantization_config: {field}.weight with dtype {dtype!r} and qscheme {scheme!r} is not read; those that "
            f"are read are fp8_e4m3 and symmetric int8, per_tensor or per_channel, and fp4 per_group of {MX_GROUP} "
            "with scales in e8m0: use such a checkpoint, or one in bf16"
        )
    if not inputs:
        return _Kind(dtype, None)
    if inputs.get("is_dynamic") or dtype == "fp4":
        return _Kind(dtype, "dynamic")
    asymmetric = dtype == "int8" and inputs.get("symmetric") is False
    if inputs.get("qscheme") != "per_tensor" or asymmetric or inputs.get("dtype", dtype) != dtype:
        raise ConfigError(
            f"quantization_config: {field}.input_tensors with static scales must be symmetric and have qscheme "
            f"per_tensor, and the weight's dtype, {dtype}"
        )
    return _Kind(dtype, "static")
