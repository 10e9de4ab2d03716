"""A package's docstring that lists its modules lists all of them, and none that is gone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kernels.models.registry import BUILT_IN

ROOT = Path(__file__).parents[1]


def _pages() -> dict[str, str]:
    """The docstrings that name a module, by package."""
    found = {}
    for package in ("actors", "app", "kernels", "telemetry"):
        for file in sorted((ROOT / package).rglob("__init__.py")):
            page = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            if _named(page):
                found[file.parent.relative_to(ROOT).as_posix()] = page
    return found


def _named(page: str) -> set[str]:
    return set(re.findall(r"\b\w+\.py\b", page))


PAGES = _pages()
FAMILIES = {f"{entry.module.rpartition('.')[2]}.py" for entry in BUILT_IN}
"""Their page is the registry."""


def test_packages_with_a_page_are_found() -> None:
    assert len(PAGES) > 30
    assert {"actors/scheduling", "kernels/execution", "kernels/models"} <= PAGES.keys()


@pytest.mark.parametrize("package", PAGES)
def test_a_package_page_lists_exactly_its_modules(package: str) -> None:
    folder, named = ROOT / package, _named(PAGES[package])
    modules = {file.name for file in folder.glob("*.py")} - {"__init__.py", "__main__.py"}
    if package == "kernels/models":
        modules -= FAMILIES
    assert modules - named == set(), f"the docstring of {package} lacks modules"
    around = {file.name for file in folder.parent.glob("*.py")} | {file.name for file in folder.rglob("*.py")}
    assert named - around == set(), f"the docstring of {package} names modules that are gone"
