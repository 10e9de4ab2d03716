"""Checkpoints of NVIDIA's Model Optimizer (https://github.com/NVIDIA/TensorRT-Model-Optimizer): ``quant_method:
modelopt``, or ``hf_quant_config.json`` beside a config.json that does not say so.

The tensors of a projection [outputs, inputs], by ``quant_algo``:

    FP8                        weight e4m3, weight_scale [] F32; input_scale [] F32, where inputs have a static one
    FP8_PER_CHANNEL_PER_TOKEN  weight e4m3, weight_scale [outputs]
    FP8_PB_WO                  weight e4m3, weight_scale [outputs / 128, 1, inputs / 128, 1]
    MXFP8                      weight e4m3, weight_scale e8m0 [outputs, inputs / 32]
    NVFP4, W4A16_NVFP4         weight U8 [outputs, inputs / 2], two e2m1 a byte; weight_scale e4m3
                               [outputs, inputs / 16] times weight_scale_2 [] F32; input_scale [] F32, not used

MIXED_PRECISION names one of these for each module in ``quantized_layers``, or for the modules within it. Which modules
stay in floats follows from what the files store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels.contract.errors import ConfigError, LoadError
from kernels.weights.quantization.microscaling import MX_GROUP, exponents, from_e2m1
from kernels.weights.quantization.packed import FLOATS, groups_of
from kernels.weights.quantization.scheme import Files, Scheme, StoredTensor
from kernels.weights.quantization.weights import Activation, Fp8Weight, StaticActivation, within
from kernels.weights.tensors import Tensors, TensorSpec
from kernels.weights.wrapped import plain_name

__all__ = ["ModelOpt"]

_FOURS = ("NVFP4", "W4A16_NVFP4")
_BLOCKS = "FP8_PB_WO"
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", _BLOCKS, "MXFP8", *_FOURS)
_MIXED = "MIXED_PRECISION"
_BLOCK = 128
_ONE = StoredTensor(("F32",), ((), (1,)))


class ModelOpt(Scheme):
    """``settings``: quantization_config. Raises ConfigError."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        named = str(settings.get("quant_algo") or "").upper()
        self._algorithm, self._group = named, _group(settings)
        self._layers: dict[str, tuple[str, int]] = {}
        if named == _MIXED:
            layers = settings.get("quantized_layers")
            if not isinstance(layers, Mapping) or not layers:
                raise ConfigError("quantization_config: quant_algo MIXED_PRECISION needs quantized_layers, an object")
            for module, own in layers.items():
                if not isinstance(own, Mapping):
                    raise ConfigError(f"quantization_config: quantized_layers.{module} must be an object")
                algorithm = str(own.get("quant_algo") or "").upper()
                self._layers[plain_name(str(module))] = _known(algorithm), _group(own)
        else:
            _known(named)
        kinds = sorted({algorithm for algorithm, _ in self._layers.values()}) or [named]
        self.name = f"modelopt {', '.join(kinds)}"

    def _kind(self, module: str) -> tuple[str, int] | None:
        """The algorithm and the group of a module; None: floats."""
        if self._algorithm != _MIXED:
            return self._algorithm, self._group
        while module:
            if (found := self._layers.get(module)) is not None:
                return found
            module = module.rpartition(".")[0]
        return None

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor] | None:
        module, (outputs, inputs) = weight.module, weight.matrix
        if (kind := self._kind(module)) is None:
            return None
        algorithm, group = kind
        name, scale = f"{module}.weight", f"{module}.weight_scale"
        extra = {f"{module}.input_scale": StoredTensor(FLOATS, ((), (1,)), optional=True)}
        if algorithm in _FOURS:
            groups = groups_of(module, group, inputs)
            return extra | {
                name: StoredTensor(("U8",), ((outputs, inputs // 2),)),
                scale: StoredTensor(("F8_E4M3",), ((outputs, groups),)),
                f"{module}.weight_scale_2": _ONE,
            }
        if algorithm == "MXFP8":
            stored = StoredTensor(("U8", "F8_E8M0"), ((outputs, groups_of(module, MX_GROUP, inputs)),))
        elif algorithm == _BLOCKS:
            rows, columns = -(-outputs // _BLOCK), -(-inputs // _BLOCK)
            stored = StoredTensor(FLOATS, ((rows, 1, columns, 1), (rows, columns)), rows=_BLOCK)
        else:
            stored = StoredTensor(FLOATS, ((), (1,), (outputs,), (outputs, 1)))
        return extra | {name: StoredTensor(("F8_E4M3",), ((outputs, inputs),)), scale: stored}

    def read(self, files: Files, weight: TensorSpec) -> Fp8Weight:
        module, shape = weight.module, weight.matrix
        kind = self._kind(module)
        assert kind is not None, "it stores tensors"
        algorithm, group = kind
        values, scale = files.read(f"{module}.weight"), f"{module}.weight_scale"
        if algorithm in _FOURS:
            whole = files.read(f"{module}.weight_scale_2").float().reshape(1)
            scales = files.read(scale).float() * whole
            if not bool(scales.isfinite().all()) or not bool(whole > 0):
                raise LoadError(
                    f"{scale} and {module}.weight_scale_2 must be finite, and the latter above 0; download them again"
                )
            return Fp8Weight(from_e2m1(values), scales, (1, group), "dynamic" if algorithm == "NVFP4" else None)
        if algorithm == "MXFP8":
            return Fp8Weight(values, exponents(files, scale), (1, MX_GROUP))
        scales = files.read(scale).float()
        if algorithm == _BLOCKS:
            blocks = scales.reshape(-(-shape[0] // _BLOCK), -1)
            return Fp8Weight(values, blocks, within((_BLOCK, _BLOCK), shape))
        activation: Activation = "dynamic"
        if files.has(f"{module}.input_scale"):
            activation = StaticActivation(files.read(f"{module}.input_scale").float().reshape(1))
        return Fp8Weight(values, scales.flatten().expand(shape[0]).contiguous(), None, activation)

    def ignores(self, name: str, tensors: Tensors) -> bool:
        return name.endswith((".k_scale", ".v_scale"))


def _group(settings: Mapping[str, Any]) -> int:
    """Inputs that share a scale in NVFP4. Raises ConfigError."""
    found = settings.get("group_size") or 16
    if type(found) is not int or found < 1:
        raise ConfigError(f"quantization_config: group_size must be a whole number above 0, and is {found!r}")
    return found


def _known(algorithm: str) -> str:
    """Raises ConfigError for one that is not read."""
    if algorithm not in _ALGORITHMS:
        raise ConfigError(
            f"quantization_config: quant_algo {algorithm or None!r} is not read; those that are read are "
            f"{', '.join((*_ALGORITHMS, _MIXED))}: use such a checkpoint, or one in bf16"
        )
    return algorithm
