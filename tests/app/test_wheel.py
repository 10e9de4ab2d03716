"""The wheel holds the included model and nothing that trains it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("app", "actors", "kernels", "telemetry", "tests", "pyproject.toml", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of the files in a wheel of this tree."""
    if importlib.util.find_spec("setuptools") is None or int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools 77 builds the wheel, and is not installed here")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in PARTS:
        part = ROOT / name
        if part.is_dir():
            shutil.copytree(part, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(part, source)
    environment = {**os.environ, "PATH": ""}  # no compiler: native libraries take minutes
    command = [sys.executable, "-c", BUILD, str(folder)]
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True)
    return set(zipfile.ZipFile(next(folder.glob("*.whl"))).namelist())


def test_wheel_holds_model_drafts_and_template(wheel: set[str]) -> None:
    box = ROOT / "app" / "understudy"
    files = [path for path in box.rglob("*") if path.suffix in {".safetensors", ".json", ".jinja"}]
    assert len(files) > 15
    assert {path.relative_to(ROOT).as_posix() for path in files} <= wheel


def test_wheel_holds_no_corpus_trainer_or_test(wheel: set[str]) -> None:
    ours = {name for name in wheel if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in ours} == {"app", "actors", "kernels", "telemetry"}
    assert {name for name in ours if name.startswith("app/understudy/") and name.endswith(".py")} == {
        "app/understudy/__init__.py",
        "app/understudy/adapters/__init__.py",
        "app/understudy/drafts/__init__.py",
    }
