"""Regular expressions that end a text: found as Python finds them, in linear time, whatever the pieces are."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from actors.protocol.requests import InvalidRequest, SamplingParams
from actors.requests.sampling_rules import validate
from actors.text.incremental_text import IncrementalText
from actors.text.stop_patterns import MAX_HELD_CHARS, PatternError, StopPattern, StopPatterns
from tests.kits.small_tokenizers import byte_level

ATOMS = st.sampled_from(["a", "b", "c", "[ab]", "[^a]", "[a-c ]", r"\w", r"\d", r"\s", ".", " ", r"\.", "1"])
COUNTS = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}", "{,2}", "*?", "+?"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("({}){}".format, inner, COUNTS),
    ),
    max_leaves=8,
)


def first_match(pattern: str, text: str) -> tuple[int, int] | None:
    """The end of the match that ends first, and the length of the longest one there, by trying all."""
    compiled = re.compile(pattern)
    for end in range(1, len(text) + 1):
        for start in range(end):
            if compiled.fullmatch(text, start, end):
                return end, end - start
    return None


@given(PATTERNS, st.text("abc1 .\n", max_size=10))
def test_a_match_is_the_first_that_ends_and_the_longest_there(pattern, text):
    assume(re.fullmatch(pattern, "") is None)
    found = StopPatterns([pattern]).feed(text)
    assert (None if found is None else found[:2]) == first_match(pattern, text)


@given(PATTERNS, st.text("abc1 .\n", max_size=12), st.lists(st.integers(1, 4), min_size=12))
def test_pieces_change_nothing_and_no_part_of_a_match_is_returned(pattern, text, cuts):
    assume(re.fullmatch(pattern, "") is None)
    whole = first_match(pattern, text)
    expected = text if whole is None else text[: whole[0] - whole[1]]
    tokenizer, written, matched = byte_level(), "", None
    ids = [tokenizer.encode(char).ids[0] for char in text]
    writer = IncrementalText(tokenizer, patterns=[pattern])
    while ids and matched is None:
        step = cuts.pop() if cuts else 1
        more, matched = writer.push(ids[:step])
        written, ids = written + more, ids[step:]
        assert expected.startswith(written)
    assert written + writer.finish() == expected
    assert matched == (None if whole is None else pattern)


def test_a_restored_text_still_finds_a_match_that_began_before():
    tokenizer = byte_level()
    ids = tokenizer.encode("so aaaa").ids
    first = IncrementalText(tokenizer, patterns=["a{4,}!"])
    sent = "".join(first.push([token])[0] for token in ids)
    assert sent == "so "
    restored = IncrementalText(tokenizer, patterns=["a{4,}!"])
    restored.restore(ids, len(sent))
    assert restored.push(tokenizer.encode("!").ids) == ("", "a{4,}!")


def test_of_a_string_and_a_pattern_the_first_end_counts():
    tokenizer = byte_level()
    for stop, pattern, text, expected in (
        ("b", "c", "abc", ("a", "b")),
        ("c", "b", "abc", ("a", "b")),
        ("b", "ab", "xabc", ("x", "ab")),
    ):
        writer = IncrementalText(tokenizer, stop=[stop], patterns=[pattern])
        assert writer.push(tokenizer.encode(text).ids) == expected


def test_the_match_stays_in_the_text_on_request():
    tokenizer = byte_level()
    writer = IncrementalText(tokenizer, patterns=[r"[.!?]\s*$"], include_stop=True)
    assert writer.push(tokenizer.encode("One. Two.").ids) == ("One.", r"[.!?]\s*$")


def test_what_may_start_a_match_is_held_up_to_a_bound():
    patterns = StopPatterns(["(?s)<.*>"])
    assert patterns.feed("a" * 100) is None
    assert patterns.held == 0
    assert patterns.feed("<" + "a" * 3 * MAX_HELD_CHARS) is None
    assert patterns.held == MAX_HELD_CHARS
    assert patterns.feed("a>") == (2, MAX_HELD_CHARS, "(?s)<.*>")


def test_flags_fold_case_and_let_the_dot_match_lines():
    assert StopPatterns(["(?i)END[a-c]"]).feed("the enDB") == (8, 4, "(?i)END[a-c]")
    assert StopPatterns(["a.b"]).feed("a\nb") is None
    assert StopPatterns(["(?s)a.b"]).feed("a\nb") == (3, 3, "(?s)a.b")


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(a|b)*a(a|b){60}", "(.*)(.*)(.*)x"])
def test_patterns_that_backtrack_for_ever_elsewhere_take_linear_steps(pattern):
    automaton = StopPattern(pattern)
    live, maximum = 0, 0
    for char in "a" * 5000 + "!":
        live = automaton.step(live, char)
        maximum = max(maximum, len(automaton._next))
    assert maximum <= 1024


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("", "empty"),
        ("a*", "matches the empty text"),
        ("(", "ends too early|not closed"),
        (")", "closes nothing"),
        ("[a", "ends too early"),
        ("[b-a]", "before its start"),
        ("a**", "repeats a repetition"),
        ("*", "repeats nothing"),
        ("a{3,2}", "below its start"),
        ("a{500}", "more than 256"),
        ("(a{20}){20}", "more than 256"),
        ("((){99}){99}x", "more than 256"),
        ("(" * 40 + "a" + ")" * 40, "deep"),
        ("^a", "anchor"),
        ("a$b", "anchor"),
        (r"\ba", "anchor"),
        (r"(a)\1", "reference"),
        ("(?=a)b", "look-around"),
        ("(?P<x>a)", "look-around"),
        (r"\x1", "hexadecimal"),
        (r"\U00110000", "hexadecimal"),
        (r"\q", "escape"),
        ("\\", "ends too early"),
    ],
)
def test_wrong_patterns_are_refused_by_name_with_the_remedy(pattern, why):
    with pytest.raises(InvalidRequest, match=why) as caught:
        validate(SamplingParams(stop_regex=(pattern,)))
    assert caught.value.param == "stop_regex"


def test_escapes_and_classes_mean_what_they_mean_in_python():
    for pattern, text in (
        (r"\x41\u00e9\U0001f600", "Aé😀"),
        (r"[\]\-\n]{3}", "]-\n"),
        (r"[]a]b", "]b"),
        (r"[^\w\s]\W", "?!"),
        (r"\D\S\.", "ab."),
        (r"a{,x}", "a{,x}"),
        (r"[\d-]+;", "1-;"),
        (r"\0\t", "\0\t"),
    ):
        found = StopPatterns([pattern]).feed(text)
        assert found is not None, pattern
        assert found[0] == len(text), pattern
        assert re.fullmatch(pattern, text), pattern


def test_no_pattern_error_is_lost():
    with pytest.raises(PatternError, match="closes nothing"):
        StopPattern("a)")
