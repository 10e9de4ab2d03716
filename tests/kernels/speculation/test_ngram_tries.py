"""The tries of n-grams: what they find, and that both find the same."""

import gc
import random
import shutil
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.contract.speculation import NgramSettings
from kernels.devices.cpu.native import library
from kernels.speculation.drafters import trie as native_trie
from kernels.speculation.drafters.ngram import draft_tree
from kernels.speculation.drafters.trie import MAX_CHILDREN, WIDE, NativeTrie, NgramTrie, TrieSequence, make_trie

DEPTH = 5
LARGE = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """The native trie, compiled once on this machine, however long that takes beside other work."""
    if any(map(shutil.which, library.COMPILERS)):
        library.build(native_trie.SOURCE)
    native_trie._library.cache_clear()  # an earlier test may have given up its wait


def draft(trie: NgramTrie, sequence: TrieSequence, last: int, nodes: int, options: NgramSettings):
    tree = draft_tree(trie, sequence, last, nodes, options)
    assert len(tree.windows) == len(tree.tokens)
    return tree.tokens, tree.parents


def followers(trie: NgramTrie, sequence: TrieSequence, length: int) -> Counter[int]:
    """How often each token followed the sequence's last ``length`` tokens."""
    found: Counter[int] = Counter()
    for matched, generation, node in trie.matches(sequence, length, length):
        assert matched == length
        for child in generation.children(node):
            found[generation.token[child]] += generation.count[child]
    return found


def seen_after(texts: list[list[int]], window: list[int]) -> Counter[int]:
    size = len(window)
    return Counter(
        text[at + size] for text in texts for at in range(len(text) - size) if text[at : at + size] == window
    )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), max_size=12)), max_size=12),
    st.lists(st.sampled_from([b"", b"a", b"b"]), min_size=3, max_size=3),
)
def test_every_window_knows_what_followed_it_in_its_own_salt(
    pieces: list[tuple[int, list[int]]], salts: list[bytes]
) -> None:
    trie = NgramTrie(LARGE, DEPTH)
    sequences = [trie.open(salt) for salt in salts]
    texts: list[list[int]] = [[], [], []]
    for which, tokens in pieces:
        trie.extend(sequences[which], tokens)
        texts[which] += tokens
    for sequence, text in zip(sequences, texts, strict=True):
        mates = [other for other, salt in zip(texts, salts, strict=True) if salt == sequence.salt]
        for length in range(1, min(DEPTH - 1, len(text)) + 1):
            assert followers(trie, sequence, length) == seen_after(mates, text[-length:])


def test_the_last_seen_child_comes_first_in_lists_and_in_tables() -> None:
    for width in (3, 40):
        trie = NgramTrie(LARGE, DEPTH)
        sequence = trie.open()
        order = list(range(1, width + 1))
        random.Random(width).shuffle(order)
        order += order[: width // 2]
        trie.extend(sequence, [token for follower in order for token in (0, follower)] + [0])
        (_, generation, node), *_ = trie.matches(sequence, 1, 1)
        recent = list(dict.fromkeys(reversed(order)))
        assert [generation.token[child] for child in generation.children(node)] == recent[:MAX_CHILDREN]
        for follower in order:
            assert generation.token[generation.child(node, follower)] == follower
        assert generation.child(node, width + 1) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 50), max_size=60), max_size=30), st.integers(20, 200))
def test_memory_never_passes_the_capacity(texts: list[list[int]], capacity: int) -> None:
    trie = NgramTrie(capacity, DEPTH)
    for text in texts:
        sequence = trie.open()
        for token in text:
            trie.extend(sequence, [token])
            assert len(trie) <= capacity
            for _, generation, node in trie.matches(sequence, 1, DEPTH):
                assert 0 < node <= len(generation)
        trie.close(sequence)


def test_what_is_seen_again_and_again_outlives_what_is_not() -> None:
    trie = NgramTrie(400, DEPTH)
    used, unused, flood = trie.open(), trie.open(), trie.open()
    trie.extend(unused, [7, 8, 9, 7])
    assert followers(trie, unused, 1) == {8: 1}
    for round_ in range(200):
        trie.extend(used, [1, 2, 3])
        trie.extend(flood, [100 + 2 * round_, 101 + 2 * round_])
    asking = trie.open()
    trie.extend(asking, [1, 2])
    assert set(followers(trie, asking, 2)) == {3}
    asking = trie.open()
    trie.extend(asking, [7])
    assert not followers(trie, asking, 1)


def test_a_sequence_keeps_drafting_when_its_generation_grew_old() -> None:
    trie = NgramTrie(400, DEPTH)
    sequence, flood = trie.open(), trie.open()
    trie.extend(sequence, [1, 2, 3, 1, 2])
    turned = trie._young.number
    token = 1000
    while trie._young.number == turned:
        trie.extend(flood, [token])
        token += 1
    assert set(followers(trie, sequence, 2)) == {3}
    trie.extend(sequence, [3])
    assert set(followers(trie, sequence, 3)) == {1}


def test_a_salted_trie_ends_with_its_last_request_and_the_shared_stays() -> None:
    trie = NgramTrie(LARGE, DEPTH)
    for salt, kept in ((b"", True), (b"a", False)):
        first, second = trie.open(salt), trie.open(salt)
        trie.extend(first, [1, 2, 3])
        trie.close(first)
        trie.extend(second, [1])
        assert set(followers(trie, second, 1)) == {2}
        trie.close(second)
        third = trie.open(salt)
        trie.extend(third, [1])
        assert bool(followers(trie, third, 1)) is kept


def test_another_salt_sees_nothing() -> None:
    trie = NgramTrie(LARGE, DEPTH)
    trie.extend(trie.open(b"a"), [1, 2, 3])
    trie.extend(trie.open(), [1, 2, 3])
    other = trie.open(b"b")
    trie.extend(other, [1])
    assert draft(trie, other, 1, 8, NgramSettings()) == ([1], [-1])


def test_a_trie_too_small_for_its_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="72 nodes"):
        NgramTrie(50, 18)


def paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        assert parent < len(found)
        found.append((*found[parent], token) if parent >= 0 else (token,))
    return found


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 16),
    st.sampled_from(["BFS", "PROB"]),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_a_draft_is_a_tree_of_what_was_seen(text: list[int], nodes: int, match: str, shortest: int, more: int) -> None:
    options = NgramSettings(match_type=match, min_window=shortest, max_window=shortest + more)
    trie = NgramTrie(LARGE, DEPTH)
    sequence = trie.open()
    trie.extend(sequence, text)
    tokens, parents = draft(trie, sequence, text[-1], nodes, options)
    assert 1 <= len(tokens) <= nodes
    assert tokens[0] == text[-1]
    assert parents[0] == -1
    found = paths(tokens, parents)
    assert len(set(found)) == len(found)
    for path in found[1:]:
        drafted = list(path[1:])
        windows = range(shortest, min(shortest + more, DEPTH - 1, len(text)) + 1)
        assert any(seen_after([text], text[-size:] + drafted[:-1])[drafted[-1]] for size in windows)
    if nodes > 1 and len(text) >= shortest and seen_after([text], text[-shortest:]):
        assert len(tokens) > 1


def test_bfs_takes_the_most_recent_and_prob_the_most_frequent() -> None:
    text = [0, 1, 5] * 3 + [0, 2, 6] + [0]
    trie = NgramTrie(LARGE, DEPTH)
    sequence = trie.open()
    trie.extend(sequence, text)
    one = {"min_window": 1, "max_window": 1}
    for match, first in (("BFS", 2), ("PROB", 1)):
        tokens, _ = draft(trie, sequence, 0, 2, NgramSettings(match_type=match, **one))
        assert tokens == [0, first]
    tokens, parents = draft(trie, sequence, 0, 5, NgramSettings(max_breadth=1, **one))
    assert paths(tokens, parents)[-1] == (0, 2, 6, 0)
    tokens, parents = draft(trie, sequence, 0, 3, NgramSettings(min_breadth=2, max_breadth=2, **one))
    assert (tokens, parents) == ([0, 2, 1], [-1, 0, 0])


def test_longer_windows_come_first_and_breadth_shrinks_with_depth() -> None:
    text = [3, 0, 1, 9, 0, 2, 0, 4, 3, 0]
    trie = NgramTrie(LARGE, DEPTH)
    sequence = trie.open()
    trie.extend(sequence, text)
    options = NgramSettings(min_window=1, max_window=2, min_breadth=1, max_breadth=4)
    tokens, parents = draft(trie, sequence, 0, 8, options)
    found = paths(tokens, parents)
    assert found[1] == (0, 1)  # what followed "3 0"
    assert set(found) > {(0, 4), (0, 2)}  # then what followed "0" alone


BOTH_DEPTH = 5

compiles = pytest.mark.skipif(not any(map(shutil.which, library.COMPILERS)), reason="no C++ compiler")


def both(capacity: int, depth: int = BOTH_DEPTH) -> tuple[NgramTrie, NativeTrie]:
    native = make_trie(capacity, depth)
    assert isinstance(native, NativeTrie)
    return NgramTrie(capacity, depth), native


def same(tries, sequences, last: int, nodes: int, options: NgramSettings) -> list[int]:
    found = [draft_tree(trie, sequence, last, nodes, options) for trie, sequence in zip(tries, sequences, strict=True)]
    first, second = ((each.tokens, each.parents, each.windows) for each in found)
    assert first == second
    assert len(tries[0]) == len(tries[1])
    assert len(sequences[0]) == len(sequences[1])
    return first[0]


OPTIONS = st.builds(
    lambda match, least, more, short, longer: NgramSettings(
        match_type=match, min_breadth=least, max_breadth=least + more, min_window=short, max_window=short + longer
    ),
    st.sampled_from(["BFS", "PROB"]),
    *(st.integers(1, 3), st.integers(0, 12), st.integers(1, 3), st.integers(0, 4)),
)


@compiles
@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["tell", "tell", "tell", "again", "gap"]),
            st.integers(0, 3),
            st.lists(st.integers(0, 3) | st.integers(0, 40), min_size=1, max_size=40),
        ),
        max_size=30,
    ),
    st.lists(st.sampled_from([b"", b"a", b"b"]), min_size=4, max_size=4),
    st.integers(4 * BOTH_DEPTH, 400),
    st.integers(1, 64),
    OPTIONS,
)
def test_drafts_are_those_of_the_trie_in_python(
    reported, salts, capacity: int, nodes: int, options: NgramSettings
) -> None:
    tries = both(capacity)
    held = [[trie.open(salt) for trie in tries] for salt in salts]
    for what, which, tokens in reported:
        if what == "again":
            for trie, sequence in zip(tries, held[which], strict=True):
                trie.close(sequence)
            held[which] = [trie.open(salts[which]) for trie in tries]
        elif what == "gap":
            for sequence in held[which]:
                sequence.interrupt()
        for trie, sequence in zip(tries, held[which], strict=True):
            trie.extend(sequence, tokens)
        assert len(tries[1]) <= capacity
        same(tries, held[which], tokens[-1], nodes, options)
        same(tries, held[0], 1, nodes, options)


@compiles
@pytest.mark.parametrize("match", ["BFS", "PROB"])
@pytest.mark.parametrize("alphabet", [3, 4 * WIDE, 1000])
def test_long_texts_draft_the_same(match: str, alphabet: int) -> None:
    tries, draw = both(6000, 12), random.Random(alphabet)
    sequences = [[trie.open(salt) for trie in tries] for salt in (b"", b"x", b"")]
    options = NgramSettings(match_type=match)
    drafted = 0
    for step in range(1500):
        pair = sequences[step % 3]
        tokens = [int(alphabet * draw.random() ** 3) for _ in range(draw.randrange(1, 4))]
        for trie, sequence in zip(tries, pair, strict=True):
            trie.extend(sequence, tokens)
        drafted += len(same(tries, pair, tokens[-1], 12, options)) > 1
    assert drafted > 300


@compiles
def test_a_salt_is_forgotten_with_its_last_request() -> None:
    for salt, kept in ((b"", True), (b"a", False)):
        _, trie = both(1000)
        first, other = trie.open(salt), trie.open(b"b")
        trie.extend(first, [1, 2, 3])
        trie.extend(other, [1])
        assert draft_tree(trie, other, 1, 8, NgramSettings()).tokens == [1]
        trie.close(first)
        again = trie.open(salt)
        trie.extend(again, [1])
        assert draft_tree(trie, again, 1, 8, NgramSettings()).tokens == ([1, 2, 3] if kept else [1])


@compiles
def test_a_trie_that_is_dropped_with_its_sequences_open_leaves_nothing() -> None:
    for _ in range(50):
        _, trie = both(1_000_000)
        trie.extend(trie.open(), list(range(100)))
        del trie
        gc.collect()


@compiles
def test_of_a_sequence_that_has_ended_nothing_is_known() -> None:
    _, trie = both(1000)
    ended, other = trie.open(), trie.open()
    trie.extend(ended, [1, 2, 3])
    trie.close(ended)
    ended.interrupt()
    trie.extend(ended, [1, 7])
    assert len(ended) == 0
    assert draft_tree(trie, ended, 1, 8, NgramSettings()).tokens == [1]
    trie.extend(other, [1])
    assert draft_tree(trie, other, 1, 8, NgramSettings()).tokens == [1, 2, 3]


def test_a_compiler_of_another_process_is_not_waited_for_forever(monkeypatch, tmp_path) -> None:
    class Compiling:
        def poll(self) -> None:
            pass

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_trie, "start_build", lambda source: Compiling())
    monkeypatch.setattr(native_trie, "PATIENCE_SECONDS", 0.05)
    native_trie._library.cache_clear()
    try:
        assert type(make_trie(1000, BOTH_DEPTH)) is NgramTrie
    finally:
        native_trie._library.cache_clear()


def test_what_is_compiled_comes_with_the_package() -> None:
    """Otherwise the Python trie would be used without a warning."""
    root = Path(__file__).parents[3]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["kernels"]
    packed = {path for pattern in patterns for path in (root / "kernels").glob(pattern)}
    for source in (native_trie.SOURCE, *library.OPERATORS.values()):
        assert {*source.main.parent.glob("*.cpp"), *source.main.parent.glob("*.h")} <= packed


def test_without_a_compiler_the_trie_is_pythons(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "COMPILERS", ())
    native_trie._library.cache_clear()
    try:
        assert type(make_trie(1000, BOTH_DEPTH)) is NgramTrie
    finally:
        native_trie._library.cache_clear()


def test_both_tries_refuse_what_is_too_small_for_their_depth() -> None:
    with pytest.raises(ValueError, match="72 nodes"):
        make_trie(50, 18)
