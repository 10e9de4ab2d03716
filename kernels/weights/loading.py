"""Loads weights from a Hugging Face directory of safetensors or from a GGUF file, or makes dummy weights.

The headers of the files are compared with the model's tensors before any weight is read, so that one error names every
problem. Weights are then read one by one into their place in the fused tensors. A rank reads only its part of a divided
tensor. Where a scheme stores a projection quantized, the scheme's tensors replace the weight
(kernels.weights.quantization.scheme).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kernels.contract.errors import LoadError
from kernels.weights.dummy import DummyWeights
from kernels.weights.gguf.checkpoint import GgufCheckpoint
from kernels.weights.gguf.header import is_gguf, read_header
from kernels.weights.quantization.gguf_weight import GgufWeight
from kernels.weights.quantization.scheme import Files, Scheme
from kernels.weights.quantization.weights import PartError, Projection, QuantizedWeight
from kernels.weights.safetensors_checkpoint import SafetensorsCheckpoint, expected_tensors
from kernels.weights.tensors import Part, Role, Shard, Tensors, TensorSpec

__all__ = ["CheckpointFiles", "Placement", "WeightLoader", "open_weights", "read_tensor", "stored_shapes"]

_DTYPES = {
    Role.WIDE: torch.float32,
    Role.NIBBLES: torch.uint8,
    Role.EXPONENTS: torch.uint8,
    Role.INDICES: torch.int64,
}
_log = logging.getLogger("troupe.kernels")


@dataclass(frozen=True)
class CheckpointFiles:
    """Where weights come from. ``load_format``: auto, safetensors, gguf or dummy; ``seed``: for dummy weights."""

    path: str
    load_format: str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class Placement:
    """Where weights go: the dtype of float weights, the device, and the rank whose parts are read."""

    dtype: torch.dtype
    device: torch.device
    shard: Shard = field(default_factory=Shard)


class WeightFiles(Files, Protocol):
    """The tensors of a checkpoint, which can be read in parts."""

    def fill(self, name: str, target: Tensor, part: Part | None) -> None:
        """Write a part of a tensor, or all of it, to ``target`` in its dtype. Raises LoadError."""
        ...


class WeightLoader:
    """Returns weights in the model's dtype and counts them: ``parameters`` of the whole model, ``weight_bytes`` here.

    ``tensors``: what the model declares. ``progress`` is called with the fraction of the tensors taken.
    """

    def __init__(
        self,
        files: WeightFiles,
        tensors: Tensors,
        placement: Placement,
        progress: Callable[[float], None],
        scheme: Scheme | None = None,
    ) -> None:
        self._files = files
        self._tensors = tensors
        self._shard = placement.shard
        self._dtype, self._device = placement.dtype, placement.device
        self._progress = progress
        self._scheme = scheme
        self._taken = 0
        self._logged = False
        self.parameters = 0
        self.weight_bytes = 0

    def add(self, parameters: int, weight_bytes: int) -> None:
        """Count weights that were loaded elsewhere."""
        self.parameters += parameters
        self.weight_bytes += weight_bytes

    def take(self, names: Sequence[str]) -> Tensor:
        """A new tensor of the named ones, concatenated along their first dimension."""
        specs = [self._tensors[name] for name in names]
        shapes = [self._local_shape(spec) for spec in specs]
        rows = [shape[0] for shape in shapes]
        dtype = _DTYPES.get(specs[0].role, self._dtype)
        weight = torch.empty((sum(rows), *shapes[0][1:]), dtype=dtype, device=self._device)
        for spec, target in zip(specs, weight.split(rows), strict=True):
            self._fill(spec, target)
            if len(target.shape) == 1 or spec.role is Role.ROUTER:  # small: to check all weights would take seconds
                _check_finite(spec.name, target)
        self.parameters += sum(spec.parameters * self._alike(spec) for spec in specs)
        self.weight_bytes += weight.nbytes
        self._advance(sum(map(self._alike, specs)))
        return weight

    def projection(self, modules: Sequence[str]) -> Projection:
        """The weights of the named modules, concatenated along outputs, and quantized where the scheme says so.

        ``parameters`` counts the unquantized weights, ``weight_bytes`` the stored ones. Raises LoadError.
        """
        if self._scheme is None:
            return self.take([f"{module}.weight" for module in modules])
        result = [self._one(module, self._scheme) for module in modules]
        first, others = result[0], result[1:]
        if all(isinstance(weight, Tensor) for weight in result):
            return torch.cat([weight for weight in result if isinstance(weight, Tensor)]) if others else first
        if isinstance(first, QuantizedWeight) and others:
            rest = [weight for weight in others if isinstance(weight, QuantizedWeight)]
            whole = first.join(rest) if len(rest) == len(others) else None
            if whole is None:
                return tuple(result)
            self.weight_bytes += whole.nbytes - sum(weight.nbytes for weight in result)  # they share one ``order``
            return whole
        return tuple(result) if others else first

    def table(self, module: str) -> Tensor | QuantizedWeight:
        """The embedding table of ``module``; quantized where the scheme keeps it so."""
        name = f"{module}.weight"
        if self._scheme is None or not self._scheme.keeps_table(self._tensors[name]):
            return self.take([name])
        return self._one(module, self._scheme)

    def _alike(self, spec: TensorSpec) -> int:
        """How many tensors of the model it stands for: other ranks take as many experts as this one."""
        return self._shard.ep_size if spec.is_placed else 1

    def _local_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """The shape of this rank's part."""
        parts = spec.parts(self._shard)
        if not parts:
            return spec.shape
        dimension = parts[0].dimension
        return Part(dimension, 0, sum(part.end - part.begin for part in parts)).shape(spec.shape)

    def _fill(self, spec: TensorSpec, target: Tensor) -> None:
        """Write this rank's part of a tensor to ``target``."""
        parts = spec.parts(self._shard)
        if not parts:
            self._files.fill(spec.name, target, None)
            return
        sizes = [part.end - part.begin for part in parts]
        for part, section in zip(parts, target.split(sizes, parts[0].dimension), strict=True):
            self._files.fill(spec.name, section, part)

    def biases(self, modules: Sequence[str]) -> Tensor | None:
        """The biases of the named modules, concatenated, with zeros for a module without one; None: none has one."""
        if not any(f"{module}.bias" in self._tensors for module in modules):
            return None
        return torch.cat([self._bias(module) for module in modules])

    def _bias(self, module: str) -> Tensor:
        if f"{module}.bias" in self._tensors:
            return self.take([f"{module}.bias"])
        rows = self._local_shape(self._tensors[f"{module}.weight"])[0]
        return torch.zeros(rows, dtype=self._dtype, device=self._device)

    def _one(self, module: str, scheme: Scheme) -> Tensor | QuantizedWeight:
        spec = self._tensors[f"{module}.weight"]
        parts = spec.parts(self._shard)
        try:
            if (not spec.quantizable and spec.role is not Role.EMBEDDING) or scheme.tensors(spec) is None:
                floats = self.take([spec.name])
                converted = scheme.convert(spec, floats) if spec.quantizable else None
                if converted is None:
                    return floats
                self.weight_bytes += converted.nbytes - floats.nbytes
                return self._ready(converted)
            whole = scheme.read(_Finite(self._files), spec)
            if isinstance(whole, Tensor):
                return self._dense(spec, whole.to(self._dtype), parts)
            try:
                weight = self._ready(_parts_of(whole, parts))
            except PartError as error:
                if not isinstance(whole, GgufWeight):
                    raise
                self._tell_once(module, error)
                return self._dense(spec, whole.dequantize(self._dtype), parts)
        except PartError as error:
            raise LoadError(f"{module} ({scheme.name}) cannot be divided over the ranks: {error}") from error
        self._count(spec, weight.nbytes)
        return weight

    def _dense(self, spec: TensorSpec, whole: Tensor, parts: Sequence[Part]) -> Tensor:
        """This rank's part of a weight that is dequantized."""
        if parts:
            whole = torch.cat([part.narrow(whole) for part in parts], parts[0].dimension)
        floats = whole.to(self._device)
        self._count(spec, floats.nbytes)
        return floats

    def _tell_once(self, module: str, error: PartError) -> None:
        if not self._logged:
            self._logged = True
            _log.warning("%s, and others like it, are dequantized while they are loaded: %s", module, error)

    def _count(self, spec: TensorSpec, bytes_: int) -> None:
        self.parameters += math.prod(spec.shape) * self._alike(spec)
        self.weight_bytes += bytes_
        self._advance(self._alike(spec))

    def _ready(self, weight: QuantizedWeight) -> QuantizedWeight:
        return dataclasses.replace(weight.to(self._device), dtype=self._dtype)

    def _advance(self, count: int) -> None:
        self._taken += count
        self._progress(min(1.0, self._taken / len(self._tensors)))


def _parts_of(whole: QuantizedWeight, parts: Sequence[Part]) -> QuantizedWeight:
    """The ``parts`` of a weight, concatenated; the whole weight if there are none. Raises PartError."""
    if not parts:
        return whole
    first, *others = (whole.part(part) for part in parts)
    joined = first.join(others) if others else first
    if joined is None:
        raise PartError("its fused sections cannot be cut and joined again")
    return joined


def _check_finite(name: str, floats: Tensor) -> None:
    """Raises LoadError if a number is not finite."""
    if not bool(floats.isfinite().all()):
        raise LoadError(
            f"{name} has numbers that are not finite (NaN or infinite) in {str(floats.dtype).removeprefix('torch.')}: "
            "the checkpoint is broken, or of numbers too large for this --dtype; download it again, or use another"
        )


class _Finite:
    """The tensors of ``files``, checked: scales must be finite."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def has(self, name: str) -> bool:
        return self._files.has(name)

    def read(self, name: str) -> Tensor:
        """Raises LoadError."""
        result = self._files.read(name)
        scales = result.is_floating_point() and result.dtype != torch.float8_e4m3fn
        if scales and not bool(result.float().isfinite().all()):
            raise LoadError(
                f"{name} has scales that are not finite (NaN or infinite): the checkpoint is broken; download it "
                "again, or quantize the model anew"
            )
        return result


def open_weights(
    files: CheckpointFiles,
    tensors: Tensors,
    placement: Placement,
    scheme: Scheme | None = None,
    progress: Callable[[float], None] = lambda fraction: None,
) -> WeightLoader:
    """A loader of the ``tensors`` that a model declares. Raises LoadError, or GgufError.

    ``scheme``: the checkpoint's; None: all weights are in floats.
    """
    model_path, load_format = files.path, files.load_format
    header = read_header(model_path) if is_gguf(model_path) else None
    if header is None and load_format == "gguf":
        raise LoadError(f"load format gguf is for one .gguf file, and {model_path} is a directory; give the file")
    if header is not None:
        if load_format not in ("auto", "gguf"):
            raise LoadError(f"{model_path} is a GGUF file, which load format {load_format} does not read; use auto")
        file = GgufCheckpoint(header, tensors)
        file.check(scheme)
        return WeightLoader(file, tensors, placement, progress, scheme)
    if load_format == "dummy":
        dummy = DummyWeights(files.seed, tensors, expected_tensors(tensors, scheme))
        return WeightLoader(dummy, tensors, placement, progress, scheme)
    if load_format not in ("auto", "safetensors"):
        raise LoadError(f"load format {load_format!r} is not supported; use auto, safetensors, gguf or dummy")
    checkpoint = SafetensorsCheckpoint(Path(model_path), tensors)
    scheme = None if scheme is None else checkpoint.as_stored(scheme)
    checkpoint.check(scheme)
    return WeightLoader(checkpoint, tensors, placement, progress, scheme)


def stored_shapes(model_path: str | Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a directory of safetensors or of a GGUF file, by its stored name. Reads headers
    only. Raises LoadError, or GgufError."""
    if is_gguf(model_path):
        return {name: info.shape for name, info in read_header(model_path).tensors.items()}
    return SafetensorsCheckpoint(Path(model_path)).shapes()


def read_tensor(model_path: str | Path, name: str) -> Tensor:
    """One tensor of a directory of safetensors as stored, on the host. Raises LoadError."""
    return SafetensorsCheckpoint(Path(model_path)).read(name)
