"""Checkpoints of ``quant_method: fp8``: weights in e4m3.

A weight has ``weight_scale`` for the whole tensor or each output, or ``weight_scale_inv`` [outputs / rows, inputs /
columns] for blocks of ``weight_block_size`` (DeepSeek-V3, arXiv 2412.19437, section 3.3). Despite the second name,
``weight = values * scale`` in both.

``activation_scheme``: dynamic, or static with an ``input_scale`` for each projection. ``quant_method: fbgemm_fp8``
(Llama 3.1 405B) is the same with a scale for each output; its ``activation_scale_ub`` cuts off large inputs, which are
kept here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels.contract.errors import ConfigError
from kernels.weights.quantization.packed import FLOATS, skipped_of
from kernels.weights.quantization.scheme import Files, Scheme, StoredTensor
from kernels.weights.quantization.weights import Activation, Fp8Weight, StaticActivation, within
from kernels.weights.tensors import Role, Tensors, TensorSpec

__all__ = ["Fp8"]


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
        self.name = "fp8" if block is None else f"fp8, blocks of {block[0]} by {block[1]}"

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor] | None:
        module, shape = weight.module, weight.matrix
        if weight.role is Role.OUTPUT or any(f"{part}." in f"{module}." for part in self._skipped):
            return None
        result = {f"{module}.weight": StoredTensor(("F8_E4M3",), (shape,))}
        if self._block is not None:
            blocks = (-(-shape[0] // self._block[0]), -(-shape[1] // self._block[1]))
            result[f"{module}.weight_scale_inv"] = StoredTensor(FLOATS, (blocks,))
            return result
        result[f"{module}.weight_scale"] = StoredTensor(FLOATS, ((), (1,), (shape[0],), (shape[0], 1)))
        if self._static:
            result[f"{module}.input_scale"] = StoredTensor(FLOATS, ((), (1,)))
        return result

    def read(self, files: Files, weight: TensorSpec) -> Fp8Weight:
        module, shape = weight.module, weight.matrix
        values = files.read(f"{module}.weight")
        if self._block is not None:
            scales = files.read(f"{module}.weight_scale_inv").float()
            return Fp8Weight(values, scales, within(self._block, shape))
        scales = files.read(f"{module}.weight_scale").float().flatten().expand(shape[0]).contiguous()
        activation: Activation = "dynamic"
        if self._static:
            activation = StaticActivation(files.read(f"{module}.input_scale").float().reshape(1))
        return Fp8Weight(values, scales, None, activation)

    def ignores(self, name: str, tensors: Tensors) -> bool:
        return name.endswith((".k_scale", ".v_scale", ".input_scale"))
