"""Importing a module never comes back to it: what the import linter allows within a package may still be a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def _modules() -> dict[str, Path]:
    found = {}
    for package in ("app", "actors", "kernels", "telemetry"):
        for file in (ROOT / package).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def _run_at_import(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If):
            if ast.unparse(node.test) != "TYPE_CHECKING":
                yield from _run_at_import(node.body)
            yield from _run_at_import(node.orelse)
        elif isinstance(node, ast.Try):
            yield from _run_at_import([*node.body, *node.orelse, *node.finalbody])
            for handler in node.handlers:
                yield from _run_at_import(handler.body)
        elif isinstance(node, ast.With | ast.ClassDef):
            yield from _run_at_import(node.body)


def _imported(node: ast.Import | ast.ImportFrom, modules: dict[str, Path]) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & modules.keys()
    assert node.level == 0, "modules are imported by their whole names"
    names = {f"{node.module}.{alias.name}" for alias in node.names}
    return (names & modules.keys()) or ({node.module or ""} & modules.keys())


def test_no_module_imports_itself_in_a_circle() -> None:
    modules = _modules()
    assert len(modules) > 300
    graph = {
        name: {other for node in _run_at_import(ast.parse(file.read_text()).body) for other in _imported(node, modules)}
        - {name}
        for name, file in modules.items()
    }

    TopologicalSorter(graph).prepare()  # raises CycleError with the circle
