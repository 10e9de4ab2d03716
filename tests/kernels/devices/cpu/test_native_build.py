"""How the CPU's native operators are compiled: once, and only where they can run."""

from __future__ import annotations

import ctypes
import os
import shutil

import pytest

from kernels.contract.cpu_isa import CpuIsa
from kernels.devices.cpu.native import library
from tests.kits.native import needs_native

pytestmark = needs_native


def test_a_second_process_waits_for_the_build_of_the_first(monkeypatch, tmp_path):
    """A compiler that runs until the test ends it, in place of the real one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gate, compiler = tmp_path / "gate", tmp_path / "g++"
    os.mkfifo(gate)
    compiler.write_text(f"#!/bin/sh\necho begun >> {tmp_path}/reported\nread word < {gate}\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(library, "COMPILERS", (str(compiler),))
    first, second = library.start_build(), library.start_build()
    assert first.poll() is second.poll() is None
    gate.write_text("end\n")
    assert second.wait() == 0
    assert first.wait() == second.poll() == 0
    assert (tmp_path / "reported").read_text() == "begun\n"
    assert library.built() is not None
    assert library.start_build().poll() == 0  # there it is


def test_a_build_beside_other_work_leaves_the_library_alone(monkeypatch, tmp_path):
    """By the real compiler, of a small source."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    main = tmp_path / "main.cpp"
    main.write_text('extern "C" int answer = 42;\n')
    source = library.Source(main, library.operators().flags, "cpu-little")
    assert library.built(source) is None
    library.start_build(source).wait()
    path = library.built(source)
    assert ctypes.c_int.in_dll(ctypes.CDLL(path), "answer").value == 42
    assert os.listdir(path.parent) == [path.name]


def test_nothing_is_compiled_where_it_cannot_run(tiny_model, drive, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TROUPE_CPU_ISA", str(CpuIsa.TORCH))
    drive(tiny_model, dtype="bfloat16")
    assert not (tmp_path / "troupe").exists()


def test_without_a_compiler_it_runs_without(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert library.start_build() is None
    with pytest.raises(library.BuildError, match="install one of"):
        library.build()


@pytest.mark.skipif(not any(map(shutil.which, library.COMPILERS)), reason="needs a C++ compiler")
def test_the_log_says_why_nothing_can_be_compiled(monkeypatch, tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file / "cache"))
    assert library.start_build() is None
    assert f"slower ones run: [Errno 20] Not a directory: '{file}/cache'; set XDG_CACHE_HOME" in caplog.text


def test_a_user_without_a_home_runs_without(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(library.Path, "home", home)
    assert library.start_build() is None
    assert library.open_library() is None


def test_a_library_that_is_not_one_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library._folder(library.operators()).mkdir(parents=True)
    (library._folder(library.operators()) / library.NAME).write_bytes(b"not a library")
    assert library.open_library() is None
