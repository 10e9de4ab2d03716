"""Every argument is read by the code that it is for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from actors.engine.engine import Engine
from actors.options import ARGUMENTS, ArgumentError, Arguments
from actors.scheduling.config import PlannerConfig
from kernels.contract.config import RunnerConfig

ROOT = Path(__file__).parents[3]
DECLARED = ROOT / "actors/options"
NAMES = ("arguments", "_arguments", "a")
"""How the code names an object of Arguments: a parameter, an attribute, and the short name in configuration.py."""

REPLACED = {
    "config": "a file, whose arguments take its place",
    "api_key_file": "a file, whose keys are the values of api_key",
    "admin_api_key_file": "a file, whose key is the value of admin_api_key",
    "speculative_config": "an object, whose members are arguments",
    "compilation_config": "an object, whose members are arguments",
    "additional_config": "an object, whose members are arguments",
    "eplb_config": "an object, whose members are arguments",
}
"""Arguments whose value becomes that of others before there is an object of Arguments."""

COMPARED: dict[str, object] = {
    **dict.fromkeys(("attn_tp_size", "moe_tp_size", "world_size", "nprocs_per_node"), 7),  # follow from other sizes
    **dict.fromkeys(("enable_dp_lm_head", "dp_sampling"), True),  # always hold with enable_dp_attention
    "eplb_algorithm": "deepseek",  # the one of enable_eplb
    "export_metrics_to_file": True,  # holds with export_metrics_to_file_dir
}
"""Arguments that state what other arguments decide, each with a value that is refused where it does not hold."""


def _attributes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The last name of an object and the attribute that is read of it: (arguments, port) in ``self.arguments.port``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            match node.value:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    yield name, node.attr


def _trees(*packages: str) -> Iterator[tuple[Path, str, ast.AST]]:
    for file in (file for package in packages for file in sorted((ROOT / package).rglob("*.py"))):
        text = file.read_text(encoding="utf-8")
        yield file, text, ast.parse(text)


def _read_by_properties() -> dict[str, set[str]]:
    """By property or method of Arguments, all that it reads of the object."""
    found: dict[str, set[str]] = {}
    for _, _, tree in _trees("actors/options"):
        for group in ast.walk(tree):
            if isinstance(group, ast.ClassDef) and group.name.endswith("Arguments"):
                for method in group.body:
                    if isinstance(method, ast.FunctionDef):
                        found[method.name] = {name for owner, name in _attributes(method) if owner == "self"}
    return found


def _read_in(*packages: str) -> set[str]:
    """Arguments that these packages read, also through properties."""
    trees = (tree for file, _, tree in _trees(*packages) if not file.is_relative_to(DECLARED))
    found = {name for tree in trees for owner, name in _attributes(tree) if owner in NAMES}
    parts, todo = _read_by_properties(), set(found)
    while todo:
        todo = set().union(*(parts.get(name, set()) for name in todo)) - found
        found |= todo
    return found & {argument.field for argument in ARGUMENTS}


def test_every_argument_is_read_outside_of_its_declaration() -> None:
    read = _read_in("actors", "app", "kernels", "telemetry")
    assert len(read) > 150
    assert {argument.field for argument in ARGUMENTS} - read == {*REPLACED, *COMPARED}


def test_an_argument_that_only_the_app_reads_is_the_servers() -> None:
    """``Engine(...)`` refuses it, since it would have no effect there."""
    found = _read_in("app") - _read_in("actors", "kernels", "telemetry")
    if "admin_api_key" in found:
        found.add("admin_api_key_file")
    assert {argument.field for argument in ARGUMENTS if argument.server_only} == found


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"port": 3}, "port: .* leave it out, or use troupe serve"),
        ({"host": "0.0.0.0", "tool-call-parser": "hermes"}, "host: .*\ntool-call-parser: "),
        ({"uvicorn_log_level": "error"}, "uvicorn_log_level: .* use troupe serve"),
        ({"log_level": "error"}, "log_level: .*getLogger"),
        ({"shutdown_timeout": 3}, r"shutdown_timeout: .*engine\.drain"),
    ],
    ids=str,
)
def test_an_engine_refuses_options_of_a_server(given: dict[str, object], says: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{says}"):
        Engine(model="m", **given)


def test_an_engine_takes_what_it_reads_and_a_servers_arguments() -> None:
    assert Engine(model="m", api_key="a,b", port=None, is_embedding=True).arguments.api_keys == ("a", "b")
    assert Engine(arguments=Arguments(model_path="m", port=3)).arguments.port == 3


def test_properties_count_as_reads_of_what_they_are_made_of() -> None:
    parts = _read_by_properties()
    assert parts["exchange_mode"] == {"moe_a2a_backend", "deepep_mode"}
    assert "replica_size" in parts["workers"]


@pytest.mark.parametrize(
    ("config", "packages"), [(RunnerConfig, ("actors/workers", "kernels")), (PlannerConfig, ("actors/scheduling",))]
)
def test_every_field_of_a_configuration_is_read(config: type[msgspec.Struct], packages: tuple[str, ...]) -> None:
    """Most arguments reach the code in one of these, see :mod:`actors.engine.configuration`."""
    read = {
        name
        for file, text, tree in _trees(*packages)
        if file.name != "config.py" and (config.__name__ in text or "DrafterContext" in text)
        for owner, name in _attributes(tree)
        if owner in ("config", "_config")
    }
    assert set(config.__struct_fields__) - read == set()


@pytest.mark.parametrize("name", COMPARED)
def test_a_stated_value_that_does_not_hold_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name} "):
        Arguments(model_path="m", **{name: COMPARED[name]})
