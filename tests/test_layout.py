"""The rules of the tests themselves: names, imports, and the lanes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from tests.kits.fast_lane import FAST
from tests.kits.isa_lane import ISA

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))
LONGEST_NAME = 70


def test_names_of_tests_have_at_most_70_characters() -> None:
    names = [
        (file.name, node.name)
        for file in FILES
        if file.name.startswith("test_")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    assert len(names) > 2000
    assert [(file, name) for file, name in names if len(name) > LONGEST_NAME] == []


def test_nothing_is_imported_from_a_test_file_or_a_conftest() -> None:
    found = [
        (file.relative_to(TESTS).as_posix(), node.module)
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.startswith("tests.")
        and node.module.rpartition(".")[2].startswith(("test_", "conftest"))
    ]
    assert found == []


def test_what_needs_native_operators_runs_on_each_instruction_set() -> None:
    isa = {TESTS / name for name in ISA}
    own = re.compile(r"^from tests\.kits\.native import", re.MULTILINE)
    native = [file for file in FILES if file.name.startswith("test_") and own.search(file.read_text(encoding="utf-8"))]
    assert native
    assert [file for file in native if isa.isdisjoint((file, *file.parents))] == []


@pytest.mark.parametrize("name", [*FAST, *ISA])
def test_a_name_of_a_lane_exists(name: str) -> None:
    assert (TESTS / name).exists()


def test_the_paths_in_the_ci_script_exist() -> None:
    script = (TESTS.parent / ".ci/run").read_text(encoding="utf-8")
    paths = re.findall(r"tests/[\w/*.]+", script)
    assert len(paths) > 5
    assert [path for path in paths if not list(TESTS.parent.glob(path))] == []


def test_the_hooks_are_local_and_run_what_ci_runs() -> None:
    root = TESTS.parent
    repositories = yaml.safe_load((root / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    tools = {hook["entry"].split()[0] for hook in repositories[0]["hooks"]}
    script = (root / ".ci/run").read_text(encoding="utf-8")
    assert tools == {"ruff", "mypy", "lint-imports"}
    assert all(re.search(rf"^    {tool}\b", script, re.MULTILINE) for tool in tools)


def test_this_test_is_in_the_fast_lane(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("fast") is not None


MAX_PARAMETERS = 6
PACKAGES = ("actors", "app", "kernels", "telemetry")
OPERATORS = (
    "kernels/devices/",
    "kernels/core/noise.py",
    "kernels/sampling/nucleus.py",
    "kernels/sampling/penalties.py",
)
"""Where parameters are the operands of one operator."""
EXCUSED = ("should_sample", "__call__")
"""OpenTelemetry's signature, and decoder layers: operands, too."""


def test_functions_have_at_most_6_positional_parameters() -> None:
    """More are keyword-only, so that each call names them (decision 0047)."""
    root, found, seen = TESTS.parent, [], 0
    for file in (file for package in PACKAGES for file in (root / package).rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if path.startswith(OPERATORS):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in EXCUSED:
                names = [each.arg for each in node.args.posonlyargs + node.args.args if each.arg not in ("self", "cls")]
                seen += 1
                if len(names) > MAX_PARAMETERS:
                    found.append(f"{path}: {node.name}")
    assert seen > 3000
    assert found == []
