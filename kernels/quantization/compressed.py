"""Checkpoints of ``quant_method: compressed-tensors``, as llm-compressor writes them.

``config_groups`` say which modules (``targets``, but those of ``ignore``) have which weights and inputs. Of one:

- pack-quantized: ``weight_packed`` int32 [outputs, inputs * bits / 32] of ``q + 2^(bits - 1)``, ``weight_scale``
  [outputs, groups], with ``symmetric: false`` ``weight_zero_point`` int32 [outputs * bits / 32, groups] packed alike
  along outputs, ``weight_shape`` [2], with ``actorder`` ``weight_g_idx`` int32 [inputs].
- int-quantized, naive-quantized: ``weight`` int8 [outputs, inputs] with ``weight_scale``.
- either of these with weights of 4 bits and inputs of 8 that are rounded token by token (W4A8). Ascend's tools keep two
  outputs to a byte, ``weight`` int8 [outputs / 2, inputs], and a scale's bits in the low half of 64; their ``bias`` and
  ``scale_bias`` are what the vendor's product takes off again. With ``activation_use_clip`` an expert's down projection
  has ``alpha`` [1]: its inputs are held within so much of their token's largest.
- float-quantized, naive-quantized: ``weight`` e4m3 with ``weight_scale`` for all, an output or a block.

Inputs that are rounded by a scale found before have ``input_scale``, and ``input_zero_point`` when not symmetric.

The settings are parsed here: the maintained package does it through pydantic and imports torch and transformers whole,
for two dozen fields.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from kernels.load_error import LoadError
from kernels.models.config import ConfigError
from kernels.quantization.four_bits import four_by_eight, signed, stored_pairs
from kernels.quantization.gptq import order_of
from kernels.quantization.packed import FLOATS, WholeBits, grouped, groups_of, stored_words, unpack
from kernels.quantization.scheme import Files, Scheme, Stored
from kernels.quantization.weights import (
    Activation,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    QuantizedWeight,
    StaticActivation,
)

__all__ = ["Compressed"]

_EXPERTS = "MoEGMM"
"""What Ascend's tools call all experts among the targets."""
_DOWN = (".down_proj", ".w2")


class _Numbers(msgspec.Struct, frozen=True):
    """How numbers are rounded: of weights or of inputs."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: list[int] | None = None
    dynamic: bool | str = False
    actorder: str | bool | None = None


class _Group(msgspec.Struct, frozen=True):
    """Modules that are rounded alike."""

    targets: list[str]
    weights: _Numbers
    input_activations: _Numbers | None = None
    output_activations: _Numbers | None = None
    format: str | None = None
    activation_use_clip: bool = False


class _Settings(msgspec.Struct, frozen=True):
    config_groups: dict[str, _Group]
    format: str = "dense"
    ignore: list[str] | None = None


class Compressed(Scheme):
    """``settings``: quantization_config. Raises ConfigError."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        try:
            found = msgspec.convert(dict(settings), _Settings)
        except msgspec.ValidationError as error:
            raise ConfigError(f"quantization_config: {error}; use a checkpoint that llm-compressor wrote") from error
        sparsity = settings.get("sparsity_config") or {}
        if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
            raise ConfigError(
                "quantization_config: sparse weights are not read; use a checkpoint without sparsity_config"
            )
        _check_transforms(settings.get("transform_config"))
        if not found.config_groups:
            raise ConfigError("quantization_config: config_groups is empty; use a checkpoint that llm-compressor wrote")
        self._ignore = found.ignore or []
        for pattern in (*self._ignore, *(target for group in found.config_groups.values() for target in group.targets)):
            _check(pattern)
        self._kinds = [
            (group.targets, _kind(name, group, group.format or found.format))
            for name, group in found.config_groups.items()
        ]
        kinds = " and ".join(dict.fromkeys(kind.name for _, kind in self._kinds))
        self.name = f"compressed-tensors {kinds}"

    def _of(self, module: str) -> _Kind | None:
        if any(_names(target, module) for target in self._ignore):
            return None
        for targets, kind in self._kinds:
            if any(_names(target, module) for target in targets):
                return kind
        return next((kind for targets, kind in self._kinds if "Linear" in targets), None)

    def tensors(self, module: str, shape: tuple[int, int]) -> dict[str, Stored] | None:
        kind = self._of(module)
        return None if kind is None else kind.tensors(module, shape)

    def read(self, files: Files, module: str, shape: tuple[int, int]) -> QuantizedWeight:
        kind = self._of(module)
        assert kind is not None, "it has tensors"
        return kind.read(files, module, shape)

    def ignores(self, name: str, shapes: Collection[str]) -> bool:
        return name.endswith((".k_scale", ".v_scale", ".q_scale"))


def _names(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    if target == _EXPERTS:
        return ".experts." in module
    return module == target or (target.endswith(".experts") and module.startswith(f"{target}."))


def _check(target: str) -> None:
    """Raises ConfigError."""
    if target.startswith("re:"):
        try:
            re.compile(target[3:])
        except re.error as error:
            raise ConfigError(f"quantization_config: {target!r} is no regular expression: {error}") from error


def _check_transforms(config: object) -> None:
    """Rotations that were multiplied into weights are of no concern; those of inputs, outputs or caches would have to
    be computed. Raises ConfigError."""
    groups = config.get("config_groups") if isinstance(config, Mapping) else None
    for name, group in (groups if isinstance(groups, Mapping) else {}).items():
        applied = group.get("apply") if isinstance(group, Mapping) else None
        for one in applied if isinstance(applied, list) else []:
            where = one.get("location") if isinstance(one, Mapping) else None
            if not str(where).startswith("weight"):
                raise ConfigError(
                    f"quantization_config: transform_config has {name}, which rotates by {where} while the model runs: "
                    "this is not read; use a checkpoint whose rotations are in its weights alone"
                )


class _Kind(ABC):
    """What all modules of a group have."""

    def __init__(self, weights: _Numbers, activation: Literal["dynamic", "static"] | None, offset: bool) -> None:
        self.weights, self.activation, self.offset = weights, activation, offset
        inputs = {"dynamic": " dynamic", "static": " static", None: ""}[activation]
        self.name = f"{weights.type}{weights.num_bits} {weights.strategy}{inputs}"

    @abstractmethod
    def tensors(self, module: str, shape: tuple[int, int]) -> dict[str, Stored]: ...

    @abstractmethod
    def read(self, files: Files, module: str, shape: tuple[int, int]) -> QuantizedWeight: ...

    def _inputs(self, module: str) -> dict[str, Stored]:
        if self.activation != "static":
            return {}
        found = {f"{module}.input_scale": Stored(FLOATS, ((1,), ()))}
        if self.offset:
            found[f"{module}.input_zero_point"] = Stored(("I8",), ((1,), ()))
        return found

    def _activation(self, files: Files, module: str) -> Activation:
        if self.activation != "static":
            return self.activation
        offset = files.read(f"{module}.input_zero_point").float().reshape(1) if self.offset else None
        scale = files.read(f"{module}.input_scale").float().reshape(1)
        if not bool(scale.isfinite() & (scale > 0)):
            raise LoadError(f"{module}.input_scale must be above 0 and finite, and is not; was the layer calibrated?")
        return StaticActivation(scale, offset)


class _Packed(_Kind):
    """pack-quantized: whole weights of 4 or 8 bits, several to a word."""

    @property
    def _bits(self) -> WholeBits:
        return 4 if self.weights.num_bits == 4 else 8

    @property
    def _group(self) -> int | None:
        """None for a scale an output, whose group_size may be missing or -1."""
        return self.weights.group_size if self.weights.strategy == "group" else None

    def tensors(self, module: str, shape: tuple[int, int]) -> dict[str, Stored]:
        (outputs, inputs), bits = shape, self._bits
        groups = groups_of(module, self._group, inputs)
        found = {
            f"{module}.weight_packed": stored_words(outputs, inputs * bits // 32),
            f"{module}.weight_scale": Stored(FLOATS, ((outputs, groups),)),
            f"{module}.weight_shape": Stored(("I64", "I32"), ((2,),), optional=True),
        }
        if not self.weights.symmetric:
            found[f"{module}.weight_zero_point"] = stored_words(outputs * bits // 32, groups)
        if self.weights.actorder:
            as_they_come = self.weights.actorder in ("weight", "static")
            found[f"{module}.weight_g_idx"] = Stored(("I32",), ((inputs,),), optional=as_they_come)
        return found

    def read(self, files: Files, module: str, shape: tuple[int, int]) -> Int8Weight | GroupedWeight:
        if files.has(f"{module}.weight_shape") and files.read(f"{module}.weight_shape").tolist() != list(shape):
            raise LoadError(
                f"{module}.weight_shape says {files.read(f'{module}.weight_shape').tolist()}, config.json asks for "
                f"{list(shape)}; check that both come from one model"
            )
        values, zeros, order = unpack(files.read(f"{module}.weight_packed"), self._bits, 1), None, None
        if not self.weights.symmetric:
            zeros = unpack(files.read(f"{module}.weight_zero_point"), self._bits, 0)
        index = f"{module}.weight_g_idx"
        if self.weights.actorder and files.has(index):
            order = order_of(index, files.read(index), self._group or shape[1])
        if order is not None:
            values = values[:, order]
        scales = files.read(f"{module}.weight_scale")
        if self.activation and zeros is None and order is None:
            return four_by_eight(values.to(torch.int8) - 8, scales.float())
        found = grouped(values, scales, zeros, self._bits, order)
        return dataclasses.replace(found, activation="dynamic" if self.activation else None)


class _Pairs(_Kind):
    """int-quantized of 4 bits, for inputs of 8."""

    def __init__(self, weights: _Numbers, clips: bool) -> None:
        super().__init__(weights, "dynamic", False)
        self.clips = clips

    def tensors(self, module: str, shape: tuple[int, int]) -> dict[str, Stored]:
        group = self.weights.group_size if self.weights.strategy == "group" else None
        column = ((shape[0], 1), (shape[0],))
        groups = column if group is None else ((shape[0], groups_of(module, group, shape[1])),)
        found = {
            f"{module}.weight": stored_pairs(shape),
            f"{module}.weight_scale": Stored((*FLOATS, "I64", "U64"), groups),
            f"{module}.weight_offset": Stored(("I8", *FLOATS), groups, optional=True),
            f"{module}.scale_bias": Stored(("F32",), (*column, (shape[0], 16)), optional=True),
        }
        if self.clips:
            found[f"{module}.bias"] = Stored(("F32",), ((shape[0],),), optional=True)
            found[f"{module}.alpha"] = Stored(("F32",), ((1,), ()), optional=True)
        return found

    def read(self, files: Files, module: str, shape: tuple[int, int]) -> QuantizedWeight:
        scales, clip = files.read(f"{module}.weight_scale"), None
        if not scales.dtype.is_floating_point:
            scales = scales.view(torch.int64).to(torch.int32).view(torch.float32)
        if files.has(f"{module}.weight_offset") and bool(files.read(f"{module}.weight_offset").any()):
            raise LoadError(f"{module}.weight_offset must be zeros, as the weights are symmetric, and is not")
        if self.clips and module.endswith(_DOWN) and files.has(f"{module}.alpha"):
            clip = files.read(f"{module}.alpha").float().reshape(1)
            if not bool((clip > 0) & (clip <= 1)):
                raise LoadError(f"{module}.alpha must be above 0 and at most 1, and is {float(clip)}; is it another's?")
        values = signed(f"{module}.weight", files.read(f"{module}.weight"), shape[0])
        return four_by_eight(values, scales.float().reshape(shape[0], -1), clip)


class _Int8(_Kind):
    """int-quantized: a byte for each weight."""

    def tensors(self, module: str, shape: tuple[int, int]) -> dict[str, Stored]:
        found = {f"{module}.weight": Stored(("I8",), (shape,)), f"{module}.weight_scale": _scales(self.weights, shape)}
        return found | self._inputs(module)

    def read(self, files: Files, module: str, shape: tuple[int, int]) -> Int8Weight:
        values = files.read(f"{module}.weight")
        activation, correction = self._activation(files, module), None
        if isinstance(activation, StaticActivation) and activation.offset is not None:
            correction = -values.sum(1, dtype=torch.int32) * activation.offset.int()
        return Int8Weight(values, _wide(files.read(f"{module}.weight_scale"), shape), activation, correction)


class _Fp8(_Kind):
    """float-quantized: e4m3."""

    def tensors(self, module: str, shape: tuple[int, int]) -> dict[str, Stored]:
        found = {f"{module}.weight": Stored(("F8_E4M3",), (shape,))}
        found[f"{module}.weight_scale"] = _scales(self.weights, shape)
        return found | self._inputs(module)

    def read(self, files: Files, module: str, shape: tuple[int, int]) -> Fp8Weight:
        scales, block = files.read(f"{module}.weight_scale"), self.weights.block_structure
        activation = self._activation(files, module)
        if block is not None:
            return Fp8Weight(files.read(f"{module}.weight"), scales.float(), (block[0], block[1]), activation)
        return Fp8Weight(files.read(f"{module}.weight"), _wide(scales, shape), None, activation)


def _scales(weights: _Numbers, shape: tuple[int, int]) -> Stored:
    if weights.block_structure is not None:
        rows, columns = weights.block_structure
        return Stored(FLOATS, ((-(-shape[0] // rows), -(-shape[1] // columns)),))
    return Stored(FLOATS, ((1,), ()) if weights.strategy == "tensor" else ((shape[0], 1), (shape[0],)))


def _wide(scales: Tensor, shape: tuple[int, int]) -> Tensor:
    return scales.float().flatten().expand(shape[0]).contiguous()


def _kind(name: str, group: _Group, stored: str) -> _Kind:
    """Raises ConfigError for what is not read."""
    weights, inputs = group.weights, group.input_activations
    says = f"quantization_config: {name} has {weights.type} weights of {weights.num_bits} bits, a scale for each " + (
        f"{weights.strategy} ({stored})"
    )

    def refused(why: str) -> ConfigError:
        return ConfigError(f"{says}: {why}; use a checkpoint of W8A8, W4A8, W8A16 or W4A16 whole numbers, or of fp8")

    activation: Literal["dynamic", "static"] | None = None
    fours = False  # weights of 4 bits for inputs of 8
    if inputs is not None:
        activation = "dynamic" if inputs.dynamic else "static"
        fours = activation == "dynamic" and inputs.num_bits == 8 and weights.num_bits == 4 and weights.type == "int"
        if inputs.type != weights.type or not (fours or inputs.num_bits == weights.num_bits == 8):
            raise refused(f"inputs of {inputs.type} {inputs.num_bits} are not multiplied with these")
        if inputs.dynamic and not inputs.symmetric:
            raise refused("inputs that are rounded as they come must be symmetric")
        if activation == "static" and inputs.strategy not in ("tensor", None):
            raise refused("inputs that are rounded by a scale found before must share it (strategy tensor)")
    if group.output_activations is not None:
        raise refused("outputs are not rounded")
    offset = inputs is not None and not inputs.symmetric
    if weights.strategy == "group" and (weights.group_size or 0) < 1:
        raise refused("group_size is missing")
    if group.activation_use_clip and not (fours and stored == "int-quantized"):
        raise refused("inputs are clipped for int-quantized weights of 4 bits only")
    if stored == "pack-quantized" and weights.type == "int":
        if weights.num_bits not in (4, 8) or weights.strategy not in ("group", "channel"):
            raise refused("this is not read")
        if inputs is not None and not fours:
            raise refused("this is not read")
        return _Packed(weights, activation, False)
    if fours and stored in ("int-quantized", "naive-quantized"):
        if weights.strategy not in ("group", "channel") or not weights.symmetric:
            raise refused("this is not read")
        return _Pairs(weights, group.activation_use_clip)
    if (
        stored in ("int-quantized", "naive-quantized")
        and (weights.type, weights.num_bits) == ("int", 8)
        and weights.strategy in ("channel", "tensor")
        and weights.symmetric
    ):
        return _Int8(weights, activation, offset)
    if (
        stored in ("float-quantized", "naive-quantized")
        and (weights.type, weights.num_bits) == ("float", 8)
        and (weights.strategy in ("channel", "tensor") or (weights.strategy == "block" and weights.block_structure))
    ):
        return _Fp8(weights, activation, offset)
    raise refused("this is not read")
