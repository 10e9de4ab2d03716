"""A kernel in Gluon for Triton's interpreter, as Gluon has none: its source with the layouts left out, and with plain
arithmetic in place of PTX. A layout says where a number is, never which.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import kernels.devices.cuda.attention.decode_persistent
import kernels.devices.cuda.attention.prefill_warp_specialized
import kernels.devices.cuda.attention.verify_sm90
import kernels.devices.cuda.matmul.gemm_small_tma
import kernels.devices.cuda.matmul.gemv_quantized
import kernels.devices.cuda.matmul.packed_arithmetic
import kernels.devices.cuda.matmul.rope_cache_epilogue
import kernels.devices.cuda.moe.gemv_mxfp4

__all__ = [
    "EMULATED",
    "bulk_in_triton",
    "drafts_in_triton",
    "in_triton",
    "micro_in_triton",
    "single_in_triton",
    "specialized_in_triton",
    "spread_in_triton",
]

EMULATED = """
@triton.jit
def low_half(word):
    return (word << 16) >> 16


@triton.jit
def number(bytes_, place, signed: tl.constexpr):
    found = (bytes_ >> (8 * place)) & 255
    return (found ^ 128) - 128 if signed else found


@triton.jit
def lower(numbers, bytes_, total, signed: tl.constexpr):
    return total + low_half(numbers) * number(bytes_, 0, signed) + (numbers >> 16) * number(bytes_, 1, signed)


@triton.jit
def upper(numbers, bytes_, total, signed: tl.constexpr):
    return total + low_half(numbers) * number(bytes_, 2, signed) + (numbers >> 16) * number(bytes_, 3, signed)


@triton.jit
def product(word, low, high, place: tl.constexpr):
    byte = ((word >> (8 * place)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    half = ((low if place < 2 else high) >> (16 * (place % 2))).to(tl.int16).to(tl.float16, bitcast=True)
    return byte.to(tl.float32) * half.to(tl.float32)


@triton.jit
def by_eighths(word, low, high):
    first = product(word, low, high, 0) + product(word, low, high, 1)
    return tl.sum(first + (product(word, low, high, 2) + product(word, low, high, 3)), 2)


@triton.jit
def halves(first, second):
    low, high = first.to(tl.float16).to(tl.int16, bitcast=True), second.to(tl.float16).to(tl.int16, bitcast=True)
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def micro(word, pair, place: tl.constexpr):
    bits = (word >> (4 * place)) & 0x000F000F
    low, high = bits & 15, (bits >> 16) & 15
    found = tl.zeros_like(word).to(tl.float32)
    for half in tl.static_range(2):
        code = high if half == 1 else low
        number = (((code & 7) << 9) | ((code & 8) << 12)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        found += number * (pair >> (16 * half)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return found


@triton.jit
def by_e2m1(word, one, two, three, four):
    return tl.sum((micro(word, one, 0) + micro(word, two, 1)) + (micro(word, three, 2) + micro(word, four, 3)), 2)
"""

COPIED = """
from dataclasses import dataclass
from operator import index

import numpy as np
from triton.runtime.interpreter import TensorHandle


@dataclass
class TensorDescriptor:
    base: torch.Tensor
    shape: list
    strides: list
    block_shape: list
    layout: int

    def read(self, place):
        begin = [index(at) for at in place]
        found = self.base.as_strided(self.shape, self.strides)
        for dim, (at, most) in enumerate(zip(begin, self.block_shape)):
            found = found.narrow(dim, min(at, found.shape[dim]), max(0, min(most, found.shape[dim] - at)))
        block = torch.zeros(self.block_shape)
        block[: found.shape[0], : found.shape[1]] = found
        return block.numpy()


class Barrier:
    # A phase ends when the bytes that were announced are there; only then may they be read.

    made = []

    def __init__(self):
        self.due, self.brought, self.ended, self.waited = None, 0, 0, 0
        self.made.append(self)

    def arrive(self, bytes_=0):
        self.brought += bytes_
        if self.due is not None and self.brought == self.due:
            self.due, self.brought, self.ended = None, 0, self.ended + 1

    @classmethod
    def asked(cls):
        # For the barriers of all programs: the number of waits, and the bytes that arrived.
        return sum(bar.waited for bar in cls.made), sum(bar.ended for bar in cls.made)


@dataclass
class Place:
    of: object
    number: int
    turned: bool = False

    def permute(self, order):
        return Place(self.of, self.number, order == (1, 0))

    def store(self, found):
        self.value[...] = found.handle.data

    @property
    def value(self):
        found = self.of[self.number]
        return found.T if self.turned else found


class Pieces:
    # A block lies in memory in panels of as many columns as a piece has.

    def __init__(self, of, rows, columns):
        self.of, self.rows, self.columns = of, rows, columns

    def __getitem__(self, number):
        down, panels = self.of.shape[1] // self.rows, self.of.shape[2] // self.columns
        block, panel, piece = number // down // panels, number // down % panels, number % down
        place = self.of[block, piece * self.rows :, panel * self.columns :]
        return place[: self.rows, : self.columns]


class Shared:
    def __init__(self, kind, shape, layout, of=None):
        self.shape = [index(size) for size in shape]
        whole = len(shape) == 3 and of is None
        self.of = np.full(self.shape, np.nan, np.float32) if whole else {} if of is None else of

    def _reinterpret(self, kind, shape, layout):
        rows, columns = index(shape[1]), index(shape[2])
        return Shared(kind, shape, layout, Pieces(self.of, rows, columns))

    def index(self, number):
        assert 0 <= index(number) < self.shape[0]
        return Place(self.of, index(number))


class mbarrier:
    MBarrierLayout = staticmethod(lambda: None)

    @staticmethod
    def init(bar, count):
        bar.of[bar.number] = Barrier()

    @staticmethod
    def expect(bar, bytes_, pred):
        if pred:
            assert bar.value.due is None
            bar.value.due = index(bytes_)
            bar.value.arrive()

    @staticmethod
    def wait(bar, phase):
        assert bar.value.ended % 2 != index(phase), "a phase that has not ended"
        bar.value.waited += 1


class tma:
    @staticmethod
    def async_copy_global_to_shared(described, place, bar, to, pred):
        if pred:
            to.value[...] = described.read(place)
            bar.value.arrive(described.base.element_size() * to.value.size)


def warpgroup_mma(a, b, total, is_async):
    return tl.tensor(TensorHandle(total.handle.data + a.value @ b.value, tl.float32), total.type)


def warpgroup_mma_wait(left, deps):
    return deps[0] if len(deps) == 1 else deps


def fence_async_shared():
    pass
"""

SPECIALIZED = """
import threading


@triton.jit
def _exp2(x):
    return tl.exp2(x)


class Baton:
    # One partition runs at a time, until it waits for what is not there.

    def __init__(self, partitions):
        self.condition, self.left, self.at, self.idle = threading.Condition(), set(range(partitions)), 0, 0

    def run(self, number, function, given, failed):
        with self.condition:
            try:
                self.condition.wait_for(lambda: self.at == number)
                function(*given)
            except BaseException as error:
                failed.append(error)
            self.left.discard(number)
            self.idle = 0
            self.hand_on()

    def hand_on(self):
        self.at = next((other for other in sorted(self.left) if other > self.at), min(self.left, default=-1))
        self.condition.notify_all()

    def wait(self, there):
        own = self.at
        while not there():
            self.idle += 1
            assert self.idle <= 2 * len(self.left) + 2, "all wait"
            self.hand_on()
            self.condition.wait_for(lambda: self.at == own)
        self.idle = 0


class Counted:
    # A phase ends when all that were counted have arrived and what they announced is there.

    baton = None

    def __init__(self, count):
        self.count, self.left, self.due, self.ended = count, count, 0, 0

    def arrive(self, bytes_=0):
        self.left -= 1
        self.due += bytes_
        assert self.left >= 0
        self.end()

    def bring(self, bytes_):
        self.due -= bytes_
        self.end()

    def end(self):
        if self.left == 0 and self.due == 0:
            self.left, self.ended = self.count, self.ended + 1


class mbarrier:
    MBarrierLayout = staticmethod(lambda: None)

    @staticmethod
    def init(bar, count):
        bar.of[bar.number] = Counted(count)

    @staticmethod
    def expect(bar, bytes_):
        bar.value.arrive(index(bytes_))

    @staticmethod
    def arrive(bar, count):
        bar.value.arrive()

    @staticmethod
    def wait(bar, phase, pred=True):
        if pred:
            phase = index(phase)
            assert phase in (0, 1)
            Counted.baton.wait(lambda: bar.value.ended % 2 != phase)


class tma:
    @staticmethod
    def async_copy_global_to_shared(described, place, bar, to):
        to.value[...] = described.read(place)
        bar.value.bring(2 * to.value.size)


def warpgroup_mma(a, b, total, use_acc=True, is_async=False):
    left = a.value if isinstance(a, Place) else a.handle.data.astype(np.float32)
    return tl.tensor(TensorHandle((total.handle.data if use_acc else 0) + left @ b.value, tl.float32), total.type)


def specialize(partitions, warps, registers):
    Counted.baton, failed = Baton(len(partitions)), []
    threads = [
        threading.Thread(target=Counted.baton.run, args=(number, function, given, failed))
        for number, (function, given) in enumerate(partitions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
"""


class _Plain(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        names = {"gl": "tl", "gluon": "triton"}
        return ast.copy_location(ast.Name(names.get(node.id, node.id), node.ctx), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if called == "convert_layout":
            return self.visit(node.args[0])
        if called.endswith("Layout") and called != "MBarrierLayout":
            return ast.Constant(0)
        if called == "allocate_shared_memory":
            node.func = ast.Name("Shared", ast.Load())
        if called == "thread_barrier":
            node.func.attr = "debug_barrier"
        if called == "warp_specialize":
            node.func = ast.Name("specialize", ast.Load())
        if called == "zeros":
            del node.args[2:]
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != "layout"]
        return self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> ast.AST | None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        hidden = (
            "triton.experimental",
            "kernels.devices.cuda.matmul.packed_arithmetic",
            "kernels.devices.cuda.matmul.rope_cache_epilogue",
            "triton.language",
            "__future__",
        )
        return None if (node.module or "").startswith(hidden) else node


def single_in_triton(directory: Path) -> ModuleType:
    """``kernels.devices.cuda.matmul.gemv_quantized`` for the CPU, its source in ``directory``, where the interpreter
    looks for it."""
    return in_triton(
        directory,
        "single_in_triton",
        EMULATED,
        kernels.devices.cuda.matmul.packed_arithmetic,
        kernels.devices.cuda.matmul.rope_cache_epilogue,
        kernels.devices.cuda.matmul.gemv_quantized,
    )


def micro_in_triton(directory: Path) -> ModuleType:
    """``kernels.devices.cuda.moe.gemv_mxfp4`` in the same way."""
    return in_triton(
        directory,
        "micro_in_triton",
        EMULATED,
        kernels.devices.cuda.matmul.packed_arithmetic,
        kernels.devices.cuda.moe.gemv_mxfp4,
    )


def bulk_in_triton(directory: Path) -> ModuleType:
    """``kernels.devices.cuda.matmul.gemm_small_tma`` in the same way, with copies that are there at once, and
    barriers that count them."""
    return in_triton(directory, "bulk_in_triton", COPIED, kernels.devices.cuda.matmul.gemm_small_tma)


def spread_in_triton(directory: Path) -> ModuleType:
    """``kernels.devices.cuda.attention.decode_persistent`` in the same way."""
    return in_triton(directory, "spread_in_triton", COPIED, kernels.devices.cuda.attention.decode_persistent)


def drafts_in_triton(directory: Path) -> ModuleType:
    """``kernels.devices.cuda.attention.verify_sm90`` in the same way."""
    return in_triton(directory, "drafts_in_triton", COPIED, kernels.devices.cuda.attention.verify_sm90)


def specialized_in_triton(directory: Path) -> ModuleType:
    """``kernels.devices.cuda.attention.prefill_warp_specialized`` in the same way, its partitions in threads, one of
    which runs at a time."""
    return in_triton(
        directory,
        "specialized_in_triton",
        COPIED + SPECIALIZED,
        kernels.devices.cuda.attention.prefill_warp_specialized,
    )


def in_triton(directory: Path, name: str, emulated: str, *modules: ModuleType) -> ModuleType:
    """The ``modules`` as one called ``name``, with the functions of ``emulated`` in place of theirs."""
    parts = [
        "import torch",
        "import triton",
        "import triton.language as tl",
        "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait",
        emulated,
    ]
    for module in modules:
        tree = ast.parse(inspect.getsource(module))
        tree.body = [
            part for part in tree.body if not (isinstance(part, ast.FunctionDef) and f"\ndef {part.name}(" in emulated)
        ]
        parts.append(ast.unparse(ast.fix_missing_locations(_Plain().visit(tree))))
    path = directory / f"{name}.py"
    path.write_text("\n".join(parts))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = found
    spec.loader.exec_module(found)
    return found
