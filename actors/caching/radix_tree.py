"""A compressed radix tree over whole pages of tokens.

Each node holds a run of pages and the tokens computed in them; its children differ in the tokens of their
first page. The idea of keeping finished prefixes in a radix tree with LRU eviction of its leaves is RadixAttention's
(Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", 2024, section 3).

The tree holds page *numbers*; the pool knows their owners.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal

from actors.caching.page_pool import CacheCorrupted

__all__ = ["Node", "RadixTree"]

_TOKEN_BYTES = 4


class Node:
    """A run of pages after its parent's. ``locks``: sequences that hold it or a node below it now; ``uses``: how many
    have held it so far."""

    __slots__ = ("children", "key", "locks", "pages", "parent", "used", "uses")

    def __init__(self, key: bytes | bytearray, pages: list[int], parent: Node | None, locks: int, used: int) -> None:
        self.key = bytearray(key)  # int32 tokens of all pages; of a root, which has none, its salt
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = locks
        self.used = used  # logical time of last use
        self.uses = 1


class RadixTree:
    """Prefixes by salt. Tokens are packed int32, a page is ``page_size`` of them.

    A holder (an open sequence) locks its last node and the path to the root; locked nodes are never evicted. All others
    can be: ``evictable`` counts their pages and is always current. ``policy`` says which goes first: the least
    recently used (lru), or the least often used (lfu), the least recently used of equals.
    """

    def __init__(self, page_size: int, *, policy: Literal["lru", "lfu"] = "lru") -> None:
        self._by_uses = policy == "lfu"
        self._page_bytes = page_size * _TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        # (uses, used, tie-breaker, unlocked leaf); outdated entries are skipped
        self._heap: list[tuple[int, int, int, Node]] = []
        self._clock = 0
        self._nodes = 0
        self.size = 0  # pages
        self.evictable = 0  # pages

    # -- looking up ---------------------------------------------------------------------------------------------------

    def peek(self, salt: bytes, tokens: bytes, limit: int) -> int:
        """Pages of the longest prefix of ``tokens`` present, at most ``limit``. Changes nothing."""
        node = self._roots.get(salt)
        size, result = self._page_bytes, 0
        while node is not None and result < limit:
            child = node.children.get(tokens[result * size : (result + 1) * size])
            if child is None:
                break
            common = self._common(child, tokens, result)
            result += common
            if common < len(child.pages):
                break
            node = child
        return min(result, limit)

    def acquire(self, salt: bytes, tokens: bytes, limit: int) -> tuple[Node, list[int]]:
        """Lock the longest prefix of ``tokens`` of at most ``limit`` pages; return where it ends and its pages."""
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = Node(salt, [], None, 0, 0)
        size = self._page_bytes
        pages: list[int] = []
        while len(pages) < limit:
            result = len(pages)
            child = node.children.get(tokens[result * size : (result + 1) * size])
            if child is None:
                break
            common = min(self._common(child, tokens, result), limit - result)
            if common < len(child.pages):
                child = self._split(child, common)
            pages += child.pages
            node = child
        self._lock(node)
        return node, pages

    # -- adding -------------------------------------------------------------------------------------------------------

    def extend(self, node: Node, tokens: bytes, pages: list[int]) -> tuple[Node, int, list[int]]:
        """Put a holder's next ``pages`` (their ``tokens``) below ``node``, which it holds, and move its lock along.

        Pages of the tree with the same tokens and without a holder are replaced by the holder's own, so that its
        page table stays valid and no page is kept twice. The extension stops at pages that another holder has locked:
        the rest stays the caller's. Free and evictable pages together stay as many as they were.

        Returns the holder's new node, how many of ``pages`` now belong to the tree, and the pages that were replaced.
        """
        size, taken = self._page_bytes, 0
        displaced: list[int] = []
        while taken < len(pages):
            child = node.children.get(tokens[taken * size : (taken + 1) * size])
            if child is None:
                node = self._append(node, tokens[taken * size : len(pages) * size], pages[taken:])
                taken = len(pages)
                break
            if child.locks:
                break
            common = min(self._common(child, tokens, taken), len(pages) - taken)
            if common < len(child.pages):
                child = self._split(child, common)
            displaced += child.pages
            child.pages = pages[taken : taken + common]
            child.locks = 1
            child.uses += 1
            self.evictable -= common
            taken += common
            node = child
        self._tick(node)
        return node, taken, displaced

    def leave(self, node: Node, tokens: bytes, pages: list[int]) -> list[int]:
        """A holder of ``node`` closes: its remaining pages go into the tree, and its lock is released.

        Returns the duplicates: where two pages have the same tokens, the one that the tree does not keep.
        """
        node_held, taken, displaced = self.extend(node, tokens, pages)
        duplicates = displaced
        at, size = node_held, self._page_bytes
        while taken < len(pages):
            child = at.children.get(tokens[taken * size : (taken + 1) * size])
            if child is None:
                child = self._insert(at, tokens[taken * size : len(pages) * size], pages[taken:], 0)
                self.evictable += len(child.pages)
                self._clock += 1
                child.used = self._clock
                self._add_evictable(child)
                break
            common = min(self._common(child, tokens, taken), len(pages) - taken)
            duplicates = duplicates + pages[taken : taken + common]
            taken += common
            at = child if common == len(child.pages) or taken == len(pages) else self._split(child, common)
        self.release(node_held)
        return duplicates

    # -- locks --------------------------------------------------------------------------------------------------------

    def release(self, node: Node) -> None:
        """Release a holder's lock on ``node`` and the path above it."""
        self._clock += 1
        at: Node | None = node
        while at is not None:
            if at.locks <= 0:
                raise CacheCorrupted("a prefix is unlocked more often than locked")
            at.locks -= 1
            at.used = self._clock
            if not at.locks:
                self.evictable += len(at.pages)
            parent = at.parent
            if not at.locks and not at.children:
                self._add_evictable(at)
            at = parent

    def _lock(self, node: Node) -> None:
        self._clock += 1
        at: Node | None = node
        while at is not None:
            if not at.locks:
                self.evictable -= len(at.pages)
            at.locks += 1
            at.used = self._clock
            at.uses += 1
            at = at.parent

    # -- eviction -----------------------------------------------------------------------------------------------------

    def evict(self, count: int) -> list[int]:
        """Drop up to ``count`` pages that no sequence holds, in the order of the policy; return them."""
        evicted: list[int] = []
        while len(evicted) < count and self._heap:
            _, used, _, node = heapq.heappop(self._heap)
            if node.parent is None or node.locks or node.children or node.used != used:
                continue
            short = count - len(evicted)
            if len(node.pages) > short:
                evicted += node.pages[-short:]
                del node.pages[-short:]
                del node.key[-short * self._page_bytes :]
                self._add_evictable(node)
                break
            evicted += node.pages
            parent = node.parent
            del parent.children[bytes(node.key[: self._page_bytes])]
            node.parent = None
            self._nodes -= 1
            if not parent.children and not parent.locks:
                self._add_evictable(parent)
        self.size -= len(evicted)
        self.evictable -= len(evicted)
        return evicted

    def _add_evictable(self, node: Node) -> None:
        """List an unlocked leaf for eviction; a root without children is removed."""
        if node.parent is None:
            del self._roots[bytes(node.key)]
            return
        if len(self._heap) > 2 * self._nodes + 64:
            current = {id(e[3]): e for e in self._heap if e[3].used == e[1] and e[3].parent and not e[3].locks}
            self._heap = list(current.values())
            heapq.heapify(self._heap)
        self._clock += 1
        heapq.heappush(self._heap, (node.uses if self._by_uses else 0, node.used, self._clock, node))

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _common(self, node: Node, tokens: bytes, start: int) -> int:
        """Whole pages ``node`` has in common with ``tokens`` from page ``start`` on; the first one is known to be."""
        size, key, offset = self._page_bytes, node.key, start * self._page_bytes
        if tokens.startswith(key, offset):
            return len(node.pages)
        low, high = 1, min(len(node.pages), len(tokens) // size - start)
        while low < high:
            middle = (low + high + 1) // 2
            if tokens.startswith(key[: middle * size], offset):
                low = middle
            else:
                high = middle - 1
        return low

    def _append(self, node: Node, key: bytes, pages: list[int]) -> Node:
        """New pages below ``node`` for its holder: in the node itself when it is not shared, to keep paths short."""
        if node.parent is not None and node.locks == 1 and not node.children:
            node.key += key  # in place: a step must not copy what a long sequence has so far
            node.pages += pages
            self.size += len(pages)
            return node
        return self._insert(node, key, pages, 1)

    def _insert(self, parent: Node, key: bytes, pages: list[int], locks: int) -> Node:
        node = Node(key, list(pages), parent, locks, self._clock)
        parent.children[key[: self._page_bytes]] = node
        self._nodes += 1
        self.size += len(pages)
        return node

    def _split(self, node: Node, count: int) -> Node:
        """Cut ``node`` after ``count`` pages and return the upper part, a new node; holders keep the lower one."""
        size, parent = self._page_bytes, node.parent
        if parent is None:
            raise CacheCorrupted("a root has no pages to split")
        upper = Node(node.key[: count * size], node.pages[:count], parent, node.locks, node.used)
        upper.uses = node.uses
        parent.children[bytes(node.key[:size])] = upper
        del node.key[: count * size]
        del node.pages[:count]
        node.parent = upper
        upper.children[bytes(node.key[:size])] = node
        self._nodes += 1
        return upper

    def _tick(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock

    # -- checks -------------------------------------------------------------------------------------------------------

    def walk(self) -> Iterator[Node]:
        """Every node, roots included, parents before their children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def path_pages(self, node: Node) -> list[int]:
        """Pages from the root to the end of ``node``."""
        runs: list[list[int]] = []
        at: Node | None = node
        while at is not None:
            runs.append(at.pages)
            at = at.parent
        return [page for run in reversed(runs) for page in run]

    def check(self, holders: list[Node]) -> None:
        """Raise CacheCorrupted unless shape, counts and locks (given all ``holders``) are right."""
        locks: dict[int, int] = {}
        for holder in holders:
            at: Node | None = holder
            while at is not None:
                locks[id(at)] = locks.get(id(at), 0) + 1
                at = at.parent
        size = evictable = nodes = 0
        listed = {id(node) for _, used, _, node in self._heap if node.used == used}
        for node in self.walk():
            if node.parent is None:
                if node.pages or not (node.locks or node.children):
                    raise CacheCorrupted("a root has pages of its own, or neither a lock nor a child")
            else:
                nodes += 1
                if not node.pages or len(node.key) != len(node.pages) * self._page_bytes:
                    raise CacheCorrupted(f"a node of {len(node.pages)} pages has {len(node.key)} bytes of tokens")
                if node.parent.children.get(bytes(node.key[: self._page_bytes])) is not node:
                    raise CacheCorrupted("a node is not where its first page says")
                if not node.locks and not node.children and id(node) not in listed:
                    raise CacheCorrupted("an unlocked leaf can never be evicted")
            if node.locks != locks.get(id(node), 0):
                raise CacheCorrupted(f"a node has {node.locks} locks and {locks.get(id(node), 0)} holders")
            size += len(node.pages)
            evictable += 0 if node.locks else len(node.pages)
        if (size, evictable, nodes) != (self.size, self.evictable, self._nodes):
            raise CacheCorrupted(
                f"counted {size} pages, {evictable} evictable, {nodes} nodes; "
                f"the tree says {self.size}, {self.evictable}, {self._nodes}"
            )
