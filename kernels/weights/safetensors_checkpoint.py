"""The safetensors files of a Hugging Face directory.

Pickled checkpoints (``pytorch_model.bin``) are refused: unpickling runs code.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.contract.errors import LoadError
from kernels.contract.limits import MAX_EXPERTS
from kernels.weights.quantization.scheme import AsStored, Scheme, StoredTensor
from kernels.weights.tensors import Part, Role, StackedExpert, Tensors, TensorSpec
from kernels.weights.wrapped import is_adapter, plain_name

__all__ = ["SafetensorsCheckpoint", "expected_tensors"]

_RANK = re.compile(r".*-TP-(\d{3}|common)\.safetensors")
_FLOATS = ("F16", "BF16", "F32", "F64")
_STORED = {Role.NIBBLES: ("U8",), Role.EXPONENTS: ("U8",), Role.INDICES: ("I64", "I32")}


def expected_tensors(tensors: Tensors, scheme: Scheme | None) -> dict[str, StoredTensor]:
    """The tensors that files of ``scheme`` must store for a model of ``tensors``."""
    result: dict[str, StoredTensor] = {}
    for name, spec in tensors.items():
        stored = scheme.tensors(spec) if scheme is not None and spec.quantizable else None
        dtypes = _STORED.get(spec.role, _FLOATS)
        result.update({name: StoredTensor(dtypes, (spec.shape,))} if stored is None else stored)
    return result


@dataclass(frozen=True)
class _Expert:
    """Rows ``begin`` to ``end`` of one expert in the stacked tensor ``stored``, which has ``columns``; -1: it has one
    number for each expert. ``turned``: the file has columns before rows."""

    stored: str
    expert: int
    begin: int
    end: int
    columns: int
    turned: bool = False

    @staticmethod
    def find(stacked: StackedExpert, shape: tuple[int, ...], own: tuple[int, ...]) -> _Expert | None:
        """The place of an expert of shape ``own`` in a tensor of ``shape``; None if the shape does not fit."""
        if not shape or not stacked.expert < shape[0] <= MAX_EXPERTS:
            return None
        if len(shape) == 1 and not own:
            return _Expert(stacked.stored, stacked.expert, 0, 0, -1)
        if len(shape) != 3 or len(own) != 2 or not shape[1] or not shape[2]:
            return None
        wide = own[0] * stacked.parts
        turned = shape[1:] == (own[1], wide) != (wide, own[1])
        width, columns = (shape[2], shape[1]) if turned else (shape[1], shape[2])
        rows, rest = divmod(width, stacked.parts)
        begin = stacked.part * rows
        return None if rest else _Expert(stacked.stored, stacked.expert, begin, begin + rows, columns, turned)

    @property
    def shape(self) -> tuple[int, ...]:
        return () if self.columns < 0 else (self.end - self.begin, self.columns)

    def index(self, part: Part | None) -> tuple[slice, ...]:
        """The index of the expert, or of a part of it, with a leading dimension of one."""
        own = slice(self.expert, self.expert + 1)
        if self.columns < 0:
            return (own,)
        rows, columns = slice(self.begin, self.end), slice(None)
        if part is not None and part.dimension == 0:
            rows = slice(self.begin + part.begin, self.begin + part.end)
        elif part is not None:
            columns = slice(part.begin, part.end)
        return (own, columns, rows) if self.turned else (own, rows, columns)


class SafetensorsCheckpoint:
    """The safetensors files of one directory. ``tensors``: the model's, which the files may store under other names or
    stacked; empty: only stored names are known."""

    def __init__(self, directory: Path, tensors: Tensors = MappingProxyType({})) -> None:
        self._directory = directory
        self._tensors = tensors
        self._files: dict[str, safe_open] = {}
        self._divided: dict[str, list[Path]] = {}  # the files of a tensor that is divided over the ranks of its vendor
        files = {name: file for name, file in self._read_names().items() if not is_adapter(name)}
        self._wrapped = {
            plain: name for name in files if (plain := plain_name(name)) not in files
        }  # else the same name
        names = {name: plain for plain, name in self._wrapped.items()}
        self._file_of = {names.get(name, name): file for name, file in files.items()}
        self._experts: dict[str, _Expert] = {}
        self._aliases: dict[str, str] = {}
        self._misshapen: dict[str, tuple[int, ...]] = {}  # stacked tensors that do not hold the model's experts
        stacks: dict[str, tuple[int, ...]] = {}
        for name, spec in tensors.items():
            if name in self._file_of:
                continue
            alias = next((alias for alias in spec.aliases if alias in self._file_of), None)
            if alias is not None:
                self._aliases[name] = alias
                self._file_of[name] = self._file_of.pop(alias)
            elif spec.stacked is not None and spec.stacked.stored in self._file_of:
                stored = spec.stacked.stored
                shape = stacks.get(stored)
                if shape is None:
                    shape = stacks[stored] = self._header(stored)[0]
                expert = _Expert.find(spec.stacked, shape, spec.shape)
                if expert is not None:
                    self._experts[name] = expert
                    self._file_of[name] = self._file_of[stored]
                if shape[:1] != (spec.stacked.count,) or (expert is None and spec.stacked.expert < shape[0]):
                    self._misshapen[stored] = shape
        for stored in stacks:
            if stored not in self._misshapen:
                del self._file_of[stored]

    def _find_names(self, scheme: Scheme) -> None:
        """Find what a scheme stores beside a weight under another name: as the weight has, or another last part."""
        for name, spec in self._tensors.items():
            if not spec.quantizable or name not in self._file_of or self._header(name)[1] in _FLOATS:
                continue
            module = self._aliases.get(name, name).rpartition(".")[0]
            for own, wanted in (scheme.tensors(spec) or {}).items():
                if own in self._file_of:
                    continue
                names = [f"{module}.{kind}" for kind in (own.removeprefix(f"{spec.module}."), *wanted.kinds)]
                stored = next((one for one in names if one in self._file_of), None)
                if stored is not None or name in self._aliases:
                    self._aliases[own] = stored or " or ".join(names)
                if stored is not None:
                    self._file_of[own] = self._file_of.pop(stored)

    def _find_scales(self, scheme: Scheme) -> None:
        """Find what a scheme stores of each expert in the tensors that hold it of all experts of a layer. Raises
        LoadError where rows of two projections may share a scale."""
        found: dict[str, tuple[int, ...]] = {}
        for name, spec in self._tensors.items():
            if name not in self._experts or spec.stacked is None or not spec.quantizable:
                continue
            for own, wanted in (scheme.tensors(spec) or {}).items():
                stored = _beside(spec.stacked.stored, own)
                if own in self._file_of or stored not in self._file_of:
                    continue
                shape = found[stored] = found[stored] if stored in found else self._header(stored)[0]
                place = dataclasses.replace(spec.stacked, stored=stored)
                _check_apart(spec, wanted, stored, shape[-1 if self._experts[name].turned else -2 :][0])
                fits = (_Expert.find(place, shape, each) for each in wanted.shapes)
                expert = next((one for one in fits if one is not None), None)
                if expert is None or shape[0] != place.count:
                    self._misshapen[stored] = shape
                else:
                    self._experts[own], self._file_of[own] = expert, self._file_of[stored]
        for stored in found.keys() - self._misshapen.keys():
            del self._file_of[stored]

    def as_stored(self, scheme: Scheme) -> Scheme:
        """``scheme``, except for weights that the files have in floats alone: tools leave modules so without saying
        it."""
        specs = self._tensors.values()
        experts = (one.name for one in specs if one.stacked is not None and one.quantizable and self.has(one.name))
        if (first := next(experts, None)) is not None:
            scheme = scheme.with_experts(self._header(first)[1])
        self._find_names(scheme)
        stored = (name.rpartition(".") for name in self._file_of)
        quantized = {module for module, _, kind in stored if kind not in ("weight", "bias")}
        names = [name for name, spec in self._tensors.items() if spec.quantizable and name in self._file_of]
        names = [name for name in names if self._tensors[name].module not in quantized]
        return AsStored(scheme, frozenset(name for name in names if self._header(name)[1] in _FLOATS))

    def _read_names(self) -> dict[str, Path]:
        single, index = self._directory / "model.safetensors", self._directory / "model.safetensors.index.json"
        if single.is_file():
            return dict.fromkeys(self._open(single).keys(), single)
        if divided := [file for file in sorted(self._directory.glob("*.safetensors")) if _RANK.fullmatch(file.name)]:
            return self._read_ranks(divided)
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
        # A tensor that the index lists and its file lacks counts as missing.
        return {name: self._directory / file for name, file in names.items() if name in held[file]}

    def _read_ranks(self, files: Sequence[Path]) -> dict[str, Path]:
        """The tensors of ``files``, as Grok 2's are: a rank has its part of some tensors, and all ranks share others.
        Raises LoadError where a rank lacks its part."""
        names: dict[str, Path] = {}
        parts: dict[str, dict[str, Path]] = {}
        for file in files:
            match = _RANK.fullmatch(file.name)
            assert match is not None
            stored = self._open(file).keys()
            for name in stored:
                if match[1] == "common":
                    names[name] = file
                else:
                    parts.setdefault(name, {})[match[1]] = file
        ranks = sorted({rank for own in parts.values() for rank in own})
        for name, own in parts.items():
            missing = [f"{rank:03}" for rank in range(max(map(int, ranks)) + 1) if f"{rank:03}" not in own]
            if missing:
                raise LoadError(
                    f"{self._directory} lacks the part of {name} in a file *-TP-{missing[0]}.safetensors; download the "
                    "checkpoint again"
                )
            self._divided[plain_name(name)] = [own[rank] for rank in ranks]
            names[name] = own[ranks[0]]
        return names

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
        name = self._aliases.get(name, name)
        return self._wrapped.get(name, name)

    def _header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype."""
        piece = self._experts.get(name)
        if (dimension := self._joint(name)) is not None:
            slices = [self._open(file).get_slice(self._stored(name)) for file in self._divided[name]]
            shapes = [tuple(each.get_shape()) for each in slices]
            alike = {(*shape[:dimension], *shape[dimension + 1 :]) for shape in shapes}
            if len(alike) > 1 or len(shapes[0]) <= dimension:
                raise LoadError(
                    f"{name} has parts of the shapes {', '.join(str(list(shape)) for shape in shapes[:8])} in "
                    f"{self._directory}, which are not of one tensor; download it again"
                )
            length = sum(shape[dimension] for shape in shapes)
            return (*shapes[0][:dimension], length, *shapes[0][dimension + 1 :]), slices[0].get_dtype()
        result = self._open(self._file_of[name]).get_slice(self._stored(name if piece is None else piece.stored))
        return tuple(result.get_shape()) if piece is None else piece.shape, result.get_dtype()

    def _joint(self, name: str) -> int | None:
        """The dimension along which a tensor's files are joined; None: it is in one file."""
        spec = self._tensors.get(name)
        if name not in self._divided or spec is None or spec.split is None:
            return None
        return spec.split.dimension

    def _join(self, name: str, part: Part | None, dimension: int) -> Tensor:
        """A tensor, or a part of it, of several files."""
        pieces, begin = [], 0
        for file in self._divided[name]:
            piece = self._open(file).get_slice(self._stored(name))
            shape = piece.get_shape()
            index = [slice(None)] * len(shape)
            first, end = 0, shape[dimension]
            if part is not None and part.dimension == dimension:
                first, end = max(part.begin - begin, 0), min(part.end - begin, end)
            elif part is not None:
                index[part.dimension] = slice(part.begin, part.end)
            index[dimension] = slice(first, end)
            if first < end:
                pieces.append(piece[tuple(index)])
            begin += shape[dimension]
        return torch.cat(pieces, dimension)

    def _part(self, name: str, part: Part | None) -> Tensor:
        if (dimension := self._joint(name)) is not None:
            return self._join(name, part, dimension)
        file, piece = self._open(self._file_of[name]), self._experts.get(name)
        result: Tensor
        if piece is not None:
            result = file.get_slice(self._stored(piece.stored))[piece.index(part)][0]
            result = result.T if piece.turned else result
        else:
            stored = self._stored(name)
            result = file.get_tensor(stored) if part is None else file.get_slice(stored)[part.index]
        return result

    def read(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise LoadError(f"the weights in {self._directory} have no tensor {name}; download the checkpoint again")
        try:
            return self._part(name, None)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{self._file_of[name]}: {name} cannot be read ({error}); download it again") from error

    def has(self, name: str) -> bool:
        return name in self._file_of

    def check(self, scheme: Scheme | None = None) -> None:
        """Compare the tensors with those of the model and its scheme. Raises LoadError that names every problem."""
        if scheme is not None:
            self._find_scales(scheme)
        expected = expected_tensors(self._tensors, scheme)
        says = "config.json asks" if scheme is None else f"config.json ({scheme.name}) asks"
        missing = [name for name in expected if not self.has(name) and not expected[name].optional]
        wrong = [f"{self._aliases.get(name, name)} is missing" for name in missing]
        for name, stored in expected.items():
            if self.has(name):
                shape, dtype = self._header(name)
                if stored.shapes and shape not in stored.shapes:
                    wanted = " or ".join(str(list(each)) for each in stored.shapes)
                    wrong.append(f"{self._aliases.get(name, name)} has shape {list(shape)}, {says} for {wanted}")
                elif dtype not in stored.dtypes:
                    held = self._aliases.get(name, name)
                    wrong.append(f"{held} is stored as {dtype}, not as one of {', '.join(stored.dtypes)}")
        layers = {_layer(name) for spec in self._tensors.values() for name in (spec.name, *spec.aliases)} - {""}
        unread = {name for spec in self._tensors.values() for name in spec.unread}
        modules = {name.removesuffix(".weight") for name in unread if name.endswith(".weight")}
        for name in self._file_of:
            if (
                _layer(name) in layers
                and name not in expected
                and name not in unread
                and name.rpartition(".")[0] not in modules  # scales of a quantized weight
                and not name.endswith(".inv_freq")
                and not (scheme is not None and scheme.ignores(name, self._tensors))
            ):
                if name in self._misshapen:  # checked first, because all of its experts are missing too
                    wrong.insert(
                        0, f"{name} has shape {list(self._misshapen[name])}, which does not hold the model's experts"
                    )
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


def _check_apart(spec: TensorSpec, wanted: StoredTensor, stored: str, rows: int) -> None:
    """Raises LoadError if one of the ``rows`` of scales may be of rows of two projections, which share a tensor."""
    assert spec.stacked is not None
    whole = spec.stacked.parts * spec.shape[0]
    if spec.shape[0] % wanted.rows and spec.stacked.parts > 1 and rows == -(-whole // wanted.rows):
        raise LoadError(
            f"{stored} has a scale for each {wanted.rows} of the {whole} rows of {spec.stacked.stored}, which are of "
            f"{spec.stacked.parts} projections of {spec.shape[0]}: one scale is of rows of both, which is not read; "
            "use a checkpoint that keeps projections apart, or one in bf16"
        )


def _beside(stored: str, own: str) -> str:
    """The tensor of all experts that holds ``own`` of each, beside the one of their weights, ``stored``."""
    kind = own.rpartition(".")[2]
    if stored.endswith(".weight"):
        return f"{stored.removesuffix('weight')}{kind}"
    return f"{stored}_{kind.removeprefix('weight_')}"


def _layer(name: str) -> str:
    """The layer that a tensor is of, such as model.layers.3, transformer.h.3, layers.3 or model.mtp.layers.0; "" for
    others."""
    parts = name.split(".", 4)
    most = 4 if name.startswith("model.mtp.") else 3
    count = next((count for count in range(most, 1, -1) if count < len(parts) and parts[count - 1].isdigit()), 0)
    return ".".join(parts[:count])
