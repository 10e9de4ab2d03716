"""Reads a GGUF file's metadata, and says which key is wrong."""

from __future__ import annotations

import math
import struct
from functools import cached_property
from typing import Any

from kernels.contract.errors import GgufError
from kernels.contract.limits import MAX_LAYERS, MAX_SIZE
from kernels.weights.gguf.header import GgufHeader

__all__ = ["Metadata"]


class Metadata:
    """The metadata of ``header``. Keys that begin with a dot are the architecture's own, as ``.block_count`` of
    ``llama.block_count``. Every method raises GgufError, naming the key."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.name = self.text("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is stored."""
        return self.header.metadata.get(self._key(key), default)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; of one for each layer, the only one that is not 0."""
        value = self.get(key, default)
        if isinstance(value, list) and all(type(one) is int for one in value):
            own = {one for one in value if one}
            value = own.pop() if len(own) == 1 else None
        if type(value) is not int or value < 1:
            raise self.wrong(key, "a whole number of at least 1")
        if value > MAX_SIZE:
            raise self.wrong(key, f"at most {MAX_SIZE}")
        return value

    def count(self, key: str, default: int = 0) -> int:
        """A whole number, which may be 0."""
        value = self.get(key, default)
        if type(value) is not int or value < 0:
            raise self.wrong(key, "a whole number")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(key, "a number")
        return value

    def positive(self, key: str, default: float) -> float:
        """A finite number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise self.wrong(key, "above 0")
        return value

    def layers(self, key: str) -> list[Any] | None:
        """A value for each layer, those of layers that draft left out; None: there is no such list."""
        value = self.get(key)
        if not isinstance(value, list):
            return None
        if len(value) < self.block_count:
            raise self.wrong(key, f"a value for each of {self.block_count} layers")
        return value[: self.block_count]

    def flags(self, key: str) -> list[bool] | None:
        """Yes or no for each layer, as ``layers``."""
        values = self.layers(key)
        if values is None:
            return None
        if not all(type(one) in (bool, int) and one in (0, 1) for one in values):
            raise self.wrong(key, f"yes or no for each of {self.block_count} layers")
        return [bool(one) for one in values]

    def numbers(self, key: str) -> list[float] | None:
        """A finite number for each layer, where the file may have one for all; None: it has none."""
        if self.get(key) is None:
            return None
        values = self.layers(key) or [self.number(key, 0.0)] * self.block_count
        if not all(type(one) in (int, float) and math.isfinite(one) for one in values):
            raise self.wrong(key, f"a number for each of {self.block_count} layers")
        return values

    @cached_property
    def block_count(self) -> int:
        """Layers of the model, without those at the end that draft tokens. The last of them has tensors in the file, so
        that the number may be counted up to."""
        drafting = self.count(".nextn_predict_layers")
        whole = self.size(".block_count")
        if drafting >= whole:
            raise self.wrong(".nextn_predict_layers", f"less than the {whole} layers of block_count")
        layers, tensors = whole - drafting, self.header.tensors
        last = f"blk.{layers - 1}."
        if layers > len(tensors) or not any(tensor.startswith(last) for tensor in tensors):
            raise GgufError(
                f"{self.header.path} has no tensor {last}*, the last of {self.name}.block_count {layers} layers: it is "
                "no whole model; download it again"
            )
        if layers > MAX_LAYERS:
            raise self.wrong(".block_count", f"at most {MAX_LAYERS}")
        return layers

    @property
    def head_dim(self) -> int:
        """The size of a head; of files that do not say it, what the output of attention reads over the heads."""
        if self.get(".attention.key_length") is not None:
            return self.size(".attention.key_length")
        heads, outputs = self.size(".attention.head_count"), self.header.tensors.items()
        output = next((info for name, info in outputs if name.endswith(".attn_output.weight")), None)
        hidden = self.size(".embedding_length")
        width = hidden if output is None or len(output.shape) != 2 else output.shape[1]
        return self.size(".attention.key_length", width // heads)

    def has(self, ending: str) -> bool:
        """Whether a tensor's name ends so."""
        return any(name.endswith(ending) for name in self.header.tensors)

    def floats(self, name: str, count: int) -> tuple[float, ...]:
        """A small tensor, which must be so many numbers in float32."""
        stored, path = self.header.tensors.get(name), self.header.path
        if stored is None:
            raise GgufError(f"{path} has no tensor {name}; download it again")
        if stored.kind != 0 or stored.shape != (count,) or stored.offset + 4 * count > self.header.size:
            raise GgufError(
                f"{path}: {name} must be {count} float32 inside the file, and is of type {stored.kind} and shape "
                f"{list(stored.shape)}; download it again"
            )
        with path.open("rb") as file:
            file.seek(stored.offset)
            return struct.unpack(f"<{count}f", file.read(4 * count))

    def refused(self, what: str) -> GgufError:
        """The error of a file that has ``what``."""
        return GgufError(
            f"{self.header.path} has {what}, which is not read from GGUF files of {self.name}; give the directory of "
            "its safetensors files"
        )

    def wrong(self, key: str, wanted: str) -> GgufError:
        """The error of a value that is not ``wanted``."""
        value = self.get(key)
        stated = "is missing" if value is None else f"is {str(value)[:80]!r}"
        return GgufError(
            f"{self.header.path}: {self._key(key)} must be {wanted}, and {stated}; convert the model again with a "
            "newer llama.cpp, or download it again"
        )

    def _key(self, key: str) -> str:
        return f"{self.name}{key}" if key.startswith(".") else key
