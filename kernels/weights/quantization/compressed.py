"""Checkpoints of ``quant_method: compressed-tensors``, as llm-compressor writes them.

``config_groups`` say which modules (``targets`` without those of ``ignore``) have which weights and inputs. A module
stores, by format:

- pack-quantized: ``weight_packed`` int32 [outputs, inputs * bits / 32] of ``q + 2^(bits - 1)``, ``weight_scale``
  [outputs, groups], with ``symmetric: false`` ``weight_zero_point`` int32 [outputs * bits / 32, groups] packed alike
  along outputs, ``weight_shape`` [2], with ``actorder`` ``weight_g_idx`` int32 [inputs].
- int-quantized, naive-quantized: ``weight`` int8 [outputs, inputs] with ``weight_scale``.
- either of these with weights of 4 bits and inputs of 8 that are quantized token by token (W4A8). Ascend's tools store
  two outputs a byte, ``weight`` int8 [outputs / 2, inputs], and a scale's bits in the low half of 64; their ``bias``
  and ``scale_bias`` are corrections that the vendor's product subtracts. With ``activation_use_clip`` an expert's down
  projection has ``alpha`` [1]: its inputs are clamped to that share of their token's largest magnitude.
- float-quantized, naive-quantized: ``weight`` e4m3 with ``weight_scale`` for all, an output or a block.
- mxfp8-quantized: ``weight`` e4m3, ``weight_scale`` e8m0 [outputs, inputs / 32]; mxfp4- and mxfp6-pack-quantized:
  ``weight_packed`` uint8 [outputs, inputs * bits / 8] in its place.
- nvfp4-pack-quantized: the same with ``weight_scale`` e4m3 [outputs, inputs / 16], divided by ``weight_global_scale``.

Inputs with a static scale have ``input_scale``, and ``input_zero_point`` when they are asymmetric. Inputs of 4 and 6
bits, and microscaled inputs on a device without them, are quantized to 8 bits token by token, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from kernels.contract.errors import ConfigError
from kernels.weights.quantization.compressed_layouts import Fp8, Int8, Layout, Mx, Nvfp4, Packed, Pairs
from kernels.weights.quantization.compressed_settings import Group, Settings, plain
from kernels.weights.quantization.microscaling import MX_GROUP
from kernels.weights.quantization.scheme import Files, Scheme, StoredTensor
from kernels.weights.quantization.weights import QuantizedWeight
from kernels.weights.tensors import Tensors, TensorSpec

__all__ = ["Compressed"]

_SMALL = {
    "mxfp4-pack-quantized": (4, "group", MX_GROUP),
    "mxfp6-pack-quantized": (6, "group", MX_GROUP),
    "mxfp8-quantized": (8, "group", MX_GROUP),
    "nvfp4-pack-quantized": (4, "tensor_group", 16),
}
"""The bits, strategy and group_size that each format has."""


class Compressed(Scheme):
    """``settings``: quantization_config. Raises ConfigError."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = Settings(settings)
        self._layouts = {group.name: _layout(group) for group in self._settings.groups}
        self._of_module: dict[str, Layout | None] = {}
        kinds = " and ".join(dict.fromkeys(layout.name for layout in self._layouts.values()))
        self.name = f"compressed-tensors {kinds or 'cache'}"

    def _of(self, module: str) -> Layout | None:
        if module not in self._of_module:
            group = self._settings.group_of(module)
            self._of_module[module] = None if group is None else self._layouts[group.name]
        return self._of_module[module]

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor] | None:
        layout = self._of(weight.module)
        return None if layout is None else layout.tensors(weight)

    def read(self, files: Files, weight: TensorSpec) -> QuantizedWeight:
        layout = self._of(weight.module)
        assert layout is not None, "it has tensors"
        return layout.read(files, weight)

    def ignores(self, name: str, tensors: Tensors) -> bool:
        return name.endswith((".k_scale", ".v_scale", ".q_scale"))


def _layout(group: Group) -> Layout:
    """The layout of a group's modules. Raises ConfigError for one that is not supported."""
    stored, bits, whole = group.format, group.weights.num_bits, group.type == "int"
    activation = _activation(group)
    if stored in _SMALL:
        return _small_floats(group, activation)
    if stored == "pack-quantized" and whole:
        fits = bits in (4, 8) and group.strategy in ("group", "channel")
        if not fits or (activation is not None and not _four_by_eight(group)):
            raise _refused(group, "this is not read")
        return Packed(group, activation)
    if stored not in ("int-quantized" if whole else "float-quantized", "naive-quantized"):
        raise _refused(group, "this is not read")
    if _four_by_eight(group):
        if group.strategy not in ("group", "channel") or not group.weights.symmetric:
            raise _refused(group, "this is not read")
        return Pairs(group)
    if bits != 8 or group.strategy not in (("channel", "tensor") if whole else ("channel", "tensor", "block")):
        raise _refused(group, "this is not read")
    if not group.weights.symmetric:
        raise _refused(group, "weights of 8 bits that are not packed must be symmetric")
    offset = group.inputs is not None and not group.inputs.symmetric
    return (Int8 if whole else Fp8)(group, activation, offset)


def _four_by_eight(group: Group) -> bool:
    """Whether the group is W4A8: weights of 4 bits, inputs of 8."""
    weights, inputs = group.weights, group.inputs
    if inputs is None or not inputs.dynamic or group.type != "int":
        return False
    return (inputs.type, inputs.num_bits, weights.num_bits) == ("int", 8, 4)


def _activation(group: Group) -> Literal["dynamic", "static"] | None:
    """How inputs are quantized; None: they are not. Raises ConfigError."""
    inputs = group.inputs
    result: Literal["dynamic", "static"] | None = None
    if inputs is not None and group.format not in _SMALL:
        result = "dynamic" if inputs.dynamic else "static"
        eights = inputs.num_bits == group.weights.num_bits == 8
        if inputs.type != group.weights.type or not (eights or _four_by_eight(group)):
            problem = f"inputs of {plain(inputs.type)} {inputs.num_bits} are not multiplied with these"
            raise _refused(group, problem)
        if inputs.dynamic == "local":
            raise _refused(group, "inputs whose scales are found in two steps are not read of it")
        if inputs.dynamic and not inputs.symmetric:
            raise _refused(group, "inputs that are rounded as they come must be symmetric")
        if result == "static" and inputs.strategy != "tensor":
            raise _refused(group, "inputs that are rounded by a scale found before must share it (strategy tensor)")
    if group.clips and not (_four_by_eight(group) and group.format == "int-quantized"):
        raise _refused(group, "inputs are clipped for int-quantized weights of 4 bits only")
    return "dynamic" if inputs is not None and group.format in _SMALL else result


def _small_floats(group: Group, activation: Literal["dynamic", "static"] | None) -> Layout:
    """The layout of a group of microscaled or NVFP4 weights. Raises ConfigError."""
    weights, (bits, strategy, size) = group.weights, _SMALL[group.format]
    if (group.type, weights.num_bits, group.strategy, weights.group_size) != ("float", bits, strategy, size):
        raise _refused(group, f"it keeps floats of {bits} bits in groups of {size} (strategy {strategy}) alone")
    if not weights.symmetric:
        raise _refused(group, "its weights must be symmetric")
    if group.inputs is not None and (group.inputs.type != "float" or not group.inputs.dynamic):
        raise _refused(group, "its inputs must be floats that are rounded as they come")
    return Nvfp4(group, activation) if strategy == "tensor_group" else Mx(group, activation)


def _refused(group: Group, why: str) -> ConfigError:
    return ConfigError(
        f"quantization_config: {group.name} has {group.type} weights of {group.weights.num_bits} bits, a scale for "
        f"each {group.strategy} ({group.format}): {why}; use a checkpoint of W8A8, W4A8, W8A16 or W4A16 whole numbers, "
        "of fp8, or of microscaling"
    )
