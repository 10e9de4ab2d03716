"""PrefixIndex: which caches have seen which prefixes of prompts, as far as a router can know."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

__all__ = ["PrefixIndex"]

_BLOCK_TOKENS = 64
_BLOCK_BYTES = 4 * _BLOCK_TOKENS

CacheT = TypeVar("CacheT", bound=Hashable)


class PrefixIndex(Generic[CacheT]):
    """Blocks of 64 tokens, each named by the hash of all tokens up to its end, with the set of caches that have run
    them. A set is an integer, whose bits are numbered in the order in which the caches were first named.

    It is an estimate: a cache may have evicted a block. Names are hashes of 64 bits with a random key per process; two
    prefixes of one name cost a request a cache hit, never its answer. ``max_blocks``: how many are known, the most
    recently used ones, some 230 bytes each.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._sets: OrderedDict[int, int] = OrderedDict()
        self._bits: dict[CacheT, int] = {}
        self._caches: list[CacheT] = []  # by bit

    def __len__(self) -> int:
        return len(self._sets)

    def blocks(self, prompt: bytes, salt: bytes) -> list[int]:
        """The names of the full blocks of a prompt of int32 token ids, the shortest prefix first."""
        name = hash(salt)
        result = []
        for start in range(0, len(prompt) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
            name = hash((name, prompt[start : start + _BLOCK_BYTES]))
            result.append(name)
        return result

    def holders(self, blocks: Sequence[int]) -> Iterator[list[CacheT]]:
        """The caches that have seen the longest prefix that any has seen, then those of the next shorter one with
        further caches, and so on."""
        sets: list[int] = []
        common = -1
        for block in blocks:
            common &= self._sets.get(block, 0)
            if not common:
                break
            if not sets or sets[-1] != common:
                sets.append(common)
        seen = 0
        for each in reversed(sets):
            yield self._members(each & ~seen)
            seen = each

    def _members(self, bits: int) -> list[CacheT]:
        result = []
        while bits:
            lowest = bits & -bits
            result.append(self._caches[lowest.bit_length() - 1])
            bits ^= lowest
        return result

    def add(self, blocks: Sequence[int], cache: CacheT) -> None:
        """Record that a cache has seen these blocks."""
        bit = self._bits.get(cache)
        if bit is None:
            bit = self._bits[cache] = len(self._caches)
            self._caches.append(cache)
        sets, mask = self._sets, 1 << bit
        for block in reversed(blocks):  # the shortest prefix last: it is the one to keep longest
            sets[block] = sets.get(block, 0) | mask
            sets.move_to_end(block)
        while len(sets) > self._max_blocks:
            sets.popitem(last=False)
