"""How modules of compressed-tensors checkpoints are stored: ``compressed`` says which group has which layout."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kernels.contract.errors import LoadError
from kernels.weights.quantization.compressed_settings import Group
from kernels.weights.quantization.four_bits import four_by_eight, signed, stored_pairs
from kernels.weights.quantization.gptq import order_of
from kernels.weights.quantization.microscaling import MX_GROUP, exponents, from_e2m1, from_e2m3
from kernels.weights.quantization.packed import FLOATS, WholeBits, grouped, groups_of, stored_words, unpack
from kernels.weights.quantization.scheme import Files, StoredTensor
from kernels.weights.quantization.weights import (
    Activation,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    QuantizedWeight,
    StaticActivation,
    within,
)
from kernels.weights.tensors import Role, TensorSpec

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["Fp8", "Int8", "Layout", "Mx", "Nvfp4", "Packed", "Pairs"]


class Layout(ABC):
    """The tensors that each module of a group stores."""

    def __init__(
        self, group: Group, activation: Literal["dynamic", "static"] | None = None, offset: bool = False
    ) -> None:
        self.weights, self.activation, self.offset, self.ordered = group.weights, activation, offset, group.ordered
        inputs = "" if activation is None else f" {activation}"
        self.name = f"{group.type}{group.weights.num_bits} {group.strategy}{inputs}"

    @abstractmethod
    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor]: ...

    @abstractmethod
    def read(self, files: Files, weight: TensorSpec) -> QuantizedWeight: ...

    def _inputs(self, module: str) -> dict[str, StoredTensor]:
        if self.activation != "static":
            return {}
        result = {f"{module}.input_scale": StoredTensor(FLOATS, ((1,), ()))}
        if self.offset:
            result[f"{module}.input_zero_point"] = StoredTensor(("I8",), ((1,), ()))
        return result

    def _activation(self, files: Files, module: str) -> Activation:
        if self.activation != "static":
            return self.activation
        offset = files.read(f"{module}.input_zero_point").float().reshape(1) if self.offset else None
        scale = files.read(f"{module}.input_scale").float().reshape(1)
        if not bool(scale.isfinite() & (scale > 0)):
            raise LoadError(f"{module}.input_scale must be above 0 and finite, and is not; was the layer calibrated?")
        return StaticActivation(scale, offset)


class Packed(Layout):
    """pack-quantized: integer weights of 4 or 8 bits, several to a word."""

    @property
    def _bits(self) -> WholeBits:
        return 4 if self.weights.num_bits == 4 else 8

    @property
    def _group(self) -> int | None:
        """Inputs of a group. None: one scale an output, where group_size may be missing or -1."""
        return self.weights.group_size if self.weights.strategy == "group" else None

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor]:
        module, shape = weight.module, weight.matrix
        (outputs, inputs), bits = shape, self._bits
        groups = groups_of(module, self._group, inputs)
        result = {
            f"{module}.weight_packed": stored_words(outputs, inputs * bits // 32),
            f"{module}.weight_scale": StoredTensor(FLOATS, ((outputs, groups),)),
            f"{module}.weight_shape": StoredTensor(("I64", "I32"), ((2,),), optional=True),
        }
        if not self.weights.symmetric:
            result[f"{module}.weight_zero_point"] = stored_words(outputs * bits // 32, groups)
        if self.ordered or self.weights.actorder:  # of "weight" inputs are stored as they come, mostly without it
            result[f"{module}.weight_g_idx"] = StoredTensor(("I32",), ((inputs,),), optional=not self.ordered)
        return result

    def read(self, files: Files, weight: TensorSpec) -> Int8Weight | GroupedWeight:
        module, shape = weight.module, weight.matrix
        if files.has(f"{module}.weight_shape") and files.read(f"{module}.weight_shape").tolist() != list(shape):
            raise LoadError(
                f"{module}.weight_shape says {files.read(f'{module}.weight_shape').tolist()}, config.json asks for "
                f"{list(shape)}; check that both come from one model"
            )
        values, zeros, order = unpack(files.read(f"{module}.weight_packed"), self._bits, 1), None, None
        if not self.weights.symmetric:
            zeros = unpack(files.read(f"{module}.weight_zero_point"), self._bits, 0)
        index = f"{module}.weight_g_idx"
        if (self.ordered or self.weights.actorder) and files.has(index):
            order = order_of(index, files.read(index), self._group or shape[1])
        if order is not None:
            values = values[:, order]
        scales = files.read(f"{module}.weight_scale")
        if self.activation and zeros is None and order is None:
            return four_by_eight(values.to(torch.int8) - 8, scales.float())
        result = grouped(values, scales, zeros, self._bits, order)
        return dataclasses.replace(result, activation="dynamic" if self.activation else None)


class Pairs(Layout):
    """int-quantized of 4 bits, for inputs of 8."""

    def __init__(self, group: Group) -> None:
        super().__init__(group, "dynamic")
        self.clips = group.clips

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor]:
        module, shape = weight.module, weight.matrix
        group = self.weights.group_size if self.weights.strategy == "group" else None
        column = ((shape[0], 1), (shape[0],))
        groups = column if group is None else ((shape[0], groups_of(module, group, shape[1])),)
        result = {
            f"{module}.weight": stored_pairs(shape),
            f"{module}.weight_scale": StoredTensor((*FLOATS, "I64", "U64"), groups),
            f"{module}.weight_offset": StoredTensor(("I8", *FLOATS), groups, optional=True),
            f"{module}.scale_bias": StoredTensor(("F32",), (*column, (shape[0], 16)), optional=True),
        }
        if self.clips:
            result[f"{module}.bias"] = StoredTensor(("F32",), ((shape[0],),), optional=True)
            result[f"{module}.alpha"] = StoredTensor(("F32",), ((1,), ()), optional=True)
        return result

    def read(self, files: Files, weight: TensorSpec) -> QuantizedWeight:
        module, shape = weight.module, weight.matrix
        scales, clip = files.read(f"{module}.weight_scale"), None
        if not scales.dtype.is_floating_point:
            scales = scales.view(torch.int64).to(torch.int32).view(torch.float32)
        if files.has(f"{module}.weight_offset") and bool(files.read(f"{module}.weight_offset").any()):
            raise LoadError(f"{module}.weight_offset must be zeros, as the weights are symmetric, and is not")
        if self.clips and weight.role is Role.DOWN and files.has(f"{module}.alpha"):
            clip = files.read(f"{module}.alpha").float().reshape(1)
            if not bool((clip > 0) & (clip <= 1)):
                raise LoadError(f"{module}.alpha must be above 0 and at most 1, and is {float(clip)}; is it another's?")
        values = signed(f"{module}.weight", files.read(f"{module}.weight"), shape[0])
        return four_by_eight(values, scales.float().reshape(shape[0], -1), clip)


class Int8(Layout):
    """int-quantized: a byte for each weight."""

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor]:
        module, shape = weight.module, weight.matrix
        result = {
            f"{module}.weight": StoredTensor(("I8",), (shape,)),
            f"{module}.weight_scale": _scales(self.weights, shape),
        }
        return result | self._inputs(module)

    def read(self, files: Files, weight: TensorSpec) -> Int8Weight:
        module, shape = weight.module, weight.matrix
        values = files.read(f"{module}.weight")
        activation, correction = self._activation(files, module), None
        if isinstance(activation, StaticActivation) and activation.offset is not None:
            correction = -values.sum(1, dtype=torch.int32) * activation.offset.int()
        return Int8Weight(values, _wide(files.read(f"{module}.weight_scale"), shape), activation, correction)


class Fp8(Layout):
    """float-quantized: e4m3."""

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor]:
        module, shape = weight.module, weight.matrix
        result = {f"{module}.weight": StoredTensor(("F8_E4M3",), (shape,))}
        result[f"{module}.weight_scale"] = _scales(self.weights, shape)
        return result | self._inputs(module)

    def read(self, files: Files, weight: TensorSpec) -> Fp8Weight:
        module, shape = weight.module, weight.matrix
        scales, block = files.read(f"{module}.weight_scale"), self.weights.block_structure
        activation = self._activation(files, module)
        if block is not None:
            return Fp8Weight(files.read(f"{module}.weight"), scales.float(), within(block, shape), activation)
        return Fp8Weight(files.read(f"{module}.weight"), _wide(scales, shape), None, activation)


class Mx(Layout):
    """mxfp4-, mxfp6-pack-quantized and mxfp8-quantized."""

    @property
    def _stored(self) -> tuple[str, str]:
        return ("weight", "F8_E4M3") if self.weights.num_bits == 8 else ("weight_packed", "U8")

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor]:
        module, shape = weight.module, weight.matrix
        (outputs, inputs), (name, dtype) = shape, self._stored
        groups = groups_of(module, MX_GROUP, inputs)
        return {
            f"{module}.{name}": StoredTensor((dtype,), ((outputs, inputs * self.weights.num_bits // 8),)),
            f"{module}.weight_scale": StoredTensor(("U8", "F8_E8M0"), ((outputs, groups),)),
        }

    def read(self, files: Files, weight: TensorSpec) -> Fp8Weight:
        module = weight.module
        values = files.read(f"{module}.{self._stored[0]}")
        if self.weights.num_bits != 8:
            values = (from_e2m1 if self.weights.num_bits == 4 else from_e2m3)(values)
        scales = exponents(files, f"{module}.weight_scale")
        return Fp8Weight(values, scales, (1, MX_GROUP), self._activation(files, module))


class Nvfp4(Layout):
    """nvfp4-pack-quantized: scales in e4m3, all divided by one global scale of the weight. The global scale of inputs
    is not used: inputs are quantized to 8 bits, or not at all."""

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor]:
        module, shape = weight.module, weight.matrix
        groups = groups_of(module, self.weights.group_size, shape[1])
        return {
            f"{module}.weight_packed": StoredTensor(("U8",), ((shape[0], shape[1] // 2),)),
            f"{module}.weight_scale": StoredTensor(("F8_E4M3",), ((shape[0], groups),)),
            f"{module}.weight_global_scale": StoredTensor(("F32",), ((1,), ())),
            f"{module}.input_global_scale": StoredTensor(("F32",), ((1,), ()), optional=True),
        }

    def read(self, files: Files, weight: TensorSpec) -> Fp8Weight:
        module = weight.module
        whole = files.read(f"{module}.weight_global_scale").float().reshape(1)
        if not bool(whole.isfinite() & (whole > 0)):
            raise LoadError(f"{module}.weight_global_scale must be above 0 and finite, and is not; is it another's?")
        scales = files.read(f"{module}.weight_scale").float() / whole
        if not bool(scales.isfinite().all()):
            raise LoadError(f"{module}.weight_scale contains NaN; download it again")
        values, group = from_e2m1(files.read(f"{module}.weight_packed")), self.weights.group_size
        return Fp8Weight(values, scales, (1, group), self._activation(files, module))


def _scales(weights: QuantizationArgs, shape: tuple[int, int]) -> StoredTensor:
    if weights.block_structure is not None:
        rows, columns = weights.block_structure
        return StoredTensor(FLOATS, ((-(-shape[0] // rows), -(-shape[1] // columns)),), rows=rows)
    return StoredTensor(FLOATS, ((1,), ()) if weights.strategy == "tensor" else ((shape[0], 1), (shape[0],)))


def _wide(scales: Tensor, shape: tuple[int, int]) -> Tensor:
    return scales.float().flatten().expand(shape[0]).contiguous()
