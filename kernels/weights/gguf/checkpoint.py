"""The weights of a GGUF file, by their Hugging Face names and in their Hugging Face order.

The model declares what its tensors are called in the file (kernels.weights.tensors). A file keeps a projection of all
experts of a layer in one tensor [experts, outputs, inputs]; one written before April 2024 has a tensor for each expert.
llama.cpp applies rotary embeddings to neighbouring dimensions, Hugging Face to the two halves of a head. Files of the
llama architecture therefore permute the rows of query and key projections; here they are in Hugging Face's order. All
types that the gguf package dequantizes are supported. A matrix may have a factor in a separate tensor, as converters of
NVFP4 checkpoints write it: ``blk.N.ffn_up.scale`` float32 [1], for stacked experts [experts]. ``input_scale`` is not
used, since inputs are not quantized.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.contract.errors import GgufError
from kernels.weights.gguf.header import GgufHeader, TensorInfo
from kernels.weights.gguf.joined import JOINED, cut
from kernels.weights.quantization.scheme import Scheme
from kernels.weights.tensors import GgufOrder, Part, Role, Tensors, TensorSpec

__all__ = ["READ", "GgufCheckpoint", "factor_of", "not_finite"]

_log = logging.getLogger("troupe.kernels")

READ = (
    *("F32", "F16", "BF16"),
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
"""Supported types of tensors: all that the gguf package dequantizes."""

_BESIDE = (".scale", ".input_scale")
_UNREAD = ("rope_freqs.", "rope_factors_", "v.", "a.", "mm.")
"""What the names of other tensors begin with: tables that the metadata's reader takes, and towers of images and sound,
which are never read."""
_FLOATS = ("F32", "F16", "BF16")
_CHUNK = 1 << 22
"""Elements that are dequantized at a time, so that no weight is ever whole in float32."""


class GgufCheckpoint:
    """The tensors of a GGUF file. ``declared``: the model's tensors. Nothing is read before ``check``.

    Raises GgufError when the gguf package is not installed.
    """

    def __init__(self, header: GgufHeader, declared: Tensors) -> None:
        try:
            from gguf import constants, quants
        except ImportError as error:
            raise GgufError(
                f"{header.path} needs the gguf package; install it: pip install 'troupe-llm[gguf]'"
            ) from error
        self._quants = quants
        self._kinds: dict[int, Any] = {int(kind): kind for kind in constants.GGMLQuantizationType if kind.name in READ}
        self._sizes: Mapping[Any, tuple[int, int]] = constants.GGML_QUANT_SIZES
        self._header = header
        self._declared = declared
        placed = [spec for spec in declared.values() if spec.gguf is not None]
        self._own = {spec.gguf.name for spec in placed if spec.gguf is not None}
        self._apart = any(spec.stacked is not None and spec.gguf.name in header.tensors for spec in placed if spec.gguf)
        shapes = {spec.gguf.name: spec.gguf.stored(spec.shape) for spec in placed if spec.gguf is not None}
        self._tensors = {
            name: _as_matrix(info, shapes.get(name, ())) for name, info in cut(header.tensors, shapes).items()
        }
        self._data = np.memmap(header.path, np.uint8, "r")

    def has(self, name: str) -> bool:
        return self._info(name) is not None

    def _stacked(self, spec: TensorSpec) -> bool:
        """Whether a weight shares its tensor with those of the other experts."""
        return spec.stacked is not None and not self._apart

    def _foreign(self, spec: TensorSpec) -> str:
        """A tensor's name in the file; its own name where GGUF files have no such tensor."""
        if spec.stacked is not None and not self._apart:
            return spec.stacked.gguf
        return spec.name if spec.gguf is None else spec.gguf.name

    def _info(self, name: str) -> TensorInfo | None:
        """The file's entry for a tensor; for a stacked expert, the entry that it would have on its own."""
        spec = self._declared.get(name)
        info = None if spec is None else self._tensors.get(self._foreign(spec))
        if info is None or spec is None or spec.stacked is None or not self._stacked(spec):
            return info
        expert = spec.stacked.expert
        if len(info.shape) != 3 or expert >= info.shape[0]:
            return None
        rows = info.shape[1:]
        return dataclasses.replace(info, shape=rows, first=info.first + expert * (info.step or rows[0]), step=0)

    def check(self, scheme: Scheme | None = None) -> None:
        """Compare the tensors with the model's and with the file's size. Raises GgufError that names every problem."""
        tensors, specs = self._tensors, self._declared.values()
        expected: dict[str, tuple[int, ...]] = {}
        for spec in specs:
            stacked = spec.stacked if self._stacked(spec) else None
            whole = spec.shape if spec.gguf is None else spec.gguf.stored(spec.shape)
            expected[self._foreign(spec)] = whole if stacked is None else (stacked.count, *spec.shape)
        wrong: list[str] = [
            f"{name}, of shape {list(tensors[name].shape)}, is none of {' and '.join(parts)} together, or they are in "
            "the file besides"
            for part, parts in JOINED.items()
            for name in tensors
            if name.endswith(f".{part}.weight") and part not in parts and name not in expected
        ]
        for foreign, shape in expected.items():
            info = tensors.get(foreign)
            if info is None:
                wrong.append(f"{foreign} is missing")
            elif info.shape != shape:
                wrong.append(f"{foreign} has shape {list(info.shape)}, the metadata asks for {list(shape)}")
            elif (problem := self._problem(info)) is not None:
                wrong.append(f"{foreign} {problem}")
            elif (problem := self._factor_problem(foreign, info)) is not None:
                wrong.append(f"{factor_of(foreign)} {problem}")
        layers = {name.split(".")[1] for name in expected if name.startswith("blk.")}
        has_all = "token_embd.weight" in expected
        wrong += [
            f"{name} is in the file and not in the model"
            for name in tensors
            if (name.split(".")[1] in layers if name.startswith("blk.") else has_all and not name.startswith(_UNREAD))
            and name not in expected
            and not name.endswith("attn_rot_embd")
            and not (name.endswith(_BESIDE) and f"{name.rpartition('.')[0]}.weight" in expected)
        ]
        wrong += [] if wrong else self._misplaced()
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise GgufError(
                f"{self._header.path} cannot be loaded: {'; '.join(wrong[:8])}{more}. Check that the download is whole "
                "and the model one of those that are read; else convert it again"
            )
        self._log_dequantized(scheme)

    def _misplaced(self) -> list[str]:
        """Problems of tensors that do not begin where the one before ends."""
        wrong: list[str] = []
        sizes = {int(kind): size for kind, size in self._sizes.items()}
        expected: int | None = self._header.begin
        for name, info in self._header.tensors.items():
            if expected is not None and info.offset != expected:
                wrong.append(
                    f"{name} begins at byte {info.offset}, and not at {expected}, where the one before it ends"
                )
            if info.kind in sizes:
                block, size = sizes[info.kind]
                bytes_ = math.prod(info.shape) // block * size
                expected = info.offset + -(-bytes_ // self._header.alignment) * self._header.alignment
            else:
                expected = None
        return wrong

    def _problem(self, info: TensorInfo) -> str | None:
        kind = self._kinds.get(info.kind)
        if kind is None:
            return f"is of type {info.kind}, which is none that is read: {', '.join(READ)}"
        block, _ = self._sizes[kind]
        if info.shape[-1] % block:
            return f"has rows of {info.shape[-1]}, no multiple of {kind.name}'s blocks of {block}"
        if len(info.shape) == 1 and info.first % block:
            return f"begins within a block of {kind.name}"
        experts = info.shape[0] - 1 if len(info.shape) == 3 else 0
        rows = math.prod(info.shape[:-1]) if not info.step else experts * info.step + math.prod(info.shape[-2:-1])
        end = self._begin(info) + rows * self._row_bytes(info)
        if end > self._header.size:
            return f"ends at byte {end}, and the file at {self._header.size}"
        return None

    def _factor_problem(self, foreign: str, info: TensorInfo) -> str | None:
        """The problem of a tensor's factor; None: it is right, or there is none."""
        factor = self._tensors.get(factor_of(foreign))
        if factor is None or factor_of(foreign) in self._own:
            return None
        count = info.shape[0] if len(info.shape) == 3 else 1
        if factor.kind not in self._kinds or self._kinds[factor.kind].name != "F32" or factor.shape != (count,):
            return f"must be {count} float32, and is of type {factor.kind} and shape {list(factor.shape)}"
        if (problem := self._problem(factor)) is None and not np.isfinite(self._floats32(factor)).all():
            problem = "is not finite (NaN or infinite)"
        return problem

    def _floats32(self, info: TensorInfo) -> np.ndarray[Any, np.dtype[np.float32]]:
        return self._rows(info).reshape(-1).view(np.float32)

    def _factor(self, name: str) -> float:
        """The factor that a checked tensor's values are multiplied with."""
        spec = self._declared[name]
        factor = self._tensors.get(factor_of(self._foreign(spec)))
        if factor is None or factor_of(self._foreign(spec)) in self._own:
            return 1.0
        return float(self._floats32(factor)[spec.stacked.expert if spec.stacked and self._stacked(spec) else 0])

    def _log_dequantized(self, scheme: Scheme | None) -> None:
        kinds: Counter[str] = Counter()
        for spec in self._declared.values():
            if len(spec.shape) == 2 and not (scheme is not None and _stays(spec, scheme)):
                kinds[self._kinds[self._tensors[self._foreign(spec)].kind].name] += 1
        made = [f"{count} of {kind}" for kind, count in kinds.items() if kind not in _FLOATS]
        if made:
            _log.info("%s: weights dequantized while they are loaded: %s", self._header.path, ", ".join(made))

    def _row_bytes(self, info: TensorInfo) -> int:
        block, size = self._sizes[self._kinds[info.kind]]
        return info.shape[-1] // block * size

    def _rows(self, info: TensorInfo) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A view of a checked tensor's bytes, [rows, bytes a row]; for stacked experts, of one expert."""
        row, begin = self._row_bytes(info), self._begin(info)
        count = math.prod(info.shape[:-1])
        return np.asarray(self._data[begin : begin + count * row]).reshape(count, row)

    def _begin(self, info: TensorInfo) -> int:
        """The byte of the file at which a tensor begins."""
        block, size = self._sizes[self._kinds[info.kind]]
        before = info.first * self._row_bytes(info) if len(info.shape) > 1 else info.first // block * size
        return info.offset + before

    def _order(self, name: str, size: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """The file's row for each row of the tensor; None: the order is the same."""
        place = self._declared[name].gguf
        if place is not None and place.rows is not None:
            return np.array(place.rows.indices())
        if place is None or not place.rotary_heads:
            return None
        return np.arange(size).reshape(place.rotary_heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def read(self, name: str) -> Tensor:
        """The bytes of a checked matrix as they are stored, uint8 [outputs, bytes an output]."""
        info = self._checked(name)
        rows = self._rows(info)
        order, columns = self._order(name, len(rows)), self._columns(name)
        rows = rows.copy() if order is None else rows[order]
        if columns is not None:
            block, size = self._sizes[self._kinds[info.kind]]
            rows = rows.reshape(len(rows), -1, size)[:, columns.indices(block)].reshape(len(rows), -1)
        return torch.from_numpy(rows)

    def _columns(self, name: str) -> GgufOrder | None:
        place = self._declared[name].gguf
        return None if place is None else place.columns

    def _checked(self, name: str) -> TensorInfo:
        """The entry of a tensor that ``check`` found."""
        info = self._info(name)
        assert info is not None
        return info

    def floats(self, name: str) -> Tensor:
        """A whole tensor, float32 on the host. Raises GgufError."""
        info = self._info(name)
        foreign = self._foreign(self._declared[name])
        problem = "is missing" if info is None else self._problem(info)
        if info is not None and problem is None:
            problem = self._factor_problem(foreign, self._tensors[foreign])
        if info is None or problem is not None:
            raise GgufError(f"{self._header.path}: {foreign} {problem}; download it again")
        result = torch.empty(self._declared[name].shape)
        self.fill(name, result, None)
        return result

    def fill(self, name: str, target: Tensor, part: Part | None) -> None:
        """Write a part of a checked tensor to ``target``, in its dtype. Raises GgufError."""
        info = self._checked(name)
        kind, rows, factor = self._kinds[info.kind], self._rows(info), self._factor(name)
        order = self._order(name, info.shape[0])
        if len(info.shape) == 1:
            vector = self._quants.dequantize(rows, kind).reshape(-1)
            values = torch.from_numpy(np.array(vector if order is None else vector[order], np.float32))
            if (place := self._declared[name].gguf) is not None and place.exponent:
                values = torch.log(-values).view(self._declared[name].shape)
            target.copy_(values if part is None else part.narrow(values))
            return
        whole = len(rows) if order is None else len(order)
        first, last = (part.begin, part.end) if part is not None and part.dimension == 0 else (0, whole)
        target, columns = target.view(len(target), -1), self._columns(name)
        step = max(1, _CHUNK // info.shape[1])
        for begin in range(first, last, step):
            end = min(begin + step, last)
            chosen = rows[begin:end] if order is None else rows[order[begin:end]]
            with np.errstate(all="ignore"):  # numbers that are not finite are reported below
                values = torch.from_numpy(np.array(self._quants.dequantize(chosen, kind), np.float32))
            if kind.name not in _FLOATS and not bool(values.isfinite().all()):
                raise not_finite(self._foreign(self._declared[name]))
            if factor != 1.0:
                values *= factor
            if columns is not None:
                values = values[:, columns.indices()]
            if part is not None and part.dimension == 1:
                values = part.narrow(values)
            target[begin - first : end - first].copy_(values)


def factor_of(foreign: str) -> str:
    """The name of a tensor's factor, if it has one."""
    return f"{foreign.rpartition('.')[0]}.scale"


def not_finite(foreign: str) -> GgufError:
    return GgufError(
        f"{foreign} has scales that are not finite (NaN or infinite): the file is broken; download it again, or "
        "quantize the model anew"
    )


def _as_matrix(info: TensorInfo, declared: tuple[int, ...]) -> TensorInfo:
    """``info`` as it is declared: files store a matrix of one row as a vector, some vectors as a matrix, what heads
    have apart in three dimensions, and any with dimensions of one."""
    same = declared != () and [size for size in declared if size > 1] == [size for size in info.shape if size > 1]
    same |= len(info.shape) == 2 and declared == (math.prod(info.shape),)
    if len(info.shape) == 3:
        same = declared == (info.shape[0] * info.shape[1], info.shape[2])
    return dataclasses.replace(info, shape=declared) if same else info


def _stays(spec: TensorSpec, scheme: Scheme) -> bool:
    """Whether a matrix stays quantized."""
    if spec.quantizable:
        return scheme.tensors(spec) is not None
    return spec.role is Role.EMBEDDING and scheme.keeps_table(spec)
