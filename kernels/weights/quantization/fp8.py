"""Checkpoints of ``quant_method: fp8``: weights in e4m3.

A weight has ``weight_scale`` for the whole tensor or each output, or ``weight_scale_inv`` [outputs / rows, inputs /
columns] for blocks of ``weight_block_size`` (DeepSeek-V3, arXiv 2412.19437, section 3.3). Despite the second name,
``weight = values * scale`` in both. Scales of blocks are floats or powers of two (e8m0), and are named ``scale`` in
DeepSeek V4's files.

``expert_dtype: fp4`` (DeepSeek V4): routed experts are in MXFP4, ``weight`` int8 [outputs, inputs / 2] of two e2m1
numbers a byte, the low half first, and scales e8m0 [outputs, inputs / 32]. Without the setting the files decide: those
published first do not have it.

``activation_scheme``: dynamic, or static with an ``input_scale`` for each projection. ``quant_method: fbgemm_fp8``
(Llama 3.1 405B) is the same with a scale for each output; its ``activation_scale_ub`` cuts off large inputs, which are
kept here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch

from kernels.contract.errors import ConfigError
from kernels.weights.quantization.microscaling import MX_GROUP, exponents
from kernels.weights.quantization.mxfp4 import Mxfp4Weight
from kernels.weights.quantization.packed import FLOATS, groups_of, skipped_of
from kernels.weights.quantization.scheme import Files, Scheme, StoredTensor
from kernels.weights.quantization.weights import Activation, Fp8Weight, QuantizedWeight, StaticActivation, within
from kernels.weights.tensors import Role, Tensors, TensorSpec

__all__ = ["Fp8"]

_KINDS = ("scale",)
"""Other names of blocks' scales."""
_BYTES = ("I8", "U8")
"""Dtypes of numbers of four bits, two a byte."""


class Fp8(Scheme):
    """``settings``: quantization_config. Raises ConfigError."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        activation = settings.get("activation_scheme", "dynamic")
        if activation not in ("dynamic", "static"):
            raise ConfigError(
                f"quantization_config: activation_scheme must be dynamic or static, and is {activation!r}"
            )
        self._static = activation == "static"
        block = settings.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
        ):
            raise ConfigError(f"quantization_config: weight_block_size must be two sizes, and is {block!r}")
        self._block: tuple[int, int] | None = None if block is None else (block[0], block[1])
        if self._block and self._static:
            raise ConfigError("quantization_config: blocks of weights go with activation_scheme dynamic, not static")
        self._skipped = skipped_of(settings, "modules_to_not_convert", "ignored_layers")
        experts = settings.get("expert_dtype")
        if experts not in (None, "fp8", "fp4"):
            raise ConfigError(f"quantization_config: expert_dtype must be fp8 or fp4, and is {experts!r}")
        if experts == "fp4" and block is None:
            raise ConfigError("quantization_config: expert_dtype fp4 goes with weight_block_size; give it")
        self._experts = experts
        self._name_experts()

    def _name_experts(self) -> None:
        self.name = "fp8" if self._block is None else f"fp8, blocks of {self._block[0]} by {self._block[1]}"
        if self._experts == "fp4":
            self.name += ", experts in mxfp4"

    def with_experts(self, dtype: str) -> Scheme:
        if self._experts is not None or self._block is None or dtype not in _BYTES:
            return self
        result = copy(self)
        result._experts = "fp4"
        result._name_experts()
        return result

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor] | None:
        module, shape = weight.module, weight.matrix
        if weight.role is Role.OUTPUT or any(f"{part}." in f"{module}." for part in self._skipped):
            return None
        if self._is_fp4(weight):
            groups = groups_of(module, MX_GROUP, shape[1])
            return {
                f"{module}.weight": StoredTensor(_BYTES, ((shape[0], shape[1] // 2),)),
                f"{module}.weight_scale_inv": StoredTensor(("F8_E8M0", "U8"), ((shape[0], groups),), kinds=_KINDS),
            }
        result = {f"{module}.weight": StoredTensor(("F8_E4M3",), (shape,))}
        if self._block is not None:
            rows, columns = self._block
            each = shape[0] // weight.stripes
            blocks = (weight.stripes * -(-each // rows), -(-shape[1] // columns))
            scales = StoredTensor((*FLOATS, "F8_E8M0"), (blocks,), kinds=_KINDS, rows=rows)
            return result | {f"{module}.weight_scale_inv": scales}
        result[f"{module}.weight_scale"] = StoredTensor(FLOATS, ((), (1,), (shape[0],), (shape[0], 1)))
        if self._static:
            result[f"{module}.input_scale"] = StoredTensor(FLOATS, ((), (1,)))
        return result

    def _is_fp4(self, weight: TensorSpec) -> bool:
        return weight.stacked is not None and self._experts == "fp4"

    def read(self, files: Files, weight: TensorSpec) -> QuantizedWeight:
        module, shape = weight.module, weight.matrix
        values = files.read(f"{module}.weight")
        if self._is_fp4(weight):
            blocks = values.view(torch.uint8).unflatten(1, (-1, MX_GROUP // 2))
            powers = exponents(files, f"{module}.weight_scale_inv").view(torch.uint8)
            return Mxfp4Weight.from_blocks(blocks, powers, torch.bfloat16)
        if self._block is not None:
            scales, (rows, columns) = files.read(f"{module}.weight_scale_inv").float(), self._block
            if (each := shape[0] // weight.stripes) % rows:
                high = math.gcd(each, rows)
                own = torch.arange(each // high) * high // rows
                scales = scales.unflatten(0, (weight.stripes, -1))[:, own].flatten(0, 1)
                rows = high
            return Fp8Weight(values, scales, within((rows, columns), shape))
        scales = files.read(f"{module}.weight_scale").float().flatten().expand(shape[0]).contiguous()
        activation: Activation = "dynamic"
        if self._static:
            activation = StaticActivation(files.read(f"{module}.input_scale").float().reshape(1))
        return Fp8Weight(values, scales, None, activation)

    def ignores(self, name: str, tensors: Tensors) -> bool:
        return name.endswith((".k_scale", ".v_scale", ".input_scale"))
