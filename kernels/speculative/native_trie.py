"""The n-gram trie in C++: the same drafts as those of ``trie`` and ``ngram``, token for token, in less time.

It is compiled when it is first wanted, which takes a second or two, and kept in the user's cache. Processes of one
model need not all have it: what is drafted does not depend on it.
"""

from __future__ import annotations

import ctypes
import platform
import time
import weakref
from array import array
from functools import cache
from pathlib import Path

from kernels.cpu.native.library import Source, built, start_build
from kernels.speculative.settings import NgramSettings
from kernels.speculative.trie import NgramTrie

__all__ = ["NativeSequence", "NativeTrie", "make_trie"]

FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-ffp-contract=off")
# By the kind of processor, for the cache may be shared.
SOURCE = Source(Path(__file__).parent / "native" / "trie.cpp", FLAGS, f"tries-{platform.machine()}")
PATIENCE = 20.0
"""Seconds that a start waits for the compiler, its own or that of another process."""
MOST_NODES = 2**31 - 1
"""Of a generation: nodes are numbered by 32 bits."""


class _Settings(ctypes.Structure):
    """``Settings`` of trie.cpp."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("shortest", "longest", "least", "widest", "likeliest"))


class _Library:
    def __init__(self, path: Path) -> None:
        library = ctypes.PyDLL(str(path))  # calls are too short to let others run meanwhile
        pointer, number = ctypes.c_void_p, ctypes.c_int64

        def function(name: str, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
            found = library[f"troupe_trie_{name}"]
            found.argtypes, found.restype = list(arguments), result
            return found

        self.open, self.close = function("open", pointer, number, number), function("close", None, pointer)
        self.size, self.known = function("size", number, pointer), function("known", number, pointer)
        self.begin, self.end = function("begin", pointer, pointer, number), function("end", None, pointer, pointer)
        self.forget, self.interrupt = function("forget", None, pointer, number), function("interrupt", None, pointer)
        self.extend = function("extend", ctypes.c_int, pointer, pointer, ctypes.c_char_p, number)
        self.guess = function("guess", number, pointer, pointer, ctypes.c_int32, number, *[pointer] * 4)


class NativeSequence:
    """As ``trie.Sequence``."""

    __slots__ = ("_library", "handle", "salt", "trie")

    def __init__(self, trie: NativeTrie, library: _Library, handle: int, salt: bytes) -> None:
        self.trie, self._library, self.handle, self.salt = trie, library, handle, salt

    def __len__(self) -> int:
        return int(self._library.known(self.handle))

    def interrupt(self) -> None:
        self._library.interrupt(self.handle)


class NativeTrie:
    """As ``NgramTrie``, which checks its arguments. Raises MemoryError."""

    def __init__(self, library: _Library, capacity: int, depth: int) -> None:
        self.depth = depth
        self._library = library
        self._trie = _made(library.open(capacity // 2, depth))
        weakref.finalize(self, library.close, self._trie)
        self._salts: dict[bytes, tuple[int, int]] = {}  # their numbers there, and the sequences of each
        self._next = 1
        self._asked: tuple[NgramSettings, _Settings] | None = None
        self._room = 0

    def __len__(self) -> int:
        return int(self._library.size(self._trie))

    def open(self, salt: bytes = b"") -> NativeSequence:
        number, sequences = self._salts.get(salt, (self._next if salt else 0, 0))
        handle = _made(self._library.begin(self._trie, number))
        self._next += 1
        self._salts[salt] = number, sequences + 1
        return NativeSequence(self, self._library, handle, salt)

    def close(self, sequence: NativeSequence) -> None:
        number, sequences = self._salts[sequence.salt]
        self._library.end(self._trie, sequence.handle)
        sequence.handle = 0
        if sequences > 1:
            self._salts[sequence.salt] = number, sequences - 1
            return
        del self._salts[sequence.salt]
        if sequence.salt:
            self._library.forget(self._trie, number)

    def extend(self, sequence: NativeSequence, tokens: list[int]) -> None:
        if not self._library.extend(self._trie, sequence.handle, array("i", tokens).tobytes(), len(tokens)):
            raise MemoryError("there is no memory for n-grams; lower --speculative-ngram-capacity")

    def guess(
        self, sequence: NativeSequence, last: int, nodes: int, settings: NgramSettings
    ) -> tuple[list[int], list[int], list[int]]:
        """As ``ngram.guess``: tokens, parents and windows of a tree."""
        if self._asked is None or self._asked[0] is not settings:
            given = settings.min_window, settings.max_window, settings.min_breadth, settings.max_breadth
            self._asked = settings, _Settings(*given, settings.match_type == "PROB")
        if nodes > self._room:
            self._room = nodes
            self._tokens, self._parents, self._windows = ((ctypes.c_int32 * nodes)() for _ in range(3))
        found = self._library.guess(
            *(self._trie, sequence.handle, last, nodes, ctypes.byref(self._asked[1])),
            *(self._tokens, self._parents, self._windows),
        )
        if not found:
            raise MemoryError("there is no memory to draft n-grams")
        return self._tokens[:found], self._parents[:found], self._windows[:found]


def make_trie(capacity: int, depth: int) -> NgramTrie | NativeTrie:
    """The native one where it can be compiled. Raises ValueError, as ``NgramTrie``."""
    trie = NgramTrie(capacity, depth)
    library = _library() if capacity // 2 < MOST_NODES else None
    return trie if library is None else NativeTrie(library, capacity, depth)


@cache
def _library() -> _Library | None:
    path = built(SOURCE)
    if path is None:
        compiling = start_build(SOURCE)
        latest = time.monotonic() + PATIENCE
        while compiling is not None and compiling.poll() is None:
            if time.monotonic() > latest:
                return None
            time.sleep(0.02)
        path = built(SOURCE)
    try:
        return None if path is None else _Library(path)
    except (OSError, AttributeError):  # of another system that shares the cache
        return None


def _made(handle: int | None) -> int:
    if not handle:
        raise MemoryError("there is no memory for n-grams; lower --speculative-ngram-capacity")
    return handle
