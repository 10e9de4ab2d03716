"""A bounded trie of the token windows that were seen, for drafting by looking them up.

Every window of at most ``depth`` consecutive tokens of a sequence is a path from a root, so a node stands for an
n-gram, its children for the tokens that followed it, the last seen first. Lookahead of this kind is
described in https://arxiv.org/abs/2312.12728.

Nodes lie in flat arrays, 16 bytes each, in two generations of half the capacity. What is seen goes into the young one;
when that is full the old one is forgotten as a whole and the young one takes its place. So what is dropped was not seen
for at least half a capacity of new nodes: least recently used, at no cost a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice

__all__ = ["MOST_CHILDREN", "Generation", "NgramTrie", "Sequence"]

MOST_CHILDREN = 64
"""Children of a node that a draft looks at: the most recent ones."""

WIDE = 8
"""Children up to which a node's are a linked list; more are a table, so that no sequence makes a step slow."""


class Generation:
    """The nodes that were made between two turns. Node 0 stands for "none".

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

    def children(self, node: int, most: int = MOST_CHILDREN) -> list[int]:
        """At most ``most`` children of ``node``, the last seen first."""
        child = self.first[node]
        if child < 0:
            return list(islice(reversed(self.tables[-1 - child].values()), most))
        found = []
        while child and len(found) < most:
            found.append(child)
            child = self.after[child]
        return found

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
        """The same in a table of children."""
        child = table.pop(token, 0)
        if child:
            self.count[child] += 1
        else:
            child = self.make(token)
        table[token] = child
        return child


class Sequence:
    """Where a sequence's last windows stand in the trie: node ``[k]`` is that of its last ``k + 1`` tokens.

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
        """What comes next does not follow what was seen last."""
        self.young, self.old = [], []


class NgramTrie:
    """What the sequences of all requests were seen to hold, apart by salt.

    capacity: nodes. depth: tokens of the longest window. Requests of one salt share what they saw, those of different
    salts never; what was seen under a salt is forgotten with its last request.
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

    def open(self, salt: bytes = b"") -> Sequence:
        """A new sequence. Each must be closed."""
        self._open[salt] = self._open.get(salt, 0) + 1
        return Sequence(salt, self._young.number)

    def close(self, sequence: Sequence) -> None:
        """The sequence ends; without another one of its salt, all that was seen under it is forgotten."""
        left = self._open[sequence.salt] - 1
        if left:
            self._open[sequence.salt] = left
            return
        del self._open[sequence.salt]
        if sequence.salt:
            self._young.roots.pop(sequence.salt, None)
            self._old.roots.pop(sequence.salt, None)

    def extend(self, sequence: Sequence, tokens: Iterable[int]) -> None:
        """The sequence goes on with ``tokens``: O(depth) each."""
        salt, last = sequence.salt, self.depth - 1
        self._follow(sequence)
        for token in tokens:
            if len(self._young) + self.depth > self._half:
                self._turn()
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
                # A node of 0 has no children, so a window that was not known stays unknown.
                sequence.old = [old_root.get(token, 0), *[node and child(node, token) for node in sequence.old[:last]]]
                while sequence.old and not sequence.old[-1]:
                    sequence.old.pop()

    def matches(self, sequence: Sequence, shortest: int, longest: int) -> Iterator[tuple[int, Generation, int]]:
        """Windows of the sequence's last tokens that something followed: their length, from the longest on, and where
        they stand; the young generation's first.
        """
        self._follow(sequence)
        young, old = sequence.young, sequence.old
        for length in range(min(longest, max(len(young), len(old))), shortest - 1, -1):
            if length <= len(young) and self._young.first[young[length - 1]]:
                yield length, self._young, young[length - 1]
            if length <= len(old) and self._old.first[old[length - 1]]:
                yield length, self._old, old[length - 1]

    def _turn(self) -> None:
        self._old = self._young
        self._young = Generation(self._old.number + 1)

    def _follow(self, sequence: Sequence) -> None:
        """Bring a sequence that was seen in another generation into this one."""
        turns = self._young.number - sequence.generation
        if turns:
            sequence.old = sequence.young if turns == 1 else []
            sequence.young = []
            sequence.generation = self._young.number
