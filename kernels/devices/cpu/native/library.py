"""The native operators as a library: of the wheel, or compiled once a machine, in the background, and kept in the
user's cache.

They need a C++ compiler when they are first used. Each level of ``kernels.contract.cpu_isa`` above ``torch`` has a
library of its own, from the same sources. Until the library is compiled, and where it cannot be, the CPU device does
the same with PyTorch's operators.

A wheel brings compiled libraries (``kernels.wheel``). One is used if it was made of the sources and flags that are
installed beside it and if it can be loaded; else the log says so once, and the library is compiled here. The variable
``TROUPE_NATIVE_FLAGS`` adds flags for the compiler; with it no library of a wheel is used.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import weakref
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kernels.contract.cpu_isa import FEATURES, CpuIsa, chosen_isa, processor_features
from kernels.devices.native_cache import is_trusted, make_private, native_cache

__all__ = [
    "NEEDED_ISA",
    "OPERATORS",
    "SHIPPED",
    "BuildError",
    "Chain",
    "Cycle",
    "CycleOutput",
    "Head",
    "Library",
    "Observation",
    "Op",
    "PendingBuild",
    "RowTokens",
    "Source",
    "Step",
    "Table",
    "build",
    "built",
    "compile_command",
    "library_name",
    "open_library",
    "operators",
    "shipped",
    "start_build",
]

HERE = Path(__file__).parent
NAME = "native.so"
SHIPPED = HERE / "compiled"
"""Libraries that a wheel brings, by ``library_name``; a checkout has none."""
EXTRA_FLAGS = "TROUPE_NATIVE_FLAGS"

_log = logging.getLogger("troupe.kernels")


class Source(NamedTuple):
    """The source of a library: ``main``, which includes headers beside it. ``cache``: its folder's name there."""

    main: Path
    flags: tuple[str, ...]
    cache: str


FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-pthread", "-fno-math-errno")
COMPILERS = ("g++", "clang++", "c++")


def neon_flags(features: frozenset[str]) -> tuple[str, ...]:
    """The compiler's flags for an aarch64 processor, whose products of bf16 and of bytes may be instructions. The first
    processors (Cortex-A53 to A73) lack the atomic instructions of Armv8.1, which the compiler would use at once."""
    products = "".join(f"+{name}" for name in ("bf16", "i8mm") if name in features)
    return (f"-march=armv8.2-a{products}" if products else "-march=armv8-a",)


def x86_flags(isa: CpuIsa) -> tuple[str, ...]:
    """The compiler's flags for what ``isa`` needs of a processor, and no more: ``-march=NAME`` would allow instructions
    that a virtual machine can hide."""
    features = (name.replace("amx_", "amx-").replace("_", "") for name in sorted(FEATURES[isa]))
    return tuple(f"-m{name}" for name in features)


_PROCESSORS = {isa: x86_flags(isa) for isa in (CpuIsa.AMX, CpuIsa.AVX512, CpuIsa.AVX2)} | {
    CpuIsa.NEON: neon_flags(processor_features())
}
OPERATORS = {isa: Source(HERE / "program.cpp", FLAGS + flags, f"cpu-{isa}") for isa, flags in _PROCESSORS.items()}
"""The library of each level that has native operators."""
NEEDED_ISA = min(OPERATORS)


class BuildError(RuntimeError):
    """The library could not be compiled."""


class Op(ctypes.Structure):
    """``Op`` of program.h."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("c", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("stride_a", ctypes.c_int64),
        ("stride_b", ctypes.c_int64),
        ("stride_out", ctypes.c_int64),
        ("i0", ctypes.c_int64),
        ("i1", ctypes.c_int64),
        ("i2", ctypes.c_int64),
        ("i3", ctypes.c_int64),
        ("i4", ctypes.c_int64),
        ("i5", ctypes.c_int64),
        ("i6", ctypes.c_int64),
        ("gated", ctypes.c_int64),
        ("f0", ctypes.c_double),
        ("cache_type", ctypes.c_int64),
        ("invariant", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("fixed", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("by_head", ctypes.c_void_p),
    )


class Step(ctypes.Structure):
    """``Step`` of program.h."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("pages_stride", ctypes.c_int64),
        ("lengths", ctypes.c_void_p),
        ("sequences", ctypes.c_int64),
        ("decodes", ctypes.c_int64),
        ("offsets", ctypes.c_void_p),
        ("roots", ctypes.c_void_p),
        ("bits", ctypes.c_void_p),
        ("bits_stride", ctypes.c_int64),
        ("prompts", ctypes.c_int64),
    )


class Table(ctypes.Structure):
    """``SlotTable`` of decode_loop.h."""

    _fields_ = (
        ("tokens", ctypes.c_void_p),
        ("tokens_stride", ctypes.c_int64),
        ("known", ctypes.c_void_p),
        ("computed", ctypes.c_void_p),
        ("page_count", ctypes.c_void_p),
        ("targets", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("stops", ctypes.c_void_p),
        ("max_stops", ctypes.c_int64),
        ("stops_from", ctypes.c_void_p),
    )


class RowTokens(ctypes.Structure):
    """``RowTokens`` of draft_chains.h."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
    )


class Observation(ctypes.Structure):
    """``Observation`` of draft_chains.h."""

    _fields_ = (
        ("ahead", ctypes.c_int64),
        ("features", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("places", ctypes.c_void_p),
        ("inputs", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("left", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("kept", ctypes.c_int64),
    )


class Chain(ctypes.Structure):
    """``Chain`` of draft_chains.h."""

    _fields_ = (
        ("ops", ctypes.c_void_p * 2),
        ("counts", ctypes.c_int64 * 2),
        ("chosen", ctypes.c_void_p * 2),
        ("draws", ctypes.c_void_p * 2),
        ("stands_for", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("headed", ctypes.c_void_p),
        ("before", ctypes.c_void_p),
        ("width", ctypes.c_int64),
    )


class Cycle(ctypes.Structure):
    """``Cycle`` of draft_cycle.h."""

    _fields_ = (
        ("chain", Chain),
        ("reached", ctypes.c_void_p),
        ("first", ctypes.c_int64),
        ("begin", ctypes.c_int64),
        ("spare", ctypes.c_int64),
        ("ops", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("argmax", ctypes.c_void_p),
        ("nonfinite", ctypes.c_void_p),
        ("draw", ctypes.c_void_p),
        ("max_drafts", ctypes.c_int64),
        ("max_length", ctypes.c_int64),
        ("observing", ctypes.c_void_p),
        ("observing_count", ctypes.c_int64),
        ("seen", Observation),
        ("max_observed", ctypes.c_int64),
    )


class CycleOutput(ctypes.Structure):
    """``CycleOutput`` of draft_cycle.h."""

    _fields_ = (
        ("roots", ctypes.c_void_p),
        ("accepted", ctypes.c_void_p),
        ("emitted", ctypes.c_void_p),
        ("drafted", ctypes.c_void_p),
        ("depths", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("drafted_at", ctypes.c_double),
        ("ended", ctypes.c_void_p),
        ("over", ctypes.c_int64),
        ("seen", ctypes.c_int64),
    )


class Head(ctypes.Structure):
    """``Head`` of short_prefill.h."""

    _fields_ = (
        ("ops", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("hidden", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("last", ctypes.c_void_p),
        ("width", ctypes.c_int64),
    )


class Library:
    """The functions of one compiled library, that at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        self.ready = library.troupe_ready
        self.open, self.close = library.troupe_open, library.troupe_close
        self.packed_grouped, self.pack_grouped = library.troupe_packed_grouped, library.troupe_pack_grouped
        self.packed_fp8, self.pack_fp8 = library.troupe_packed_fp8, library.troupe_pack_fp8
        self.packed_blocks = library.troupe_packed_blocks
        self.begin_blocks, self.pack_blocks = library.troupe_begin_blocks, library.troupe_pack_blocks
        self.packed8, self.pack8 = library.troupe_packed8, library.troupe_pack8
        self.packed, self.pack, self.run = library.troupe_packed, library.troupe_pack, library.troupe_run
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.open.argtypes, self.open.restype = [ctypes.c_int], pointer
        self.close.argtypes, self.close.restype = [pointer], None
        self.packed.argtypes, self.packed.restype = [number, number], number
        self.pack.argtypes, self.pack.restype = [pointer, number, number, pointer], None
        self.packed8.argtypes, self.packed8.restype = [number, number], number
        self.pack8.argtypes = [pointer, pointer, pointer, number, number, pointer]
        self.pack8.restype = None
        self.packed_grouped.argtypes, self.packed_grouped.restype = [number] * 4, number
        self.pack_grouped.argtypes = [pointer, pointer, pointer, number, number, number, number, pointer]
        self.pack_grouped.restype = None
        self.packed_fp8.argtypes, self.packed_fp8.restype = [number] * 3, number
        self.pack_fp8.argtypes, self.pack_fp8.restype = [pointer, pointer, *[number] * 3, pointer], None
        self.packed_blocks.argtypes, self.packed_blocks.restype = [pointer, number, number], number
        self.begin_blocks.argtypes, self.begin_blocks.restype = [pointer, number, number, pointer], None
        self.pack_blocks.argtypes, self.pack_blocks.restype = [pointer, number, number, number, pointer], None
        self.run.argtypes, self.run.restype = [pointer, pointer, number, ctypes.POINTER(Step)], ctypes.c_int
        self.run.errcheck = _ran
        self.advance = library.troupe_advance
        self.advance.argtypes = [pointer, pointer, number, ctypes.POINTER(Table), pointer, number, *[pointer] * 4]
        self.advance.restype = number
        table, rows = ctypes.POINTER(Table), ctypes.POINTER(RowTokens)
        self.observe = library.troupe_observe
        self.observe.argtypes = [pointer, pointer, number, table, rows, ctypes.POINTER(Observation)]
        self.observe.restype, self.observe.errcheck = ctypes.c_int, _ran
        self.cycle = library.troupe_cycle
        self.cycle.argtypes = [
            *(pointer, ctypes.POINTER(Cycle), table, pointer, number, pointer, pointer, number, pointer),
            *(ctypes.c_int, ctypes.POINTER(CycleOutput)),
        ]
        self.cycle.restype = number
        self.verify = library.troupe_verify
        self.verify.argtypes = [pointer, pointer, number, table, rows, pointer, number, *[pointer] * 4]
        self.verify.restype = number
        self.prefill = library.troupe_prefill
        self.prefill.argtypes = [pointer, pointer, number, table, rows, ctypes.POINTER(Head), *[pointer] * 4]
        self.prefill.restype = number


def _ran(enough: Any, function: Any, arguments: tuple[Any, ...]) -> Any:
    if not enough:
        raise MemoryError(
            "there is no memory for what the native operators hold of a step; lower --chunked-prefill-size, "
            "--max-total-tokens or --max-running-requests, or give the process more"
        )


def operators() -> Source:
    """The library of the level that this process may use (``chosen_isa``). Raises KeyError if that has none."""
    return OPERATORS[chosen_isa()]


def open_library(source: Source | None = None) -> Library | None:
    """The library, by default that of ``operators``, where it is compiled and this processor and system can run it."""
    source = source or operators()
    path = shipped(source)
    if path is not None:
        try:
            library = Library(path)
        except (OSError, AttributeError) as error:
            refuse(path, str(error))
        else:
            if library.ready():
                return library
            refuse(path, "this processor or system lacks an instruction set of it")
    path = built(source)
    if path is None:
        return None
    try:
        library = Library(path)
    except (OSError, AttributeError):  # of another system that shares the cache
        return None
    return library if library.ready() else None


def built(source: Source | None = None) -> Path | None:
    """The compiled library: the wheel's, or that of the cache, if no other user could have written it."""
    source = source or operators()
    result = shipped(source)
    if result is not None:
        return result
    folder = _folder(source)
    path = folder and folder / NAME
    return path if path is not None and path.is_file() and is_trusted(path) else None


def shipped(source: Source) -> Path | None:
    """The library that the wheel brings; None if there is none or ``refuse`` was called for it."""
    path = SHIPPED / library_name(source)
    if path in _refused:
        return None
    if path.is_file():
        return path
    for other in SHIPPED.glob(f"{source.cache}-*.so"):
        refuse(other, "it was compiled from other sources, or with other flags, than those that are installed")
    return None


_refused: set[Path] = set()


def refuse(path: Path, reason: str) -> None:
    """Use a library of the wheel no more; the log says why, once."""
    if path not in _refused:
        _refused.add(path)
        _log.warning("%s of the wheel is not used: %s; it is compiled on this machine instead", path.name, reason)


def library_name(source: Source) -> str:
    """The file name of a library in a wheel: what it is for, and a digest of its sources and flags."""
    return f"{source.cache}-{_digest(source, _extra_flags())}.so"


def compile_command(source: Source, compiler: str, target: Path | str, *more: str) -> tuple[str, ...]:
    """How to compile the library to ``target``. ``more``: further flags, of which its name says nothing."""
    return (compiler, *source.flags, *_extra_flags(), *more, "-o", str(target), str(source.main))


def build(source: Source | None = None) -> Path:
    """Compile the library, unless it is there. Raises BuildError."""
    source = source or operators()
    result = built(source)
    if result is not None:
        return result
    compiling = start_build(source)
    if compiling is None:
        raise BuildError(
            f"no C++ compiler (install one of {', '.join(COMPILERS)}) or no folder that only this user may "
            "write to (see XDG_CACHE_HOME)"
        )
    compiling.wait()
    result = built(source)
    if result is None:
        raise BuildError("the C++ compiler could not compile the native operators; is it g++ 12 or later?")
    return result


class PendingBuild:
    """A build by another process: it is over when the lock on the folder is free. ``folder``: open; taken over."""

    def __init__(self, folder: int) -> None:
        self._folder = folder
        weakref.finalize(self, os.close, folder)

    def poll(self) -> int | None:
        """None while it is under way."""
        try:
            fcntl.flock(self._folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        fcntl.flock(self._folder, fcntl.LOCK_UN)
        return 0

    def wait(self) -> int:
        fcntl.flock(self._folder, fcntl.LOCK_SH)
        fcntl.flock(self._folder, fcntl.LOCK_UN)
        return 0


def start_build(source: Source | None = None) -> subprocess.Popen[bytes] | PendingBuild | None:
    """Start to compile the library beside other work; None without a compiler or a private folder.

    The second process waits for the first: on two cores every worker of many would compile for minutes.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None
    source = source or operators()
    folder = _folder(source)
    if folder is None:
        _warn_not_kept("this user has no home")
        return None
    try:
        make_private(folder)
        if not is_trusted(folder):
            return None
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        _warn_not_kept(str(error))
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return PendingBuild(lock)
    except OSError:
        pass  # a file system without locks: the second process compiles too, and both results are the same
    if built(source) is not None:  # by now
        fcntl.flock(lock, fcntl.LOCK_UN)
        return PendingBuild(lock)
    try:
        return _compile(source, compiler, folder, lock)
    except OSError as error:
        _warn_not_kept(str(error))
        return None
    finally:
        os.close(lock)  # the build has it


@cache
def _warn_not_kept(reason: str) -> None:
    _log.warning(
        "native operators cannot be compiled, so slower ones run: %s; set XDG_CACHE_HOME to a folder of this user",
        reason,
    )


def _compile(source: Source, compiler: str, folder: Path, lock: int) -> subprocess.Popen[bytes]:
    """Compile in a process that holds the lock until it ends. Raises OSError."""
    descriptor, scratch = tempfile.mkstemp(dir=folder, prefix="building-")
    os.close(descriptor)
    # In a shell, so that no process must wait for it. The compiled file is renamed to its name once it is whole.
    script = 'nice "$@" && chmod 700 "$0" && mv -f "$0" "${0%/*}/' + NAME + '" || rm -f "$0"'
    command = ("/bin/sh", "-c", script, scratch, *compile_command(source, compiler, scratch))
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=null, stderr=null, pass_fds=(lock,))


def _folder(source: Source) -> Path | None:
    """Where this library is kept; None for a user without a home."""
    try:
        return native_cache(source.cache) / _digest(source, _extra_flags())
    except RuntimeError:
        return None


def _extra_flags() -> tuple[str, ...]:
    return tuple(shlex.split(os.environ.get(EXTRA_FLAGS, "")))


@cache
def _digest(source: Source, more: tuple[str, ...]) -> str:
    digest = hashlib.sha256(" ".join((*source.flags, *more)).encode())
    for part in sorted((*source.main.parent.glob("*.h"), *source.main.parent.glob("*.cpp"))):
        digest.update(part.read_bytes())
    return digest.hexdigest()[:16]
