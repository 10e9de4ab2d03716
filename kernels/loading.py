"""Weights from a Hugging Face directory of safetensors, from a GGUF file, or made up for measurements.

A checkpoint's tensors are compared with what the model expects before anything is read, from the files' headers alone,
so that one error names everything that is wrong. Weights are then read one by one straight into their fused place, of a
tensor that is divided over several ranks only this rank's part. Where a scheme says that a projection is stored
quantized, its tensors take the place of the weight (kernels.quantization.scheme).
Pickled checkpoints (``pytorch_model.bin``) are refused: unpickling runs code.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.fused_experts import Piece, pieces
from kernels.gguf.checkpoint import GgufCheckpoint
from kernels.gguf.header import is_gguf, read_header
from kernels.models.names import is_projection
from kernels.parallel.partition import Part
from kernels.quantization.gguf_weight import GgufWeight
from kernels.quantization.scheme import Files, Scheme, Shapes, Stored
from kernels.quantization.weights import PartError, Projection, QuantizedWeight

__all__ = ["LoadError", "WeightLoader", "open_weights", "read_tensor", "stored_shapes"]

_log = logging.getLogger("troupe.kernels")

FLOATS = ("F16", "BF16", "F32", "F64")

DTYPES = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Those that are read, by their names in safetensors."""


class LoadError(RuntimeError):
    """The weights cannot be loaded; the message says what to do."""


Parts = Mapping[str, Part]


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
    extra_config: str,
    shapes: Shapes,
    parts: Parts,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    progress: Callable[[float], None],
    scheme: Scheme | None = None,
) -> WeightLoader:
    """A loader for ``load_format`` auto, safetensors, gguf or dummy. Raises LoadError, or GgufError.

    ``parts``: what is wanted of the tensors of ``shapes``; all of one that is not named. ``extra_config``: a JSON
    object of options for the loader; there are none yet. ``scheme``: of the checkpoint; None: all is in floats.
    """
    try:
        options = json.loads(extra_config or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise LoadError(f"the loader's extra config must be a JSON object, and is {extra_config!r}")
    if options:
        raise LoadError(f"the loader takes no option {', '.join(map(repr, options))}; leave its extra config empty")
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
        dummy = _Dummy(seed, shapes, _expected(shapes, scheme))
        return WeightLoader(dummy.fill, shapes, parts, dtype, device, progress, scheme, dummy)
    if load_format not in ("auto", "safetensors"):
        raise LoadError(f"load format {load_format!r} is not supported; use auto, safetensors, gguf or dummy")
    checkpoint = _Checkpoint(Path(model_path))
    checkpoint.check(shapes, scheme)
    return WeightLoader(checkpoint.fill, shapes, parts, dtype, device, progress, scheme, checkpoint)


def stored_shapes(model_path: str | Path) -> dict[str, tuple[int, ...]]:
    """Every tensor of a directory of safetensors or of a GGUF file, by name, from the headers alone. Raises LoadError,
    or GgufError."""
    if is_gguf(model_path):
        return GgufCheckpoint(read_header(model_path)).shapes()
    return _Checkpoint(Path(model_path)).shapes()


def read_tensor(model_path: str | Path, name: str) -> Tensor:
    """One tensor of such a directory as it is stored, of such a file in float32, on the host. Raises LoadError, or
    GgufError."""
    if is_gguf(model_path):
        return GgufCheckpoint(read_header(model_path)).floats(name)
    return _Checkpoint(Path(model_path)).read(name)


def _expected(shapes: Shapes, scheme: Scheme | None) -> dict[str, Stored]:
    """What files of ``scheme`` must hold for a model of ``shapes``."""
    found: dict[str, Stored] = {}
    for name, shape in shapes.items():
        stored = None
        if scheme is not None and is_projection(name) and len(shape) == 2:
            stored = scheme.tensors(name.removesuffix(".weight"), (shape[0], shape[1]))
        found.update({name: Stored(FLOATS, (shape,))} if stored is None else stored)
    return found


class _Dummy:
    """Weights from a seed and each tensor's name: the same whatever the order. Norms are ones, biases zeros."""

    def __init__(self, seed: int, shapes: Shapes, stored: Mapping[str, Stored]) -> None:
        self._seed = seed
        self._shapes = shapes
        self._stored = stored

    def has(self, name: str) -> bool:
        return name in self._stored and not self._stored[name].optional

    def read(self, name: str) -> Tensor:
        """Of a quantized projection: any whole numbers, and scales that are small."""
        stored = self._stored[name]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        shape, dtype = stored.shapes[0], DTYPES[stored.dtypes[0]]
        if dtype.is_floating_point and dtype.itemsize > 1:
            return torch.rand(shape, generator=generator).mul_(1e-3).add_(1e-3).to(dtype)
        whole = torch.randint(0, 112, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
        return whole.view(dtype)

    def fill(self, name: str, target: Tensor, part: Part | None) -> None:
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        elif name.endswith(".bias"):
            target.zero_()
        else:
            seed = zlib.crc32(f"{self._seed} {name}".encode())  # the CPU's generator takes 32 bits of a seed
            generator = torch.Generator(target.device).manual_seed(seed)
            whole = target if part is None else target.new_empty(self._shapes[name])
            whole.normal_(0.0, 0.02, generator=generator)
            if part is not None:
                target.copy_(part.of(whole))


class _Checkpoint:
    """The safetensors files of one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, safe_open] = {}
        self._file_of = self._read_names()
        self._pieces: dict[str, Piece] = {}
        for name in [name for name in self._file_of if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
            held = pieces(name, tuple(self._open(self._file_of[name]).get_slice(name).get_shape()))
            self._pieces.update(held)
            if held:
                self._file_of.update(dict.fromkeys(held, self._file_of.pop(name)))

    def _read_names(self) -> dict[str, Path]:
        single, index = self._directory / "model.safetensors", self._directory / "model.safetensors.index.json"
        if single.is_file():
            return dict.fromkeys(self._open(single).keys(), single)
        if not index.is_file():
            raise LoadError(self._nothing_to_load())
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = {str(name): str(file) for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoadError(f"{index} cannot be read ({error!r}); download the checkpoint again") from error
        for file in sorted(set(names.values())):
            if Path(file).name != file:
                raise LoadError(f"{index} names a file outside its directory: {file!r}")
            if not (self._directory / file).is_file():
                raise LoadError(f"{self._directory / file} is missing; download the checkpoint again")
        held = {file: set(self._open(self._directory / file).keys()) for file in set(names.values())}
        # A tensor the index promises but its file lacks counts as missing.
        return {name: self._directory / file for name, file in names.items() if name in held[file]}

    def _nothing_to_load(self) -> str:
        if not self._directory.is_dir():
            return f"{self._directory} is not a directory; give the directory of a Hugging Face checkpoint"
        if list(self._directory.glob("*.bin")) or list(self._directory.glob("*.pth")):
            return (
                f"{self._directory} holds pickled weights only, which are not loaded because they can run code; "
                "convert them to safetensors (transformers: from_pretrained, then save_pretrained)"
            )
        return (
            f"{self._directory} has neither model.safetensors nor model.safetensors.index.json; download the weights, "
            "or start with --load-format dummy for made-up ones"
        )

    def _open(self, path: Path) -> safe_open:
        if path.name not in self._files:
            try:
                self._files[path.name] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise LoadError(f"{path} is not a whole safetensors file ({error}); download it again") from error
        return self._files[path.name]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._header(name)[0] for name in self._file_of}

    def _header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype."""
        piece = self._pieces.get(name)
        found = self._open(self._file_of[name]).get_slice(name if piece is None else piece.stored)
        return tuple(found.get_shape()) if piece is None else piece.shape, found.get_dtype()

    def _part(self, name: str, part: Part | None) -> Tensor:
        file, piece = self._open(self._file_of[name]), self._pieces.get(name)
        found: Tensor
        if piece is not None:
            found = file.get_slice(piece.stored)[piece.index(part)][0]
        else:
            found = file.get_tensor(name) if part is None else file.get_slice(name)[part.index]
        return found

    def read(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise LoadError(f"the weights in {self._directory} have no tensor {name}; download the checkpoint again")
        try:
            return self._part(name, None)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{self._file_of[name]}: {name} cannot be read ({error}); download it again") from error

    def has(self, name: str) -> bool:
        return name in self._file_of

    def check(self, shapes: Shapes, scheme: Scheme | None = None) -> None:
        """Compare with what the model, and its scheme, expect."""
        expected = _expected(shapes, scheme)
        says = "config.json asks" if scheme is None else f"config.json ({scheme.name}) asks"
        wrong = [f"{name} is missing" for name in expected if not self.has(name) and not expected[name].optional]
        for name, stored in expected.items():
            if self.has(name):
                shape, dtype = self._header(name)
                if shape not in stored.shapes:
                    wanted = " or ".join(str(list(each)) for each in stored.shapes)
                    wrong.append(f"{name} has shape {list(shape)}, {says} for {wanted}")
                elif dtype not in stored.dtypes:
                    wrong.append(f"{name} is stored as {dtype}, not as one of {', '.join(stored.dtypes)}")
        layers = {name.split(".")[2] for name in shapes if name.startswith("model.layers.")}
        for name in self._file_of:
            parts = name.split(".")
            if (
                name.startswith("model.layers.")
                and parts[2] in layers
                and name not in expected
                and parts[-1] != "inv_freq"
                and not (scheme is not None and scheme.ignores(name, shapes))
            ):
                wrong.append(f"{name} is in the checkpoint and not in the model")
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise LoadError(
                f"the weights in {self._directory} do not fit its config.json: {'; '.join(wrong[:8])}{more}. "
                "Check that both come from one model and that the download is whole"
            )

    def fill(self, name: str, target: Tensor, part: Part | None) -> None:
        try:
            target.copy_(self._part(name, part))
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{self._file_of[name]}: {name} cannot be read ({error}); download it again") from error
