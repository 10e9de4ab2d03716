"""The instructions that turn packed numbers into floating point, one by one, for every number there is. No GPU."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from kernels.devices.cuda.matmul.number_conversions import (
    BYTES,
    EIGHTHS,
    NIBBLES,
    PIECES,
    SHIFTS,
    WHOLE,
    conversions,
    wide_conversion,
)

BF16, FP16 = torch.bfloat16, torch.float16


def floats(register: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """[n] of 32 bits -> [n, 2]"""
    return torch.from_numpy(register.astype(np.uint32).view(np.int16).reshape(-1, 2).copy()).view(dtype)


def bits(numbers: torch.Tensor) -> np.ndarray:
    return numbers.contiguous().view(torch.int16).numpy().view(np.uint32).reshape(-1)


def permuted(low: np.ndarray, high: np.ndarray, selector: int) -> np.ndarray:
    both = low | high << np.uint64(32)
    found = np.zeros_like(low)
    for place in range(4):
        byte = both >> np.uint64(8 * (selector >> 4 * place & 15)) & np.uint64(255)
        found |= byte << np.uint64(8 * place)
    return found


def run(code: str, **given: np.ndarray) -> dict[str, np.ndarray]:
    """PTX, what ``kernels.devices.cuda.matmul.number_conversions`` uses of it, on registers of 32 bits."""
    held = {f"${name[1:]}": value.astype(np.uint64) for name, value in given.items()}
    mask = np.uint64(0xFFFFFFFF)

    def read(name: str) -> np.ndarray:
        if name in held:
            return held[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(len(next(iter(held.values()))), number, dtype=np.uint64)

    for line in re.sub(r"\.reg [^;]*;", "", code.strip("{ }")).split(";"):
        if not line.strip():
            continue
        name, operands = line.split(maxsplit=1)
        if halves := re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", operands.strip()):
            assert name == "mov.b32"
            for place, half in enumerate(halves.groups()[:2]):
                held[half] = read(halves[3]) >> np.uint64(16 * place) & np.uint64(0xFFFF)
            continue
        target, *names = [operand.strip() for operand in operands.split(",")]
        values = [read(operand) for operand in names]
        if name == "mov.b32":
            found = values[0]
        elif name == "shl.b32":
            found = values[0] << values[1]
        elif name == "shr.b32":
            found = values[0] >> values[1]
        elif name == "cvt.rn.f16x2.e4m3x2":
            eighths = torch.from_numpy(values[0].astype(np.uint16).view(np.uint8).copy()).view(torch.float8_e4m3fn)
            found = bits(eighths.to(FP16))
        elif name == "cvt.f32.f16":
            half = torch.from_numpy(values[0].astype(np.uint16).view(np.int16).copy()).view(FP16)
            found = half.float().numpy().view(np.uint32)
        elif name == "and.b32":
            found = values[0] & values[1]
        elif name == "xor.b32":
            found = values[0] ^ values[1]
        elif name == "lop3.b32":
            assert names[3] == "0xea"
            found = values[0] & values[1] | values[2]
        elif name == "prmt.b32":
            found = permuted(values[0], values[1], int(names[2], 0))
        elif name == "add.rn.f32":
            one, two = (value.astype(np.uint32).view(np.float32) for value in values)
            found = (one + two).view(np.uint32)
        else:
            assert name in ("fma.rn.bf16x2", "fma.rn.f16x2"), name
            dtype = BF16 if "bf" in name else FP16
            a, b, c = (floats(value, dtype).double() for value in values)
            found = bits((a * b + c).to(dtype))
        held[target] = found.astype(np.uint64) & mask
    return held


WORDS = np.arange(1 << 16, dtype=np.uint64)
TWO = WORDS | (WORDS[::-1] << np.uint64(16))  # two words in a register


def number(words: np.ndarray, kind: int, piece: int) -> torch.Tensor:
    """What ``piece`` of each word stands for."""
    if kind == NIBBLES:
        return torch.from_numpy((words >> np.uint64(SHIFTS[piece]) & np.uint64(15)).astype(np.float64))
    byte = torch.from_numpy((words >> np.uint64(8 * piece) & np.uint64(255)).astype(np.uint8))
    if kind == WHOLE:
        return byte.double() - 128
    return byte.view(torch.int8).double() if kind == BYTES else byte.view(torch.float8_e4m3fn).double()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(NIBBLES, BF16), (NIBBLES, FP16), (WHOLE, BF16), (WHOLE, FP16), (BYTES, BF16), (BYTES, FP16), (EIGHTHS, BF16)],
)
def test_every_number_of_a_word(kind, dtype):
    codes = conversions(kind, dtype)
    assert codes is not None
    assert len(codes) == PIECES[kind]
    base = {BF16: 0xC300, FP16: 0xE400}[dtype]
    for piece, code in enumerate(codes):
        for zero in (0, 5, 16) if kind == NIBBLES else (0,):
            minus = np.full_like(TWO, (base + zero) * 0x10001)
            found = floats(run(code, r1=TWO, r2=minus)["$0"], dtype).double()
            for half, words in enumerate((WORDS, WORDS[::-1])):
                expected = number(words, kind, piece) - zero
                real = ~expected.isnan()  # there is no NaN among the weights that the kernels take
                assert torch.equal(found[real, half], expected[real])


@pytest.mark.parametrize("kind", [BYTES, EIGHTHS])
def test_every_byte_in_float32(kind):
    code, offset = wide_conversion(kind)
    words = WORDS << np.uint64(16) | WORDS[::-1]
    held = run(code, r4=words)
    for place in range(4):
        found = torch.from_numpy(held[f"${place}"].astype(np.uint32).view(np.float32).copy()).double() + offset
        expected = number(words >> np.uint64(8 * place), kind, 0)
        real = ~expected.isnan()
        assert torch.equal(found[real], expected[real])
