"""The header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): metadata and tensor entries.

The engine's process reads it at every start, from untrusted files. The gguf package's reader takes seconds for a large
vocabulary, trusts every length, and maps the weights. This one checks each length against the rest of the file before
it allocates anything. It needs neither PyTorch nor the gguf package.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kernels.contract.errors import GgufError

__all__ = ["GgufHeader", "TensorInfo", "is_gguf", "read_header", "read_text"]

T = TypeVar("T")

VERSIONS = (2, 3)
MAX_NAMES = 1 << 24
"""The most keys, tensors, or elements of an array. No model has more."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """The entry of a tensor. ``kind``: the number of its type. ``shape``: outermost first, as in PyTorch. ``offset``:
    bytes from the file's begin. A tensor that is cut out of a joined one has the joined one's ``offset``; it begins at
    its row ``first`` (in a vector, number), and ``step`` is the joined tensor's rows an expert; 0: as many as its own.
    """

    kind: int
    shape: tuple[int, ...]
    offset: int
    first: int = 0
    step: int = 0


@dataclass(frozen=True)
class GgufHeader:
    """``metadata``: numbers, strings and lists by key. ``size``: bytes of the file. Tensors begin at byte ``begin``, in
    order, each at a multiple of ``alignment`` after it."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    size: int
    begin: int
    alignment: int


def is_gguf(path: str | Path) -> bool:
    """Whether a model's path is a file rather than a directory."""
    return Path(path).is_file()


def read_header(path: str | Path) -> GgufHeader:
    """Read the header. Raises GgufError. Tensors are not yet checked against the file's size."""
    return _read(Path(path), lambda reader: reader.header())


def read_text(path: str | Path, key: str) -> str | None:
    """The text of one key; None if it is missing. Reads no further than that key. Raises GgufError."""
    return _read(Path(path), lambda reader: reader.text(key))


def _read(file: Path, read: Callable[[_Reader], T]) -> T:
    try:
        with file.open("rb") as opened:
            if opened.read(4) != b"GGUF":
                raise GgufError(
                    f"{file} is not a GGUF file; give a directory with config.json and *.safetensors, or a .gguf file"
                )
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return read(_Reader(file, data))
    except OSError as error:
        raise GgufError(f"{file} cannot be read ({error}); check the path and its permissions") from error
    except UnicodeDecodeError as error:
        raise GgufError(f"{file} is damaged: a name in it is not UTF-8 ({error}); download it again") from error


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 4

    def sizes(self) -> tuple[int, int]:
        """The numbers of tensors and keys."""
        version = self.scalar("I")
        if version not in VERSIONS:
            swapped = "; it was written for machines of the other byte order" if version & 0xFFFF == 0 else ""
            raise GgufError(
                f"{self.path} is GGUF version {version}{swapped}; versions {' and '.join(map(str, VERSIONS))} are "
                "read: convert the model again with a newer llama.cpp"
            )
        return self.count("tensors", 24), self.count("keys", 13)

    def text(self, key: str) -> str | None:
        _, keys = self.sizes()
        for _ in range(keys):
            name = self.string()
            value = self.value(name, self.scalar("I"))
            if name == key:
                return value if isinstance(value, str) else None
        return None

    def header(self) -> GgufHeader:
        tensors, keys = self.sizes()
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.string()
            metadata[key] = self.value(key, self.scalar("I"))
        result: dict[str, TensorInfo] = {}
        for _ in range(tensors):
            name = self.string()
            if name in result:
                raise GgufError(f"{self.path} is damaged: it has two tensors {name}; download it again")
            sizes = [self.scalar("Q") for _ in range(self.dimensions(name))]
            result[name] = TensorInfo(self.scalar("I"), tuple(reversed(sizes)), self.scalar("Q"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise GgufError(f"{self.path} is damaged: general.alignment is {alignment!r}; download it again")
        begin = -(-self.at // alignment) * alignment
        placed = {name: TensorInfo(one.kind, one.shape, begin + one.offset) for name, one in result.items()}
        return GgufHeader(self.path, metadata, placed, self.size, begin, alignment)

    def take(self, length: int) -> int:
        """Skip ``length`` bytes and return where they begin."""
        begin = self.at
        if length > self.size - begin:
            raise GgufError(
                f"{self.path} is cut short or damaged: at byte {begin} it speaks of {length} more, and has "
                f"{self.size - begin}; download it again"
            )
        self.at = begin + length
        return begin

    def scalar(self, code: str) -> Any:
        layout = "<" + code
        return struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout)))[0]

    def count(self, what: str, minimum: int) -> int:
        """Read a number of items that take at least ``minimum`` bytes each."""
        number: int = self.scalar("Q")
        if number > MAX_NAMES or number * minimum > self.size - self.at:
            raise GgufError(
                f"{self.path} is cut short or damaged: it speaks of {number} {what}, and has {self.size - self.at} "
                "bytes left; download it again"
            )
        return number

    def dimensions(self, name: str) -> int:
        number: int = self.scalar("I")
        if not 1 <= number <= 4:
            raise GgufError(f"{self.path} is damaged: {name} has {number} dimensions; download it again")
        return number

    def string(self) -> str:
        length = self.scalar("Q")
        begin = self.take(length)
        return self.data[begin : begin + length].decode("utf-8")

    def value(self, key: str, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise GgufError(f"{self.path} is damaged: {key} is of the unknown type {kind}; download it again")
        inner = self.scalar("I")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            number = self.count(f"elements of {key}", struct.calcsize("<" + code))
            layout = f"<{number}{code}"
            return list(struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout))))
        if inner == _STRING:
            return [self.string() for _ in range(self.count(f"elements of {key}", 8))]
        raise GgufError(f"{self.path}: {key} is a list of type {inner}, which is not read; convert the model again")
