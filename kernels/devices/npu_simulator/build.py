"""Compiles the simulated CANN against which the torch_npu wheel links and resolves symbols.

The symbols come from the installed wheel: undefined symbols of its libraries, and names of CANN functions among its
strings. Those that runtime.c and its parts do not define become functions that return 0. All of them are in one
library; the libraries that the wheel loads (libascendcl.so, ...) are empty and depend on it, so that state exists once.
The result is cached by a hash of the wheel's version and of the sources. Concurrent builds need no lock: each uses a
separate folder and the first rename wins.

Needs gcc and nm (binutils), but no CANN.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from kernels.contract.errors import UnsupportedError
from kernels.devices.native_cache import UntrustedCache, check_trusted, make_private, native_cache

__all__ = ["LIBRARIES", "BuildError", "cann_libraries"]

LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "opapi", "runtime")
"""The libraries that torch_npu 2.13 links to (the first six) or opens by name, in load order."""

CORE = "troupe_cann"
HERE = Path(__file__).parent
CANN_NAME = re.compile(rb"(?:acl(?:rt|op|mdl|prof|Get|sys|tdt|Set|Query|)[A-Z]\w+|Hccl\w+|rt[A-Z]\w+)")
LINKED_NAME = re.compile(r"acl|rt[A-Z]|Hccl|Msprof")


class BuildError(RuntimeError):
    """The simulated CANN could not be built."""


def cann_libraries() -> Path:
    """The folder of the compiled libraries, compiled now if they are not there yet. Raises BuildError."""
    torch_npu = package("torch_npu")
    digest = hashlib.sha256()
    for name in ("torch", "torch_npu"):
        digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    for source in (HERE / "build.py", *sorted(HERE.glob("*.c"))):
        digest.update(source.read_bytes())
    cache = native_cache("npu-simulator")
    folder = cache / digest.hexdigest()[:16]
    if folder.is_dir():
        _demand_trusted(folder, *folder.iterdir())
        return folder
    for tool, part in (("gcc", "gcc"), ("nm", "binutils")):
        if shutil.which(tool) is None:
            raise BuildError(
                f"the NPU simulator compiles a small library when it first runs and needs {tool}: install {part}"
            )
    make_private(cache)
    _demand_trusted(cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as scratch:
        made = Path(scratch) / "libraries"
        made.mkdir(mode=0o700)
        compile_into(made, torch_npu)
        for library in made.iterdir():
            library.chmod(0o700)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def _demand_trusted(*paths: Path) -> None:
    try:
        for path in paths:
            check_trusted(path)
    except UntrustedCache as error:
        raise BuildError(str(error)) from None


def package(name: str) -> Path:
    """The folder of an installed package, found without importing it. Raises UnsupportedError for a missing one."""
    result = importlib.util.find_spec(name)
    if result is None or result.origin is None:
        raise UnsupportedError(
            f"simulated NPUs need {name}, which is not installed: pip install -e '.[npu-sim]', or use --device cpu"
        )
    return Path(result.origin).parent


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{command[0]} failed while the NPU simulator was built:\n{done.stderr[-2000:]}")
    return done.stdout


def symbols(kind: str, *libraries: Path) -> set[str]:
    lines = run("nm", "-D", f"--{kind}-only", *map(str, libraries)).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line and not line.endswith(":")}


def compile_into(folder: Path, torch_npu: Path) -> None:
    headers = torch_npu / "include" / "third_party" / "acl" / "inc"
    main = torch_npu / "lib" / "libtorch_npu.so"
    runtime = folder / "runtime.o"
    run("gcc", "-O2", "-fPIC", "-w", f"-I{headers}", "-c", str(HERE / "runtime.c"), "-o", str(runtime))
    written = {line.split()[-1] for line in run("nm", "--defined-only", str(runtime)).splitlines() if line}
    wanted = symbols("undefined", main, *torch_npu.glob("_C*.so"))
    provided = symbols("defined", *(package("torch") / "lib").glob("*.so"), *(torch_npu / "lib").glob("*.so"))
    linked = {name for name in wanted - provided if LINKED_NAME.match(name)}
    strings = re.findall(rb"[\x20-\x7e]{4,}", main.read_bytes())
    looked_up = {text.decode() for text in strings if CANN_NAME.fullmatch(text)}
    source = folder / "stubs.c"
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted((linked | looked_up) - written)))
    core = str(folder / f"lib{CORE}.so")
    shared = ("gcc", "-O2", "-fPIC", "-w", "-shared", "-pthread")
    run(*shared, f"-Wl,-soname,lib{CORE}.so", "-o", core, str(runtime), str(source))
    for name in LIBRARIES:
        run(
            *shared,
            f"-Wl,-soname,lib{name}.so",
            "-Wl,--no-as-needed",
            "-Wl,-rpath,$ORIGIN",
            *("-o", str(folder / f"lib{name}.so"), f"-L{folder}", f"-l{CORE}"),
        )
    runtime.unlink()
    source.unlink()
