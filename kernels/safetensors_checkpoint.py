"""The safetensors files of a Hugging Face directory.

Pickled checkpoints (``pytorch_model.bin``) are refused: unpickling runs code.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.fused_experts import MIXTRAL, Piece, mixtral_name, pieces
from kernels.load_error import LoadError
from kernels.models.names import is_projection
from kernels.parallel.partition import Part
from kernels.quantization.scheme import Scheme, Shapes, Stored

__all__ = ["SafetensorsCheckpoint", "expected_tensors"]

_STACKED = (".experts.gate_up_proj", ".experts.down_proj")
_FLOATS = ("F16", "BF16", "F32", "F64")


def expected_tensors(shapes: Shapes, scheme: Scheme | None) -> dict[str, Stored]:
    """What files of ``scheme`` must hold for a model of ``shapes``."""
    found: dict[str, Stored] = {}
    for name, shape in shapes.items():
        stored = None
        if scheme is not None and is_projection(name) and len(shape) == 2:
            stored = scheme.tensors(name.removesuffix(".weight"), (shape[0], shape[1]))
        found.update({name: Stored(_FLOATS, (shape,))} if stored is None else stored)
    return found


class SafetensorsCheckpoint:
    """The safetensors files of one directory. ``wanted``: names by which a model knows its tensors."""

    def __init__(self, directory: Path, wanted: Collection[str] = ()) -> None:
        self._directory = directory
        self._files: dict[str, safe_open] = {}
        self._file_of = self._read_names()
        self._pieces: dict[str, Piece] = {}
        self._renamed: dict[str, str] = {}
        mixtral = any(f".{MIXTRAL}." in name for name in wanted)
        for name in [name for name in self._file_of if name.endswith(_STACKED)]:
            held = pieces(name, tuple(self._open(self._file_of[name]).get_slice(name).get_shape()), mixtral)
            self._pieces.update(held)
            if held and mixtral:
                router = f"{name.rpartition('.experts.')[0]}.gate.weight"
                if router in self._file_of:
                    self._renamed[mixtral_name(router)] = router
                    self._file_of[mixtral_name(router)] = self._file_of.pop(router)
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
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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

    def _stored(self, name: str) -> str:
        return self._renamed.get(name, name)

    def _header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype."""
        piece = self._pieces.get(name)
        found = self._open(self._file_of[name]).get_slice(self._stored(name) if piece is None else piece.stored)
        return tuple(found.get_shape()) if piece is None else piece.shape, found.get_dtype()

    def _part(self, name: str, part: Part | None) -> Tensor:
        file, piece = self._open(self._file_of[name]), self._pieces.get(name)
        found: Tensor
        if piece is not None:
            found = file.get_slice(piece.stored)[piece.index(part)][0]
        else:
            stored = self._stored(name)
            found = file.get_tensor(stored) if part is None else file.get_slice(stored)[part.index]
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
        expected = expected_tensors(shapes, scheme)
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
                if name.endswith(_STACKED):  # told first: every expert that it should hold is missing
                    wrong.insert(0, f"{name} has shape {list(self._header(name)[0])}, which is none of experts")
                else:
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
