"""The native operators against plain scalar results in C++: of this processor, and of aarch64 in an emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.contract.cpu_isa import chosen_isa
from kernels.devices.cpu.native import library

SOURCE = Path(__file__).parents[2] / "kits" / "native_check.cpp"
AARCH64 = ("aarch64-linux-gnu-g++", "qemu-aarch64")
LIBRARIES = "/usr/aarch64-linux-gnu"
PLAIN, WHOLE = frozenset({"asimd"}), frozenset({"asimd", "bf16", "i8mm"})
pytestmark = [pytest.mark.long, pytest.mark.lane]
needs_aarch64 = pytest.mark.skipif(
    not all(map(shutil.which, AARCH64)), reason=f"{' and '.join(AARCH64)} are needed for checks of aarch64"
)


def compiled(compiler: str, flags: tuple[str, ...], folder: Path) -> Path:
    """The program of checks, compiled with few optimizations, which take most of the time."""
    program = folder / "native_check"
    plain = tuple(flag for flag in library.FLAGS if flag not in ("-O3", "-shared", "-fPIC"))
    command = (compiler, "-O1", *plain, *flags, f"-I{library.HERE}", "-o", str(program), str(SOURCE))
    subprocess.run(command, check=True, timeout=300)
    return program


def check(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.skipif(chosen_isa() < library.NEEDED_ISA, reason="native operators need AVX2 or NEON")
@pytest.mark.skipif(not shutil.which("g++"), reason="native operators need g++")
def test_operators_of_this_processor_compute_what_they_say(tmp_path):
    source = library.OPERATORS[chosen_isa()]
    flags = tuple(flag for flag in source.flags if flag not in library.FLAGS)
    check([str(compiled("g++", flags, tmp_path))])


@needs_aarch64
@pytest.mark.parametrize("features", [PLAIN, WHOLE], ids=["plain", "bf16-i8mm"])
def test_operators_of_aarch64_compute_what_they_say(features, tmp_path):
    program = compiled(AARCH64[0], library.neon_flags(features), tmp_path)
    check([AARCH64[1], "-L", LIBRARIES, str(program)])
