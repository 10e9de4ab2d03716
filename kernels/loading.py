"""Weights from a Hugging Face directory of safetensors, from a GGUF file, or made up for measurements.

A checkpoint's tensors are compared with what the model expects before anything is read, from the files' headers alone,
so that one error names everything that is wrong. Weights are then read one by one straight into their fused place, of a
tensor that is divided over several ranks only this rank's part. Where a scheme says that a projection is stored
quantized, its tensors take the place of the weight (kernels.quantization.scheme).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernels.dummy_weights import DummyWeights
from kernels.gguf.checkpoint import GgufCheckpoint
from kernels.gguf.header import is_gguf, read_header
from kernels.load_error import LoadError
from kernels.parallel.partition import Part
from kernels.quantization.gguf_weight import GgufWeight
from kernels.quantization.scheme import Files, Scheme, Shapes
from kernels.quantization.weights import PartError, Projection, QuantizedWeight
from kernels.safetensors_checkpoint import SafetensorsCheckpoint, expected_tensors

__all__ = ["WeightLoader", "open_weights", "read_tensor", "stored_shapes"]

_log = logging.getLogger("troupe.kernels")

Parts = Mapping[str, Part]
_ROUTERS = (".gate.weight", ".shared_expert_gate.weight")


class WeightLoader:
    """Hands out weights in the model's dtype and counts them: ``parameters`` of the whole model, ``weight_bytes`` here.

    ``shapes``: of the whole tensors. ``parts``: which part of them is wanted. ``progress``: fraction of the tensors
    taken.
    """

    def __init__(
        self,
        fill: Callable[[str, Tensor, Part | None], None],
        shapes: Shapes,
        parts: Parts,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None],
        scheme: Scheme | None = None,
        files: Files | None = None,
    ) -> None:
        self._fill = fill
        self._shapes = shapes
        self._parts = parts
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._scheme = scheme
        self._files = files
        self._taken = 0
        self._told = False
        self.parameters = 0
        self.weight_bytes = 0

    def take(self, names: Sequence[str]) -> Tensor:
        """A new tensor of the named ones, one after the other along their first dimension."""
        wholes = [self._shapes[name] for name in names]
        parts = [self._parts.get(name) for name in names]
        shapes = [whole if part is None else part.shape(whole) for whole, part in zip(wholes, parts, strict=True)]
        rows = [shape[0] for shape in shapes]
        weight = torch.empty((sum(rows), *shapes[0][1:]), dtype=self._dtype, device=self._device)
        for name, target, part in zip(names, weight.split(rows), parts, strict=True):
            self._fill(name, target, part)
            if len(target.shape) == 1 or name.endswith(_ROUTERS):  # small: a look at all weights would take seconds
                _check_finite(name, target)
        self.parameters += sum(map(math.prod, wholes))
        self.weight_bytes += weight.nbytes
        self._took(len(names))
        return weight

    def projection(self, modules: Sequence[str]) -> Projection:
        """The weights of the named modules, one after the other along their outputs; quantized where the scheme says.

        ``parameters`` counts them as if they were not, ``weight_bytes`` as they are. Raises LoadError.
        """
        if self._scheme is None:
            return self.take([f"{module}.weight" for module in modules])
        found = [self._one(module, self._scheme) for module in modules]
        first, others = found[0], found[1:]
        if all(isinstance(weight, Tensor) for weight in found):
            return torch.cat([weight for weight in found if isinstance(weight, Tensor)]) if others else first
        if isinstance(first, QuantizedWeight) and others:
            rest = [weight for weight in others if isinstance(weight, QuantizedWeight)]
            whole = first.join(rest) if len(rest) == len(others) else None
            if whole is None:
                return tuple(found)
            self.weight_bytes += whole.nbytes - sum(weight.nbytes for weight in found)  # an order is kept once
            return whole
        return tuple(found) if others else first

    def table(self, module: str) -> Tensor | QuantizedWeight:
        """The weight of ``module``, of which rows are looked up; quantized where the scheme keeps it so."""
        if self._scheme is None or not self._scheme.keeps_table(module):
            return self.take([f"{module}.weight"])
        return self._one(module, self._scheme)

    def biases(self, modules: Sequence[str]) -> Tensor | None:
        """The biases of the named modules, one after the other, zeros for one that has none; None: none has."""
        if not any(f"{module}.bias" in self._shapes for module in modules):
            return None
        return torch.cat([self._bias(module) for module in modules])

    def _bias(self, module: str) -> Tensor:
        if f"{module}.bias" in self._shapes:
            return self.take([f"{module}.bias"])
        name = f"{module}.weight"
        whole, part = self._shapes[name], self._parts.get(name)
        rows = (whole if part is None else part.shape(whole))[0]
        return torch.zeros(rows, dtype=self._dtype, device=self._device)

    def _one(self, module: str, scheme: Scheme) -> Tensor | QuantizedWeight:
        name = f"{module}.weight"
        shape, part = self._shapes[name], self._parts.get(name)
        assert self._files is not None
        try:
            if scheme.tensors(module, (shape[0], shape[1])) is None:
                floats = self.take([name])
                converted = scheme.convert(module, floats)
                if converted is None:
                    return floats
                self.weight_bytes += converted.nbytes - floats.nbytes
                return self._ready(converted)
            whole = scheme.read(_Finite(self._files), module, (shape[0], shape[1]))
            try:
                weight = self._ready(whole if part is None else whole.part(part))
            except PartError as error:
                if not isinstance(whole, GgufWeight) or part is None:
                    raise
                self._tell_once(module, error)
                floats = part.of(whole.dequantize(self._dtype)).contiguous().to(self._device)
                self._count(math.prod(shape), floats.nbytes)
                return floats
        except PartError as error:
            raise LoadError(f"{module} ({scheme.name}) cannot be divided over the ranks: {error}") from error
        self._count(math.prod(shape), weight.nbytes)
        return weight

    def _tell_once(self, module: str, error: PartError) -> None:
        if not self._told:
            self._told = True
            _log.warning("%s, and others like it, are dequantized while they are loaded: %s", module, error)

    def _count(self, parameters: int, bytes_: int) -> None:
        self.parameters += parameters
        self.weight_bytes += bytes_
        self._took(1)

    def _ready(self, weight: QuantizedWeight) -> QuantizedWeight:
        return dataclasses.replace(weight.to(self._device), dtype=self._dtype)

    def _took(self, count: int) -> None:
        self._taken += count
        self._progress(self._taken / len(self._shapes))


def _check_finite(name: str, floats: Tensor) -> None:
    """Raises LoadError."""
    if not bool(floats.isfinite().all()):
        raise LoadError(
            f"{name} has numbers that are not finite (NaN or infinite) in {str(floats.dtype).removeprefix('torch.')}: "
            "the checkpoint is broken, or of numbers too large for this --dtype; download it again, or use another"
        )


class _Finite:
    """The tensors of ``files``, whose scales must be finite."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def has(self, name: str) -> bool:
        return self._files.has(name)

    def read(self, name: str) -> Tensor:
        """Raises LoadError."""
        found = self._files.read(name)
        scales = found.is_floating_point() and found.dtype != torch.float8_e4m3fn
        if scales and not bool(found.float().isfinite().all()):
            raise LoadError(
                f"{name} has scales that are not finite (NaN or infinite): the checkpoint is broken; download it "
                "again, or quantize the model anew"
            )
        return found


def open_weights(
    model_path: str,
    load_format: str,
    shapes: Shapes,
    parts: Parts,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    progress: Callable[[float], None],
    scheme: Scheme | None = None,
) -> WeightLoader:
    """A loader for ``load_format`` auto, safetensors, gguf or dummy. Raises LoadError, or GgufError.

    ``parts``: what is wanted of the tensors of ``shapes``; all of one that is not named. ``scheme``: of the
    checkpoint; None: all is in floats.
    """
    header = read_header(model_path) if is_gguf(model_path) else None
    if header is None and load_format == "gguf":
        raise LoadError(f"load format gguf is for one .gguf file, and {model_path} is a directory; give the file")
    if header is not None:
        if load_format not in ("auto", "gguf"):
            raise LoadError(f"{model_path} is a GGUF file, which load format {load_format} does not read; use auto")
        file = GgufCheckpoint(header)
        file.check(shapes, scheme)
        return WeightLoader(file.fill, shapes, parts, dtype, device, progress, scheme, file)
    if load_format == "dummy":
        dummy = DummyWeights(seed, shapes, expected_tensors(shapes, scheme))
        return WeightLoader(dummy.fill, shapes, parts, dtype, device, progress, scheme, dummy)
    if load_format not in ("auto", "safetensors"):
        raise LoadError(f"load format {load_format!r} is not supported; use auto, safetensors, gguf or dummy")
    checkpoint = SafetensorsCheckpoint(Path(model_path), shapes)
    checkpoint.check(shapes, scheme)
    return WeightLoader(checkpoint.fill, shapes, parts, dtype, device, progress, scheme, checkpoint)


def stored_shapes(model_path: str | Path) -> dict[str, tuple[int, ...]]:
    """Every tensor of a directory of safetensors or of a GGUF file, by name, from the headers alone. Raises LoadError,
    or GgufError."""
    if is_gguf(model_path):
        return GgufCheckpoint(read_header(model_path)).shapes()
    return SafetensorsCheckpoint(Path(model_path)).shapes()


def read_tensor(model_path: str | Path, name: str) -> Tensor:
    """One tensor of such a directory as it is stored, of such a file in float32, on the host. Raises LoadError, or
    GgufError."""
    if is_gguf(model_path):
        return GgufCheckpoint(read_header(model_path)).floats(name)
    return SafetensorsCheckpoint(Path(model_path)).read(name)
