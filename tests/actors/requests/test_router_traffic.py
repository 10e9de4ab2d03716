"""The router's methods in simulated traffic, and the index of prefixes behind one of them."""

from __future__ import annotations

import numpy as np

from actors.requests.prefix_index import PrefixIndex
from actors.requests.router import METHODS
from tests.bench._traffic import Traffic, simulate


def test_the_default_finds_most_prefixes_and_no_method_is_lopsided() -> None:
    outcomes = {method: simulate(method, 16, Traffic(seconds=20.0)) for method in METHODS}
    best = outcomes.pop("cache_aware")
    for other in outcomes.values():
        assert best.hit_rate > other.hit_rate + 0.1
        assert best.first_token_p99 < other.first_token_p99
    assert best.imbalance < 1.6


def prompt(*values: int) -> bytes:
    """64 tokens of each value."""
    return np.repeat(np.array(values, dtype=np.int32), 64).tobytes()


def test_the_longest_prefix_comes_first() -> None:
    index: PrefixIndex[str] = PrefixIndex(100)
    index.add(index.blocks(prompt(1, 2, 3), b""), "a")
    index.add(index.blocks(prompt(1, 2), b""), "b")
    index.add(index.blocks(prompt(1), b""), "c")
    blocks = index.blocks(prompt(1, 2, 3, 4) + b"\0" * 80, b"")
    assert len(blocks) == 4  # whole blocks only
    assert list(index.holders(blocks)) == [["a"], ["b"], ["c"]]
    assert list(index.holders(index.blocks(prompt(1, 9), b""))) == [["a", "b", "c"]]
    assert list(index.holders(index.blocks(prompt(9), b""))) == []
    assert list(index.holders(index.blocks(prompt(1), b"salt"))) == []


def test_the_oldest_blocks_are_forgotten_and_shared_ones_last() -> None:
    index: PrefixIndex[str] = PrefixIndex(3)
    index.add(index.blocks(prompt(1, 2), b""), "a")
    index.add(index.blocks(prompt(1, 3, 4), b""), "b")
    assert len(index) == 3
    assert list(index.holders(index.blocks(prompt(1, 2), b""))) == [["a", "b"]]
