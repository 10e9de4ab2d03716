"""A bounded trie of token windows for NGRAM drafts, in Python and in C++.

Every window of at most ``depth`` consecutive tokens of a sequence is a path from a root, so a node stands for an n-gram
and its children for the tokens that followed it, the last seen first. Lookahead of this kind is described in
https://arxiv.org/abs/2312.12728.

Nodes lie in flat arrays, 16 bytes each, in two generations of half the capacity. New windows go into the young one.
When it is full, the old one is dropped as a whole and the young one takes its place. So a dropped window was not seen
for at least half a capacity of new nodes: an approximation of LRU without a cost for each token.

The C++ trie makes the same drafts, token for token, in less time. It is compiled at first use, which takes a second or
two, and kept in the user's cache. The Python one serves machines without a compiler. Ranks of one model may use
different ones, since the drafts are equal.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from array import array
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

from kernels.contract.speculation import NgramSettings
from kernels.devices.cpu.native.library import built, start_build
from kernels.speculation.drafters.trie_source import SOURCE

__all__ = ["MAX_CHILDREN", "Generation", "NativeSequence", "NativeTrie", "NgramTrie", "TrieSequence", "make_trie"]

MAX_CHILDREN = 64
"""Children of a node that a draft looks at: the most recent ones."""

WIDE = 8
"""Most children in a linked list; more are in a table, so that no sequence makes a step slow."""


class Generation:
    """The nodes that were created between two turns. Node 0 means none.

    A node's children are a list of nodes (``first``, then ``after``), the last seen first, or, when they are many, a
    dictionary by token, the last seen last; ``first`` is then negative.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.token = array("i", [0])
        self.count = array("i", [0])  # how often the node's n-gram was seen
        self.first = array("i", [0])
        self.after = array("i", [0])
        self.tables: list[dict[int, int]] = []
        self.roots: dict[bytes, dict[int, int]] = {}  # by salt: nodes of single tokens

    def __len__(self) -> int:
        return len(self.token) - 1

    def child(self, node: int, token: int) -> int:
        """The node of ``node``'s n-gram and ``token``; 0 when it was not seen."""
        child = self.first[node]
        if child < 0:
            return self.tables[-1 - child].get(token, 0)
        while child and self.token[child] != token:
            child = self.after[child]
        return child

    def children(self, node: int, count: int = MAX_CHILDREN) -> list[int]:
        """At most ``count`` children of ``node``, the last seen first."""
        child = self.first[node]
        if child < 0:
            return list(islice(reversed(self.tables[-1 - child].values()), count))
        result: list[int] = []
        while child and len(result) < count:
            result.append(child)
            child = self.after[child]
        return result

    def make(self, token: int) -> int:
        """A new node without a parent."""
        self.token.append(token)
        self.count.append(1)
        self.first.append(0)
        self.after.append(0)
        return len(self.token) - 1

    def see(self, node: int, token: int) -> int:
        """Count ``token`` after ``node``, as its most recent child; a new node when it is the first time."""
        head = self.first[node]
        if head < 0:
            return self.see_in(self.tables[-1 - head], token)
        tokens, after = self.token, self.after
        child, before, width = head, 0, 0
        while child and tokens[child] != token:
            before, child = child, after[child]
            width += 1
        if child:
            self.count[child] += 1
            if before:
                after[before], after[child] = after[child], head
                self.first[node] = child
            return child
        child = self.make(token)
        if width < WIDE:
            after[child] = head
            self.first[node] = child
            return child
        listed = self.children(node)
        self.tables.append({tokens[member]: member for member in reversed(listed)} | {token: child})
        self.first[node] = -len(self.tables)
        return child

    def see_in(self, table: dict[int, int], token: int) -> int:
        """``see`` in a table of children."""
        child = table.pop(token, 0)
        if child:
            self.count[child] += 1
        else:
            child = self.make(token)
        table[token] = child
        return child


class TrieSequence:
    """A sequence's place in the trie: ``[k]`` is the node of its last ``k + 1`` tokens.

    ``young`` always covers all that was seen since the generation began, ``old`` only the windows that were known.
    """

    __slots__ = ("generation", "old", "salt", "young")

    def __init__(self, salt: bytes, generation: int) -> None:
        self.salt = salt
        self.generation = generation
        self.young: list[int] = []
        self.old: list[int] = []

    def __len__(self) -> int:
        """Tokens of its longest window."""
        return len(self.young)

    def interrupt(self) -> None:
        """Mark a gap: the next token does not follow the last one."""
        self.young, self.old = [], []


class NgramTrie:
    """Token windows of all requests, separated by salt.

    capacity: nodes. depth: tokens of the longest window. Requests with the same salt share windows, others never. The
    windows of a salt are forgotten with its last request.
    """

    def __init__(self, capacity: int, depth: int) -> None:
        if depth < 2 or capacity < 4 * depth:
            raise ValueError(f"a trie of depth {depth} needs at least two levels and {4 * depth} nodes, not {capacity}")
        self.depth = depth
        self._half = capacity // 2
        self._young = Generation(0)
        self._old = Generation(-1)
        self._open: dict[bytes, int] = {}  # sequences by salt

    def __len__(self) -> int:
        """Nodes that hold memory."""
        return len(self._young) + len(self._old)

    def open(self, salt: bytes = b"") -> TrieSequence:
        """A new sequence. Each must be closed."""
        self._open[salt] = self._open.get(salt, 0) + 1
        return TrieSequence(salt, self._young.number)

    def close(self, sequence: TrieSequence) -> None:
        """End the sequence. The windows of a salt are dropped with its last sequence."""
        left = self._open[sequence.salt] - 1
        if left:
            self._open[sequence.salt] = left
            return
        del self._open[sequence.salt]
        if sequence.salt:
            self._young.roots.pop(sequence.salt, None)
            self._old.roots.pop(sequence.salt, None)

    def extend(self, sequence: TrieSequence, tokens: Iterable[int]) -> None:
        """Append ``tokens`` to the sequence: O(depth) each."""
        salt, last = sequence.salt, self.depth - 1
        self._follow(sequence)
        for token in tokens:
            if len(self._young) + self.depth > self._half:
                self._rotate()
                self._follow(sequence)
            young = self._young
            root = young.roots.setdefault(salt, {})
            see = young.see
            sequence.young = [
                young.see_in(root, token),
                *[see(node, token) for node in sequence.young[:last]],
            ]
            old_root = self._old.roots.get(salt)
            if old_root is not None:
                child = self._old.child
                # Node 0 has no children, so an unknown window stays unknown.
                sequence.old = [old_root.get(token, 0), *[node and child(node, token) for node in sequence.old[:last]]]
                while sequence.old and not sequence.old[-1]:
                    sequence.old.pop()

    def matches(self, sequence: TrieSequence, shortest: int, longest: int) -> Iterator[tuple[int, Generation, int]]:
        """Windows of the sequence's last tokens with followers, the longest first: length, generation and node. The
        young generation comes first.
        """
        self._follow(sequence)
        young, old = sequence.young, sequence.old
        for length in range(min(longest, max(len(young), len(old))), shortest - 1, -1):
            if length <= len(young) and self._young.first[young[length - 1]]:
                yield length, self._young, young[length - 1]
            if length <= len(old) and self._old.first[old[length - 1]]:
                yield length, self._old, old[length - 1]

    def _rotate(self) -> None:
        self._old = self._young
        self._young = Generation(self._old.number + 1)

    def _follow(self, sequence: TrieSequence) -> None:
        """Move a sequence of another generation into this one."""
        turns = self._young.number - sequence.generation
        if turns:
            sequence.old = sequence.young if turns == 1 else []
            sequence.young = []
            sequence.generation = self._young.number


PATIENCE_SECONDS = 20.0
"""Seconds that a start waits for the compiler, its own or that of another process."""
MAX_NODES = 2**31 - 1
"""The most nodes of a generation, whose ids have 32 bits."""


class _Settings(ctypes.Structure):
    """``Settings`` of trie.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("min_match", "max_match", "min_breadth", "max_breadth", "by_probability")
    )


class _Library:
    def __init__(self, path: Path) -> None:
        library = ctypes.PyDLL(str(path))  # calls are too short to release the GIL
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
        self.draft_tree = function("draft", number, pointer, pointer, ctypes.c_int32, number, *[pointer] * 4)


class NativeSequence:
    """``TrieSequence`` of a native trie."""

    __slots__ = ("_library", "handle", "salt", "trie")

    def __init__(self, trie: NativeTrie, library: _Library, handle: int, salt: bytes) -> None:
        self.trie, self._library, self.handle, self.salt = trie, library, handle, salt

    def __len__(self) -> int:
        return int(self._library.known(self.handle))

    def interrupt(self) -> None:
        self._library.interrupt(self.handle)


class NativeTrie:
    """``NgramTrie`` in C++. Raises MemoryError."""

    def __init__(self, library: _Library, capacity: int, depth: int) -> None:
        self.depth = depth
        self._library = library
        self._trie = _made(library.open(capacity // 2, depth))
        weakref.finalize(self, library.close, self._trie)
        self._salts: dict[bytes, tuple[int, int]] = {}  # their numbers there, and the sequences of each
        self._next = 1
        self._settings: tuple[NgramSettings, _Settings] | None = None
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
            raise MemoryError("out of memory for n-grams; lower --speculative-ngram-capacity")

    def draft_tree(
        self, sequence: NativeSequence, last: int, nodes: int, settings: NgramSettings
    ) -> tuple[list[int], list[int], list[int]]:
        """As ``ngram.draft_tree``: tokens, parents and windows of a tree."""
        if self._settings is None or self._settings[0] is not settings:
            given = settings.min_window, settings.max_window, settings.min_breadth, settings.max_breadth
            self._settings = settings, _Settings(*given, settings.match_type == "PROB")
        if nodes > self._room:
            self._room = nodes
            self._tokens, self._parents, self._windows = ((ctypes.c_int32 * nodes)() for _ in range(3))
        result = self._library.draft_tree(
            *(self._trie, sequence.handle, last, nodes, ctypes.byref(self._settings[1])),
            *(self._tokens, self._parents, self._windows),
        )
        if not result:
            raise MemoryError("out of memory while drafting n-grams; lower --speculative-ngram-capacity")
        return self._tokens[:result], self._parents[:result], self._windows[:result]


def make_trie(capacity: int, depth: int) -> NgramTrie | NativeTrie:
    """Make a native trie if it can be compiled, else one in Python. Raises ValueError, as ``NgramTrie``."""
    trie = NgramTrie(capacity, depth)
    library = _library() if capacity // 2 < MAX_NODES else None
    return trie if library is None else NativeTrie(library, capacity, depth)


@cache
def _library() -> _Library | None:
    path = built(SOURCE)
    if path is None:
        compiling = start_build(SOURCE)
        latest = time.monotonic() + PATIENCE_SECONDS
        while compiling is not None and compiling.poll() is None:
            if time.monotonic() > latest:
                return None
            time.sleep(0.02)
        path = built(SOURCE)
    try:
        return None if path is None else _Library(path)
    except (OSError, AttributeError):  # built by another system that shares the cache
        return None


def _made(handle: int | None) -> int:
    if not handle:
        raise MemoryError("out of memory for n-grams; lower --speculative-ngram-capacity")
    return handle
