"""The trie in C++ against the one in Python: the same drafts of the same n-grams, whatever was forgotten."""

import gc
import random
import shutil
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.native import library
from kernels.speculative import native_trie
from kernels.speculative.native_trie import NativeTrie, make_trie
from kernels.speculative.ngram import guess
from kernels.speculative.settings import NgramSettings
from kernels.speculative.trie import WIDE, NgramTrie

DEPTH = 5

compiles = pytest.mark.skipif(not any(map(shutil.which, library.COMPILERS)), reason="no C++ compiler")


def both(capacity: int, depth: int = DEPTH) -> tuple[NgramTrie, NativeTrie]:
    native = make_trie(capacity, depth)
    assert isinstance(native, NativeTrie)
    return NgramTrie(capacity, depth), native


def same(tries, sequences, last: int, nodes: int, options: NgramSettings) -> list[int]:
    found = [guess(trie, sequence, last, nodes, options) for trie, sequence in zip(tries, sequences, strict=True)]
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
    st.integers(4 * DEPTH, 400),
    st.integers(1, 64),
    OPTIONS,
)
def test_drafts_are_those_of_the_trie_in_python(told, salts, capacity: int, nodes: int, options: NgramSettings) -> None:
    tries = both(capacity)
    held = [[trie.open(salt) for trie in tries] for salt in salts]
    for what, which, tokens in told:
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
    guessed = 0
    for step in range(1500):
        pair = sequences[step % 3]
        tokens = [int(alphabet * draw.random() ** 3) for _ in range(draw.randrange(1, 4))]
        for trie, sequence in zip(tries, pair, strict=True):
            trie.extend(sequence, tokens)
        guessed += len(same(tries, pair, tokens[-1], 12, options)) > 1
    assert guessed > 300


@compiles
def test_a_salt_is_forgotten_with_its_last_request() -> None:
    for salt, kept in ((b"", True), (b"a", False)):
        _, trie = both(1000)
        first, other = trie.open(salt), trie.open(b"b")
        trie.extend(first, [1, 2, 3])
        trie.extend(other, [1])
        assert guess(trie, other, 1, 8, NgramSettings()).tokens == [1]
        trie.close(first)
        again = trie.open(salt)
        trie.extend(again, [1])
        assert guess(trie, again, 1, 8, NgramSettings()).tokens == ([1, 2, 3] if kept else [1])


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
    assert guess(trie, ended, 1, 8, NgramSettings()).tokens == [1]
    trie.extend(other, [1])
    assert guess(trie, other, 1, 8, NgramSettings()).tokens == [1, 2, 3]


def test_a_compiler_of_another_process_is_not_waited_for_forever(monkeypatch, tmp_path) -> None:
    class Compiling:
        def poll(self) -> None:
            pass

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_trie, "start_build", lambda source: Compiling())
    monkeypatch.setattr(native_trie, "PATIENCE", 0.05)
    native_trie._library.cache_clear()
    try:
        assert type(make_trie(1000, DEPTH)) is NgramTrie
    finally:
        native_trie._library.cache_clear()


def test_what_is_compiled_comes_with_the_package() -> None:
    """Without it the trie would be Python's, and nobody be told."""
    root = Path(__file__).parents[3]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["kernels"]
    packed = {path for pattern in patterns for path in (root / "kernels").glob(pattern)}
    for source in (native_trie.SOURCE, library.OPERATORS):
        assert {*source.main.parent.glob("*.cpp"), *source.main.parent.glob("*.h")} <= packed


def test_without_a_compiler_the_trie_is_pythons(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "COMPILERS", ())
    native_trie._library.cache_clear()
    try:
        assert type(make_trie(1000, DEPTH)) is NgramTrie
    finally:
        native_trie._library.cache_clear()


def test_a_trie_too_small_for_its_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="72 nodes"):
        make_trie(50, 18)
