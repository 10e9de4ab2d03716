"""The weights of a GGUF file, by their Hugging Face names and in their Hugging Face order.

llama.cpp rotates neighbours of a head where Hugging Face rotates its halves, so files of the llama architecture hold
the rows of query and key projections in another order; here they are as they were. Types are those that the gguf
package can make floats of. A matrix may have a factor in a tensor of its own, as converters of NVFP4 checkpoints write
it: ``blk.N.ffn_up.scale`` float32 [1], of stacked experts [experts]. What there is about inputs (``input_scale``) is
not used: they are not rounded.
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

from kernels.gguf.description import describe
from kernels.gguf.header import GgufError, GgufHeader, TensorInfo
from kernels.gguf.joined import JOINED, cut
from kernels.gguf.names import Names, expert_of, experts_apart
from kernels.models.names import is_projection
from kernels.parallel.partition import Part
from kernels.quantization.scheme import Scheme

__all__ = ["READ", "GgufCheckpoint", "factor_of", "not_finite"]

_log = logging.getLogger("troupe.kernels")

READ = (
    *("F32", "F16", "BF16"),
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
"""Types of tensors that are read: all that the gguf package makes floats of."""

_BESIDE = (".scale", ".input_scale")
_FLOATS = ("F32", "F16", "BF16")
_CHUNK = 1 << 22
"""Elements made floats of at a time: weights are never whole in float32."""


class GgufCheckpoint:
    """Raises GgufError when the gguf package is not installed. Nothing is read before ``check``."""

    def __init__(self, header: GgufHeader) -> None:
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
        config = describe(header)
        permuted = config["model_type"] == "llama"
        self._heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        self._heads = self._heads if permuted else {}
        self._names = Names(experts_apart(header.tensors), config["architectures"] == ["MixtralForCausalLM"])
        self._tensors = {name: _as_matrix(name, info) for name, info in cut(header.tensors).items()}
        self._data = np.memmap(header.path, np.uint8, "r")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that has a name here."""
        found: dict[str, tuple[int, ...]] = {}
        for name, info in self._tensors.items():
            stacked = len(info.shape) == 3
            for own in self._names.own(name, info.shape[0] if stacked else 0):
                found[own] = info.shape[1:] if stacked else info.shape
        return found

    def has(self, name: str) -> bool:
        return self._info(name) is not None

    def _info(self, name: str) -> TensorInfo | None:
        """What the file says of a tensor, of an expert's what that would be if it were there for itself."""
        info, expert = self._tensors.get(self._names.foreign(name)), expert_of(name)
        if info is None or expert is None or not self._names.stacked(name):
            return info
        if len(info.shape) != 3 or expert >= info.shape[0]:
            return None
        rows = info.shape[1:]
        return dataclasses.replace(info, shape=rows, first=info.first + expert * (info.step or rows[0]), step=0)

    def check(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme | None = None) -> None:
        """Compare with what the model expects, and with the file's size. Raises GgufError that names what is wrong."""
        tensors, foreign_name = self._tensors, self._names.foreign
        wrong: list[str] = [
            f"{name}, of shape {list(tensors[name].shape)}, is none of {' and '.join(parts)} together, or they are in "
            "the file besides"
            for part, parts in JOINED.items()
            for name in tensors
            if name.endswith(f".{part}.weight") and part not in parts
        ]
        experts = Counter(foreign_name(name) for name in shapes if self._names.stacked(name))
        expected = {
            foreign_name(name): (experts[foreign_name(name)], *shape) if self._names.stacked(name) else shape
            for name, shape in shapes.items()
        }
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
        wrong += [
            f"{name} is in the file and not in the model"
            for name in tensors
            if name.startswith("blk.")
            and name.split(".")[1] in layers
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
        self._tell(shapes, scheme)

    def _misplaced(self) -> list[str]:
        """What does not begin where what is before it ends."""
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
        """What is wrong with the factor of a tensor; None: nothing, or it has none."""
        factor = self._tensors.get(factor_of(foreign))
        if factor is None:
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
        """What a checked tensor's values are multiplied with."""
        factor = self._tensors.get(factor_of(self._names.foreign(name)))
        if factor is None:
            return 1.0
        return float(self._floats32(factor)[(expert_of(name) or 0) if self._names.stacked(name) else 0])

    def _tell(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme | None) -> None:
        kinds: Counter[str] = Counter()
        for name, shape in shapes.items():
            if len(shape) == 2 and not (scheme is not None and _stays(name, (shape[0], shape[1]), scheme)):
                kinds[self._kinds[self._tensors[self._names.foreign(name)].kind].name] += 1
        made = [f"{count} of {kind}" for kind, count in kinds.items() if kind not in _FLOATS]
        if made:
            _log.info("%s: weights made floats of while they are loaded: %s", self._header.path, ", ".join(made))

    def _row_bytes(self, info: TensorInfo) -> int:
        block, size = self._sizes[self._kinds[info.kind]]
        return info.shape[-1] // block * size

    def _rows(self, info: TensorInfo) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A view of a checked tensor's bytes, [rows, bytes a row]; of experts' in one, those of a single one."""
        row, begin = self._row_bytes(info), self._begin(info)
        count = math.prod(info.shape[:-1])
        return np.asarray(self._data[begin : begin + count * row]).reshape(count, row)

    def _begin(self, info: TensorInfo) -> int:
        """The byte of the file at which a tensor begins."""
        block, size = self._sizes[self._kinds[info.kind]]
        before = info.first * self._row_bytes(info) if len(info.shape) > 1 else info.first // block * size
        return info.offset + before

    def _order(self, name: str, size: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """Of each row here, which one of the file it is; None: the same."""
        heads = self._heads.get(name.split(".")[-2])
        return None if heads is None else np.arange(size).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def read(self, name: str) -> Tensor:
        """The bytes of a checked matrix as they are stored, uint8 [outputs, bytes an output]."""
        rows = self._rows(self._checked(name))
        order = self._order(name, len(rows))
        return torch.from_numpy(rows.copy() if order is None else rows[order])

    def _checked(self, name: str) -> TensorInfo:
        """Of a tensor that ``check`` found."""
        info = self._info(name)
        assert info is not None
        return info

    def floats(self, name: str) -> Tensor:
        """A whole tensor, float32 on the host. Raises GgufError."""
        info = self._info(name)
        foreign = self._names.foreign(name)
        problem = "is missing" if info is None else self._problem(info)
        if info is not None and problem is None:
            problem = self._factor_problem(foreign, self._tensors[foreign])
        if info is None or problem is not None:
            raise GgufError(f"{self._header.path}: {foreign} {problem}; download it again")
        found = torch.empty(info.shape)
        self.fill(name, found, None)
        return found

    def fill(self, name: str, target: Tensor, part: Part | None) -> None:
        """Write a part of a checked tensor to ``target``, in its dtype. Raises GgufError."""
        info = self._checked(name)
        kind, rows, factor = self._kinds[info.kind], self._rows(info), self._factor(name)
        order = self._order(name, info.shape[0])
        if len(info.shape) == 1:
            whole = self._quants.dequantize(rows, kind).reshape(-1)
            values = torch.from_numpy(np.array(whole if order is None else whole[order], np.float32))
            target.copy_(values if part is None else part.of(values))
            return
        first, last = (part.begin, part.end) if part is not None and part.dimension == 0 else (0, len(rows))
        step = max(1, _CHUNK // info.shape[1])
        for begin in range(first, last, step):
            end = min(begin + step, last)
            chosen = rows[begin:end] if order is None else rows[order[begin:end]]
            with np.errstate(all="ignore"):  # what is not finite is told below
                values = torch.from_numpy(np.array(self._quants.dequantize(chosen, kind), np.float32))
            if kind.name not in _FLOATS and not bool(values.isfinite().all()):
                raise not_finite(self._names.foreign(name))
            if factor != 1.0:
                values *= factor
            if part is not None and part.dimension == 1:
                values = part.of(values)
            target[begin - first : end - first].copy_(values)


def factor_of(foreign: str) -> str:
    """What the factor of a tensor is called, where it has one."""
    return f"{foreign.rpartition('.')[0]}.scale"


def not_finite(foreign: str) -> GgufError:
    return GgufError(
        f"{foreign} has scales that are not finite (NaN or infinite): the file is broken; download it again, or "
        "quantize the model anew"
    )


def _as_matrix(name: str, info: TensorInfo) -> TensorInfo:
    """Files have the one row of what weighs the expert that all tokens take without its first dimension."""
    lone = name.endswith(".ffn_gate_inp_shexp.weight") and len(info.shape) == 1
    return dataclasses.replace(info, shape=(1, *info.shape)) if lone else info


def _stays(name: str, shape: tuple[int, int], scheme: Scheme) -> bool:
    """Whether a matrix is kept quantized."""
    module = name.removesuffix(".weight")
    if not is_projection(name):
        return scheme.keeps_table(module)
    return scheme.tensors(module, shape) is not None
