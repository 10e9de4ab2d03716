"""Weights from a Hugging Face directory of safetensors, or made up for measurements.

A checkpoint's tensors are compared with what the model expects before anything is read, from the files' headers alone,
so that one error names everything that is wrong. Weights are then read one by one straight into their fused place, of a
tensor that is divided over several ranks only this rank's part.
Pickled checkpoints (``pytorch_model.bin``) are refused: unpickling runs code.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.parallel.partition import Part

__all__ = ["LoadError", "WeightLoader", "open_weights", "read_tensor", "stored_shapes"]

FLOATS = ("F16", "BF16", "F32", "F64")

Shapes = Mapping[str, tuple[int, ...]]


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
    ) -> None:
        self._fill = fill
        self._shapes = shapes
        self._parts = parts
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._taken = 0
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
        self._taken += len(names)
        self._progress(self._taken / len(self._shapes))
        return weight


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
) -> WeightLoader:
    """A loader for ``load_format`` auto, safetensors or dummy. Raises LoadError.

    ``parts``: what is wanted of the tensors of ``shapes``; all of one that is not named. ``extra_config``: a JSON
    object of options for the loader; there are none yet.
    """
    try:
        options = json.loads(extra_config or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise LoadError(f"the loader's extra config must be a JSON object, and is {extra_config!r}")
    if options:
        raise LoadError(f"the loader takes no option {', '.join(map(repr, options))}; leave its extra config empty")
    if load_format == "dummy":
        return WeightLoader(_Dummy(seed, shapes).fill, shapes, parts, dtype, device, progress)
    if load_format not in ("auto", "safetensors"):
        raise LoadError(f"load format {load_format!r} is not supported; use auto, safetensors or dummy")
    checkpoint = _Checkpoint(Path(model_path))
    checkpoint.check(shapes)
    return WeightLoader(checkpoint.fill, shapes, parts, dtype, device, progress)


def stored_shapes(model_path: str | Path) -> dict[str, tuple[int, ...]]:
    """Every tensor of a directory of safetensors, by name, from the files' headers alone. Raises LoadError."""
    return _Checkpoint(Path(model_path)).shapes()


def read_tensor(model_path: str | Path, name: str) -> Tensor:
    """One tensor of such a directory as it is stored, on the host. Raises LoadError."""
    return _Checkpoint(Path(model_path)).read(name)


class _Dummy:
    """Weights from a seed and each tensor's name: the same whatever the order. Norms are ones, biases zeros."""

    def __init__(self, seed: int, shapes: Shapes) -> None:
        self._seed = seed
        self._shapes = shapes

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
        return {name: tuple(self._open(path).get_slice(name).get_shape()) for name, path in self._file_of.items()}

    def read(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise LoadError(f"the weights in {self._directory} have no tensor {name}; download the checkpoint again")
        try:
            found: Tensor = self._open(self._file_of[name]).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{self._file_of[name]}: {name} cannot be read ({error}); download it again") from error
        return found

    def check(self, shapes: Shapes) -> None:
        """Compare with what the model expects."""
        wrong = [f"{name} is missing" for name in shapes if name not in self._file_of]
        for name, shape in shapes.items():
            if name in self._file_of:
                header = self._open(self._file_of[name]).get_slice(name)
                if (stored := tuple(header.get_shape())) != shape:
                    wrong.append(f"{name} has shape {list(stored)}, config.json asks for {list(shape)}")
                elif header.get_dtype() not in FLOATS:
                    wrong.append(f"{name} is stored as {header.get_dtype()}, not as one of {', '.join(FLOATS)}")
        layers = {name.split(".")[2] for name in shapes if name.startswith("model.layers.")}
        for name in self._file_of:
            parts = name.split(".")
            if (
                name.startswith("model.layers.")
                and parts[2] in layers
                and name not in shapes
                and parts[-1] != "inv_freq"
            ):
                wrong.append(f"{name} is in the checkpoint and not in the model")
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise LoadError(
                f"the weights in {self._directory} do not fit its config.json: {'; '.join(wrong[:8])}{more}. "
                "Check that both come from one model and that the download is whole"
            )

    def fill(self, name: str, target: Tensor, part: Part | None) -> None:
        file = self._open(self._file_of[name])
        try:
            target.copy_(file.get_tensor(name) if part is None else file.get_slice(name)[part.index])
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{self._file_of[name]}: {name} cannot be read ({error}); download it again") from error
