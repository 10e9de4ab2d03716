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

import kernels.cuda.packed
import kernels.cuda.single
import kernels.cuda.standing

__all__ = ["single_in_triton"]

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
"""


class _Plain(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        names = {"gl": "tl", "gluon": "triton"}
        return ast.copy_location(ast.Name(names.get(node.id, node.id), node.ctx), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if called == "convert_layout":
            return self.visit(node.args[0])
        if called in ("BlockedLayout", "SliceLayout"):
            return ast.Constant(0)
        if called == "zeros":
            del node.args[2:]
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != "layout"]
        return self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> ast.AST | None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        hidden = ("triton.experimental", "kernels.cuda.packed", "triton.language", "__future__")
        return None if (node.module or "").startswith(hidden) else node


def single_in_triton(directory: Path) -> ModuleType:
    """``kernels.cuda.single`` for the CPU, its source in ``directory``, where the interpreter looks for it."""
    parts = [
        "import torch",
        "import triton",
        "import triton.language as tl",
        "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait",
        EMULATED,
    ]
    for module in (kernels.cuda.packed, kernels.cuda.single, kernels.cuda.standing):
        tree = ast.parse(inspect.getsource(module))
        tree.body = [
            part for part in tree.body if not (isinstance(part, ast.FunctionDef) and f"\ndef {part.name}(" in EMULATED)
        ]
        parts.append(ast.unparse(ast.fix_missing_locations(_Plain().visit(tree))))
    path = directory / "single_in_triton.py"
    path.write_text("\n".join(parts))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = found
    spec.loader.exec_module(found)
    return found
