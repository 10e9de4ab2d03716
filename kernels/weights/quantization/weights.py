"""Quantized weights in memory, the same for all file formats.

``w[i, j]`` of a projection [outputs, inputs] is always ``scale * (value - zero)``. Classes differ in how values are
stored and how many of them share a scale. A weight also says how its input is quantized: ``activation`` None leaves
``x`` as it is, "dynamic" quantizes each token with a scale of its own (``largest |x| / largest value``), and a
StaticActivation with a fixed scale.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from kernels.weights.tensors import Part

__all__ = [
    "FP8_MAX",
    "Activation",
    "Fp8Weight",
    "GroupedWeight",
    "Int8Weight",
    "PartError",
    "Projection",
    "QuantizedWeight",
    "StaticActivation",
    "quantize_fp8",
    "quantize_int8",
    "within",
]

FP8_MAX = 448.0
"""The largest e4m3 number."""


class PartError(ValueError):
    """A quantized weight cannot be divided there; the message says why and what to do."""


@dataclass(frozen=True)
class StaticActivation:
    """``x`` is rounded to ``clamp(round(x / scale) + offset, -128, 127)``. Both f32 of one element, offset whole."""

    scale: Tensor
    offset: Tensor | None = None


Activation: TypeAlias = StaticActivation | Literal["dynamic"] | None


@dataclass(frozen=True)
class QuantizedWeight(ABC):
    """A projection's weight. Fields that are tensors are all on one device.

    ``dtype``: dtype of the activations, set by the loader. ``clip`` f32 of one element: before a token is quantized it
    is clamped to this share of its largest magnitude; None: it is not clamped.
    """

    dtype: torch.dtype = dataclasses.field(default=torch.bfloat16, kw_only=True)
    clip: Tensor | None = dataclasses.field(default=None, kw_only=True)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight [outputs, inputs]: the reference for every kernel."""

    @abstractmethod
    def part(self, part: Part) -> Self:
        """Some outputs (dimension 0) or inputs (dimension 1). Raises PartError."""

    @abstractmethod
    def join(self, others: Sequence[QuantizedWeight]) -> Self | None:
        """This weight and ``others`` concatenated along outputs; None where one weight of this kind cannot hold all."""

    def constant(self) -> Tensor | None:
        """A constant f32 [outputs] that is added to every product with a quantized token; None: there is none."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(result.nbytes for result in _tensors(self))

    def to(self, device: torch.device) -> Self:
        """A copy on ``device``."""
        return _mapped(self, lambda tensor: tensor.to(device))


_T = TypeVar("_T", bound=QuantizedWeight | StaticActivation)
_W = TypeVar("_W", bound=QuantizedWeight)

Projection: TypeAlias = Tensor | QuantizedWeight | tuple[Tensor | QuantizedWeight, ...]
"""A weight, or several of different kinds that are concatenated along outputs."""


@dataclass(frozen=True)
class Int8Weight(QuantizedWeight):
    """``values`` int8 [outputs, inputs], ``scales`` f32 [outputs].

    ``correction`` int32 [outputs]: with a StaticActivation, added to the integer sums (the offset's share and the
    bias); only the rank with the first inputs has it.
    """

    values: Tensor
    scales: Tensor
    activation: Activation = "dynamic"
    correction: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self.values.float() * self.scales[:, None]).to(dtype)

    def constant(self) -> Tensor | None:
        if not isinstance(self.activation, StaticActivation):
            return None
        whole = torch.zeros_like(self.scales) if self.correction is None else self.correction.float()
        if self.activation.offset is not None:
            whole = whole + self.activation.offset * self.values.sum(1, dtype=torch.int32).float()
        return whole * self.scales * self.activation.scale

    def part(self, part: Part) -> Self:
        if part.dimension == 1:
            correction = self.correction if part.begin == 0 else None
            return dataclasses.replace(self, values=part.narrow(self.values).contiguous(), correction=correction)
        correction = None if self.correction is None else part.narrow(self.correction)
        return dataclasses.replace(
            self, values=part.narrow(self.values), scales=part.narrow(self.scales), correction=correction
        )

    def join(self, others: Sequence[QuantizedWeight]) -> Self | None:
        return _joined(self, others, ("values", "scales", "correction"))

    def grouped(self) -> GroupedWeight:
        """The same weight with all inputs of an output as one group. Only without activation."""
        values = (self.values.to(torch.int16) + 128).to(torch.uint8)
        return GroupedWeight(values, self.scales[:, None], None, self.shape[1], 8, dtype=self.dtype)


@dataclass(frozen=True)
class GroupedWeight(QuantizedWeight):
    """``values`` uint8, [outputs, inputs / 2] for 4 ``bits`` (the even input in the low half) or [outputs, inputs] for
    8; ``scales`` float [outputs, inputs / group]; ``zeros`` uint8 of the same shape, None: symmetric (8 or 128).

    ``order`` int64 [inputs]: column j belongs to input ``order[j]`` (act-order); None: in order.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    bits: Literal[4, 8]
    order: Tensor | None = None
    activation: Literal["dynamic"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1] * 8 // self.bits

    def unpacked(self) -> Tensor:
        """The values uint8 [outputs, inputs], in stored order."""
        if self.bits == 8:
            return self.values
        return torch.stack((self.values & 15, self.values >> 4), -1).view(self.shape)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        grouped: Tensor = self.unpacked().unflatten(1, (-1, self.group)).float()
        zeros = float(1 << (self.bits - 1)) if self.zeros is None else self.zeros.float()[:, :, None]
        result = ((grouped - zeros) * self.scales.float()[:, :, None]).flatten(1)
        if self.order is not None:
            result = torch.empty_like(result).index_copy_(1, self.order, result)
        return result.to(dtype)

    def part(self, part: Part) -> Self:
        if part.dimension == 0:
            return dataclasses.replace(
                self,
                values=part.narrow(self.values),
                scales=part.narrow(self.scales),
                zeros=None if self.zeros is None else part.narrow(self.zeros),
            )
        if self.order is not None:
            raise PartError(
                "its inputs are stored in an order of their own (act-order), so they cannot be divided over ranks; use "
                "--tensor-parallel-size 1, or a checkpoint without desc_act"
            )
        if self.group == self.shape[1]:  # an output's inputs share one scale, and so do those of a part
            bytes_ = Part(1, part.begin * self.bits // 8, part.end * self.bits // 8)
            return dataclasses.replace(
                self, values=bytes_.narrow(self.values).contiguous(), group=part.end - part.begin
            )
        if part.begin % self.group or part.end % self.group:
            raise PartError(
                f"inputs {part.begin} to {part.end} cut a group of {self.group} that share a scale; use a smaller "
                "--tensor-parallel-size, or a checkpoint of smaller groups"
            )
        groups = Part(1, part.begin // self.group, part.end // self.group)
        bytes_ = Part(1, part.begin * self.bits // 8, part.end * self.bits // 8)
        return dataclasses.replace(
            self,
            values=bytes_.narrow(self.values).contiguous(),
            scales=groups.narrow(self.scales).contiguous(),
            zeros=None if self.zeros is None else groups.narrow(self.zeros).contiguous(),
        )

    def join(self, others: Sequence[QuantizedWeight]) -> Self | None:
        return _joined(self, others, ("values", "scales", "zeros"))


@dataclass(frozen=True)
class Fp8Weight(QuantizedWeight):
    """``values`` float8_e4m3fn [outputs, inputs]. ``scales``: [outputs], or with ``block`` (outputs, inputs) one a
    block, [outputs / block[0], inputs / block[1]] rounded up; float32, or float8_e8m0fnu.
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int] | None = None
    activation: Activation = "dynamic"

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        scales = self.scales.float()
        if self.block is None:
            return (self.values.float() * scales[:, None]).to(dtype)
        rows, columns = self.shape
        wide = scales.repeat_interleave(self.block[0], 0)[:rows].repeat_interleave(self.block[1], 1)[:, :columns]
        return (self.values.float() * wide).to(dtype)

    def part(self, part: Part) -> Self:
        values = part.narrow(self.values).contiguous()
        if self.block is None:
            return dataclasses.replace(
                self, values=values, scales=self.scales if part.dimension else part.narrow(self.scales)
            )
        size, whole = self.block[part.dimension], self.shape[part.dimension]
        if part.begin % size or (part.end % size and part.end != whole):
            raise PartError(
                f"{('outputs', 'inputs')[part.dimension]} {part.begin} to {part.end} cut a block of {size} that share "
                "a scale; use a smaller --tensor-parallel-size"
            )
        scales = Part(part.dimension, part.begin // size, -(-part.end // size)).narrow(self.scales).contiguous()
        return dataclasses.replace(self, values=values, scales=scales)

    def join(self, others: Sequence[QuantizedWeight]) -> Self | None:
        outputs = [self.shape[0], *(weight.shape[0] for weight in others[:-1])]
        if self.block is not None and any(size % self.block[0] for size in outputs):
            return None
        return _joined(self, others, ("values", "scales"))


def within(block: Sequence[int], shape: tuple[int, int]) -> tuple[int, int]:
    """``block`` cut down to a weight of ``shape``: the scales mean the same."""
    return min(block[0], shape[0]), min(block[1], shape[1])


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Quantize ``weight`` [outputs, inputs] to integers of -127 to 127, with a scale for each output."""
    wide = weight.float()
    scales = wide.abs().amax(1).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
    return Int8Weight((wide / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales)


def quantize_fp8(weight: Tensor) -> Fp8Weight:
    """Quantize ``weight`` [outputs, inputs] to e4m3, with a scale for each output."""
    wide = weight.float()
    scales = wide.abs().amax(1).div_(FP8_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
    held = (wide / scales[:, None]).clamp_(-FP8_MAX, FP8_MAX)
    host = held.cpu() if held.device.type == "npu" else held  # which has no cast to it
    return Fp8Weight(host.to(torch.float8_e4m3fn).to(held.device), scales)


def _tensors(weight: QuantizedWeight | StaticActivation) -> list[Tensor]:
    result: list[Tensor] = []
    for field in dataclasses.fields(weight):
        value = getattr(weight, field.name)
        if isinstance(value, Tensor):
            result.append(value)
        elif isinstance(value, StaticActivation):
            result.extend(_tensors(value))
    return result


def _mapped(weight: _T, call: Callable[[Tensor], Tensor]) -> _T:
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(weight):
        value = getattr(weight, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = call(value)
        elif isinstance(value, StaticActivation):
            changed[field.name] = _mapped(value, call)
    return dataclasses.replace(weight, **changed)


def _joined(first: _W, others: Sequence[QuantizedWeight], along: Sequence[str]) -> _W | None:
    """A weight with the fields ``along`` concatenated; None unless all other fields are equal."""
    for other in others:
        if type(other) is not type(first):
            return None
        for field in dataclasses.fields(first):
            one, two = getattr(first, field.name), getattr(other, field.name)
            if field.name in along:
                if (one is None) != (two is None) or (one is not None and one.dtype != two.dtype):
                    return None
            elif not _same(one, two):
                return None
    joined: dict[str, Any] = {}
    for name in along:
        if getattr(first, name) is not None:
            joined[name] = _cat([getattr(weight, name) for weight in (first, *others)])
    return dataclasses.replace(first, **joined)


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first dimension; 8-bit floats as bytes, since not every device concatenates them."""
    dtype = tensors[0].dtype
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(dtype)
    return torch.cat(list(tensors))


def _same(one: object, two: object) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return torch.equal(one, two)
    if isinstance(one, StaticActivation) and isinstance(two, StaticActivation):
        return _same(one.scale, two.scale) and _same(one.offset, two.offset)
    return type(one) is type(two) and one == two
