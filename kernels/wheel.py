"""Build commands of a wheel with compiled native libraries; pyproject.toml names them.

``pip wheel .`` compiles the CPU's operators for each instruction set of this machine's architecture, and the tries of
NGRAM drafts. Without a C++ compiler, or on another system, the wheel has sources alone and is the same everywhere. An
editable install compiles nothing: its libraries are compiled when they are first used.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

__all__ = ["BuildNative", "NativeWheel"]

ROOT = Path(__file__).parents[1]
FOLDER = "kernels/devices/cpu/native/compiled"
LEVELS = {"x86_64": ("amx", "avx512", "avx2"), "aarch64": ("neon",)}
NEON_FEATURES = (frozenset[str](), frozenset({"bf16"}), frozenset({"i8mm"}), frozenset({"bf16", "i8mm"}))
# The wheel needs no C++ library of the system, and none of another extension is mistaken for it.
STATIC = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-s")


class BuildNative(build_py):
    """Compiles the libraries beside the sources that a wheel has."""

    def run(self) -> None:
        super().run()
        folder = Path(self.build_lib) / FOLDER
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build
        if not self.editable_mode and sys.platform == "linux":
            compile_all(folder)


class NativeWheel(bdist_wheel):
    """A wheel for any Python 3, and for one platform if it has compiled libraries."""

    def run(self) -> None:
        self.run_command("build")
        built = Path(self.get_finalized_command("build").build_lib) / FOLDER
        compiled = any(built.glob("*.so"))
        self.root_is_pure = not compiled
        self.distribution.has_ext_modules = lambda: compiled
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def compile_all(folder: Path) -> None:
    """Compile what this machine's compiler can; the others are compiled where the wheel is installed."""
    sys.path.insert(0, str(ROOT))  # these modules need the standard library alone
    from kernels.devices.cpu.native.library import (
        COMPILERS,
        FLAGS,
        OPERATORS,
        Source,
        compile_command,
        library_name,
        neon_flags,
    )
    from kernels.speculation.drafters.trie_source import SOURCE

    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        print(f"no C++ compiler ({', '.join(COMPILERS)}): the wheel has no compiled libraries", file=sys.stderr)
        return
    levels = LEVELS.get(platform.machine(), ())
    sources = [source for isa, source in OPERATORS.items() if str(isa) in levels]
    if "neon" in levels:  # one for each kind of processor, whatever this machine's is
        (own,) = sources
        sources = [own._replace(flags=FLAGS + neon_flags(features)) for features in NEON_FEATURES]
    folder.mkdir(parents=True)

    def one(source: Source) -> None:
        target = folder / library_name(source)
        done = subprocess.run(compile_command(source, compiler, target, *STATIC), capture_output=True, text=True)
        if done.returncode:
            target.unlink(missing_ok=True)
            print(f"{target.name} is not in the wheel: {done.stderr[-2000:]}", file=sys.stderr)

    with ThreadPoolExecutor(len(sources) + 1) as pool:
        list(pool.map(one, (*sources, SOURCE)))
