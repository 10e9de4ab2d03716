"""Checkpoints of ``quant_method: bitsandbytes`` (https://github.com/bitsandbytes-foundation/bitsandbytes).

``load_in_4bit`` (QLoRA, arXiv 2305.14314): a weight, row after row, is cut into blocks of ``blocksize`` numbers.
``weight`` uint8 [numbers / 2, 1] has two codes a byte, the high half first, of the table ``weight.quant_map`` f32 [16],
NF4's or FP4's. ``weight.absmax`` is the factor of each block: f32, or with double quantization uint8, codes of
``weight.nested_quant_map`` f32 [256], times ``weight.nested_absmax`` of each ``nested_blocksize`` blocks, plus
``nested_offset``. ``weight.quant_state.bitsandbytes__nf4`` (or ``fp4``) is a JSON object of these sizes, as bytes. No
kernel multiplies with such a table, so that these weights are read as floats.

``load_in_8bit`` (LLM.int8, arXiv 2208.07339): ``weight`` int8, and ``SCB`` f32 [outputs], the largest magnitude of each
output. ``weight_format`` is 0 where the weight is not in tiles. Inputs stay in floats here, so that
``llm_int8_threshold`` has nothing to keep apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from kernels.contract.errors import ConfigError, LoadError
from kernels.weights.quantization.scheme import Files, Scheme, StoredTensor
from kernels.weights.quantization.weights import Int8Weight, QuantizedWeight
from kernels.weights.tensors import TensorSpec

__all__ = ["BitsAndBytes"]

_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096, 32)
"""Numbers of a block that bitsandbytes has, its default first."""
_NESTED = 256
_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")


class _State(msgspec.Struct):
    """What is said of a weight beside its tensors."""

    shape: list[int]
    blocksize: int
    nested_blocksize: int = _NESTED
    nested_offset: float | None = None


class BitsAndBytes(Scheme):
    """``settings``: quantization_config. Raises ConfigError."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        four, eight = (bool(settings.get(f"load_in_{bits}bit", settings.get(f"_load_in_{bits}bit"))) for bits in (4, 8))
        if four == eight:
            raise ConfigError("quantization_config: one of load_in_4bit and load_in_8bit must be true")
        storage = settings.get("bnb_4bit_quant_storage") or "uint8"
        if four and storage != "uint8":
            raise ConfigError(
                f"quantization_config: bnb_4bit_quant_storage {storage!r} is not supported; supported is uint8"
            )
        self._four = four
        self.name = "bitsandbytes 4 bit" if four else "bitsandbytes 8 bit"

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor] | None:
        name, count = weight.name, math.prod(weight.shape)
        if not self._four:
            scales = StoredTensor(("F32",), ((weight.shape[0],),))
            return {
                name: StoredTensor(("I8",), (weight.shape,)),
                f"{weight.module}.SCB": scales,
                f"{weight.module}.weight_format": StoredTensor(("U8",), ((),), optional=True),
            }
        blocks = [-(-count // size) for size in _BLOCKS]
        return {
            name: StoredTensor(("U8",), ((-(-count // 2), 1),)),
            f"{name}.absmax": StoredTensor(("F32", "U8"), tuple((size,) for size in blocks)),
            f"{name}.quant_map": StoredTensor(("F32",), ((16,),)),
            f"{name}.nested_absmax": StoredTensor(
                ("F32",), tuple((-(-size // nested),) for size in blocks for nested in _BLOCKS), optional=True
            ),
            f"{name}.nested_quant_map": StoredTensor(("F32",), ((256,),), optional=True),
            **{f"{name}.{state}": StoredTensor(("U8",), (), optional=True) for state in _STATES},
        }

    def read(self, files: Files, weight: TensorSpec) -> QuantizedWeight | Tensor:
        if self._four:
            return _floats(files, weight)
        order = f"{weight.module}.weight_format"
        if files.has(order) and (found := int(files.read(order))):
            raise LoadError(
                f"{order} is {found}, an order of tiles that is not supported; supported is 0, row after row: save the "
                "model with a newer bitsandbytes"
            )
        scales = files.read(f"{weight.module}.SCB").float() / 127
        return Int8Weight(files.read(weight.name), scales, activation=None)


def _floats(files: Files, weight: TensorSpec) -> Tensor:
    """The weight in float32. Raises LoadError."""
    name, codes, absmax = weight.name, files.read(weight.name).flatten(), files.read(f"{weight.name}.absmax")
    state = _state(files, weight, absmax)
    if state.nested_offset is not None:
        table, outer = files.read(f"{name}.nested_quant_map"), files.read(f"{name}.nested_absmax")
        if -(-len(absmax) // state.nested_blocksize) != len(outer):
            raise LoadError(f"{name}.nested_absmax does not have a number for each {state.nested_blocksize} blocks")
        wide = outer.repeat_interleave(state.nested_blocksize)[: len(absmax)]
        absmax = table[absmax.int()] * wide + state.nested_offset
    table = files.read(f"{name}.quant_map")
    pairs = torch.stack((table[(codes >> 4).int()], table[(codes & 15).int()]), 1).flatten()
    count = math.prod(weight.shape)
    factors = absmax.repeat_interleave(state.blocksize)[:count]
    return pairs[:count].mul_(factors).view(weight.shape)


def _state(files: Files, weight: TensorSpec, absmax: Tensor) -> _State:
    """The sizes of a weight with the factors ``absmax``, and an offset where these are codes. Raises LoadError."""
    name, count, blocks, nested = weight.name, math.prod(weight.shape), len(absmax), absmax.dtype == torch.uint8
    stored = next((f"{name}.{state}" for state in _STATES if files.has(f"{name}.{state}")), None)
    if stored is None:
        if nested:
            raise LoadError(
                f"{name}.{_STATES[0]} is missing, which has the nested_offset of {name}.absmax; download the "
                "checkpoint again"
            )
        size = next(size for size in _BLOCKS if -(-count // size) == blocks)
        return _State(list(weight.shape), size)
    try:
        state = msgspec.json.decode(bytes(files.read(stored).tolist()), type=_State)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise LoadError(f"{stored} cannot be read ({error}); download the checkpoint again") from error
    if state.blocksize not in _BLOCKS or state.nested_blocksize not in _BLOCKS:
        raise LoadError(f"{stored} has a blocksize of {state.blocksize}, or in it one of {state.nested_blocksize}")
    if tuple(state.shape) != weight.shape or -(-count // state.blocksize) != blocks:
        raise LoadError(
            f"{stored} is of a weight {state.shape} in blocks of {state.blocksize}, and {name} is {list(weight.shape)} "
            f"with {blocks} blocks: check that both come from one model"
        )
    if not nested:
        state.nested_offset = None
    elif state.nested_offset is None or not math.isfinite(state.nested_offset):
        raise LoadError(f"{stored} has no nested_offset, which {name}.absmax needs; download the checkpoint again")
    return state
