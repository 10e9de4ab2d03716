"""The n-gram trie against a list of everything that was seen."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.speculative.ngram import guess as guess_tree
from kernels.speculative.settings import NgramSettings
from kernels.speculative.trie import MOST_CHILDREN, NgramTrie, Sequence

DEPTH = 5
LARGE = 1 << 20


def guess(trie: NgramTrie, sequence: Sequence, last: int, nodes: int, options: NgramSettings):
    tree = guess_tree(trie, sequence, last, nodes, options)
    assert len(tree.windows) == len(tree.tokens)
    return tree.tokens, tree.parents


def followers(trie: NgramTrie, sequence: Sequence, length: int) -> Counter[int]:
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
        assert [generation.token[child] for child in generation.children(node)] == recent[:MOST_CHILDREN]
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


def test_a_salt_is_forgotten_with_its_last_request_and_the_shared_trie_is_not() -> None:
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
    assert guess(trie, other, 1, 8, NgramSettings()) == ([1], [-1])


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
    tokens, parents = guess(trie, sequence, text[-1], nodes, options)
    assert 1 <= len(tokens) <= nodes
    assert tokens[0] == text[-1]
    assert parents[0] == -1
    found = paths(tokens, parents)
    assert len(set(found)) == len(found)
    for path in found[1:]:
        guessed = list(path[1:])
        windows = range(shortest, min(shortest + more, DEPTH - 1, len(text)) + 1)
        assert any(seen_after([text], text[-size:] + guessed[:-1])[guessed[-1]] for size in windows)
    if nodes > 1 and len(text) >= shortest and seen_after([text], text[-shortest:]):
        assert len(tokens) > 1


def test_bfs_takes_the_most_recent_and_prob_the_most_frequent() -> None:
    text = [0, 1, 5] * 3 + [0, 2, 6] + [0]
    trie = NgramTrie(LARGE, DEPTH)
    sequence = trie.open()
    trie.extend(sequence, text)
    one = {"min_window": 1, "max_window": 1}
    for match, first in (("BFS", 2), ("PROB", 1)):
        tokens, _ = guess(trie, sequence, 0, 2, NgramSettings(match_type=match, **one))
        assert tokens == [0, first]
    tokens, parents = guess(trie, sequence, 0, 5, NgramSettings(max_breadth=1, **one))
    assert paths(tokens, parents)[-1] == (0, 2, 6, 0)
    tokens, parents = guess(trie, sequence, 0, 3, NgramSettings(min_breadth=2, max_breadth=2, **one))
    assert (tokens, parents) == ([0, 2, 1], [-1, 0, 0])


def test_longer_windows_come_first_and_breadth_shrinks_with_depth() -> None:
    text = [3, 0, 1, 9, 0, 2, 0, 4, 3, 0]
    trie = NgramTrie(LARGE, DEPTH)
    sequence = trie.open()
    trie.extend(sequence, text)
    options = NgramSettings(min_window=1, max_window=2, min_breadth=1, max_breadth=4)
    tokens, parents = guess(trie, sequence, 0, 8, options)
    found = paths(tokens, parents)
    assert found[1] == (0, 1)  # what followed "3 0"
    assert set(found) > {(0, 4), (0, 2)}  # then what followed "0" alone
