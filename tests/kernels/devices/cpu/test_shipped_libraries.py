"""Libraries that a wheel brings: used with the sources and on the processors that they were made for, else ignored."""

from __future__ import annotations

import logging
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kernels.devices.cpu.device import CpuDevice
from kernels.devices.cpu.native import library
from kernels.devices.cpu.native.library import Source

ROOT = Path(__file__).parents[4]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A small library, and an empty folder of the wheel's and an empty cache for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "SHIPPED", tmp_path / "compiled")
    monkeypatch.setattr(library, "_refused", set())
    library.SHIPPED.mkdir()
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "main.cpp").write_text("int answer = 42;\n")
    return Source(folder / "main.cpp", ("-shared", "-fPIC"), "cpu-little")


class Ready:
    """A loaded library, of a processor that can run it or not."""

    able = True

    def __init__(self, path: Path) -> None:
        if path.read_bytes() == b"broken":
            raise OSError("file too short")
        self.path = path

    def ready(self) -> bool:
        return self.able


@pytest.fixture
def loads(monkeypatch):
    monkeypatch.setattr(library, "Library", Ready)
    return Ready


def ship(source: Source, content: bytes = b"library", name: str = "") -> Path:
    path = library.SHIPPED / (name or library.library_name(source))
    path.write_bytes(content)
    return path


def test_a_library_of_the_same_sources_and_flags_is_used(source, loads, caplog):
    path = ship(source)
    assert library.shipped(source) == library.built(source) == path
    found = library.open_library(source)
    assert found is not None
    assert found.path == path
    assert not caplog.records


def test_a_checkout_has_none_and_says_nothing(source, loads, caplog):
    library.SHIPPED.rmdir()
    assert library.shipped(source) is library.built(source) is library.open_library(source) is None
    assert not caplog.records


@pytest.mark.parametrize("change", ["source", "header", "flags", "variable"])
def test_a_library_of_other_sources_is_ignored_with_a_log_line(change, source, loads, caplog, monkeypatch):
    path = ship(source)
    library._digest.cache_clear()
    if change == "source":
        source.main.write_text("int answer = 43;\n")
    if change == "header":
        (source.main.parent / "more.h").write_text("\n")
    if change == "flags":
        source = source._replace(flags=(*source.flags, "-O3"))
    if change == "variable":
        monkeypatch.setenv("TROUPE_NATIVE_FLAGS", "-g")
    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        assert library.open_library(source) is None
        assert library.built(source) is None
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path.name} of the wheel is not used: it was compiled from other sources")


def test_a_library_of_another_level_is_ignored(source, loads, caplog):
    """Its name says what it is for."""
    ship(source, name=library.library_name(source._replace(cache="cpu-large")))
    assert library.open_library(source) is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "able", "reason"),
    [(b"broken", True, "file too short"), (b"library", False, "lacks an instruction set")],
)
def test_a_library_that_cannot_run_is_ignored(content, able, reason, source, loads, caplog, monkeypatch):
    """And compiled here instead."""
    monkeypatch.setattr(loads, "able", able)
    ship(source, content)
    assert library.open_library(source) is None
    assert reason in caplog.text
    assert library.built(source) is None
    starts = []
    monkeypatch.setattr(library, "_compile", lambda *given: starts.append(given))
    monkeypatch.setattr(library.shutil, "which", lambda name: f"/usr/bin/{name}")
    library.start_build(source)
    assert starts
    assert len(caplog.records) == 1


def test_a_device_says_where_its_operators_come_from(source, loads, monkeypatch):
    device = CpuDevice(1)
    assert device.operators == "none"
    device.native.building = object()
    assert device.operators == "pending"

    class Native:
        library = Ready(ship(source))

    monkeypatch.setattr("kernels.devices.cpu.native_operators.SHIPPED", library.SHIPPED)
    device.native.current = Native()
    assert device.operators == "wheel"
    Native.library.path = source.main
    assert device.operators == "compiled"


def test_the_background_compile_is_logged_when_it_begins_and_ends(source, loads, monkeypatch, caplog):
    class Built:
        def poll(self):
            return 0

    found = [Ready(ship(source)), None]
    module = "kernels.devices.cpu.native_operators"
    monkeypatch.setattr(f"{module}.OPERATORS", {CpuDevice(1).native.isa: source})
    monkeypatch.setattr(f"{module}.open_library", lambda _: found.pop())
    monkeypatch.setattr(f"{module}.built", lambda _: None)
    monkeypatch.setattr(f"{module}.start_build", lambda _: Built())
    monkeypatch.setattr(f"{module}.Native", lambda *_: object())
    caplog.set_level("INFO", logger="troupe.kernels")
    native = CpuDevice(1).native
    native.open()
    assert "compiled in the background" in caplog.text
    assert native.renew()
    assert "are in use now" in caplog.text


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only wheels for Linux have compiled libraries")
@pytest.mark.parametrize("compiler", [True, False], ids=["compiler", "no compiler"])
def test_a_wheel_has_what_was_compiled_and_is_named_for_it(compiler, tmp_path, monkeypatch):
    """With a compiler that writes a word, in the place of the real one."""
    project = tmp_path / "project"
    project.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    for name in ("kernels", "telemetry", "actors"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    (project / "app").mkdir()
    (project / "app" / "__init__.py").touch()
    tools = tmp_path / "bin"
    tools.mkdir()
    if compiler:
        (tools / "g++").write_text(f"#!{sys.executable}\nimport sys\nopen(sys.argv[sys.argv.index('-o') + 1], 'w')\n")
        (tools / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    program = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=project, capture_output=True, text=True, check=True
    )
    name = done.stdout.splitlines()[-1]
    held = {Path(path).name for path in zipfile.ZipFile(tmp_path / name).namelist() if path.endswith(".so")}
    if not compiler:
        assert name.endswith("-py3-none-any.whl")
        assert held == set()
        assert "the wheel has no compiled libraries" in done.stderr
        return
    assert name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    assert library.library_name(library.OPERATORS[library.NEEDED_ISA]) in held
    assert any(one.startswith("tries-") for one in held)
