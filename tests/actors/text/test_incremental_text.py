"""Incremental text: equal to the whole decode cut at the first stop string, for any tokens, chunks and restarts."""

from __future__ import annotations

import json
import sys
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from actors.text.incremental_text import IncrementalText
from actors.text.token_pieces import TokenPieces
from tests.kits.small_tokenizers import CORPUS, SPECIAL, byte_level


@cache
def byte_fallback() -> Tokenizer:
    """As Llama 2's: spaces as marks, unknown characters as bytes, the text's first space dropped."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(
        CORPUS[:1],
        trainers.BpeTrainer(vocab_size=360, special_tokens=["<unk>", *SPECIAL, *fallback], show_progress=False),
    )
    # The trainer takes them as special tokens only; they are ordinary ones.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in fallback]
    loaded = Tokenizer.from_str(json.dumps(state))
    assert loaded.encode("\U0001f600").tokens[-1] == "<0x80>"
    return loaded


@cache
def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    )
    tokenizer.add_tokens([AddedToken("\u2581\u2581two\u2581marks", special=False)])
    return tokenizer


@cache
def word_piece() -> Tokenizer:
    """A decoder that is no sum of pieces."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    )
    return tokenizer


TOKENIZERS = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "metaspace": metaspace,
    "word-piece": word_piece,
}


def cut(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first, the longest of those that end together."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@st.composite
def streams(draw: st.DrawFn) -> tuple[str, list[int], tuple[str, ...], list[int]]:
    """A tokenizer, token ids, stop strings and cuts of the ids into chunks."""
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    tokenizer = TOKENIZERS[name]()
    size = tokenizer.get_vocab_size()
    words = st.lists(
        st.sampled_from([*CORPUS[1].split(), *CORPUS[2].split(), "\U0001f600", " x", "zz", "\n"]), max_size=8
    )
    written = words.map(lambda parts: tokenizer.encode(" ".join(parts), add_special_tokens=False).ids)
    anything = st.lists(st.integers(0, size + 3), max_size=12)
    if name == "byte-fallback":  # only sound UTF-8: a broken run is the one thing that differs, tested below
        anything = anything.map(lambda ids: [i for i in ids if not is_byte(tokenizer, i)])
    ids = [i for part in draw(st.lists(st.one_of(written, anything), max_size=6)) for i in part]
    whole = tokenizer.decode(ids, skip_special_tokens=False) or "x"
    place = st.integers(0, len(whole) - 1)
    inside = st.tuples(place, st.integers(1, 6)).map(lambda at: whole[at[0] : at[0] + at[1]])
    stops = tuple(draw(st.lists(st.one_of(inside, st.text("aeST \n\ufffd", min_size=1, max_size=4)), max_size=3)))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return name, ids, stops, cuts


def is_byte(tokenizer: Tokenizer, token_id: int) -> bool:
    return (tokenizer.id_to_token(token_id) or "").startswith("<0x")


@settings(max_examples=400, deadline=None)
@given(streams(), st.booleans(), st.booleans())
def test_the_pieces_make_the_whole(stream, include, skip):
    name, ids, stops, cuts = stream
    tokenizer = TOKENIZERS[name]()
    text, stop = cut(tokenizer.decode(ids, skip_special_tokens=skip), stops, include)
    writer = IncrementalText(tokenizer, stop=stops, include_stop=include, skip_special_tokens=skip)
    written, found = "", None
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        piece, found = writer.push(ids[start:end])
        written += piece
        assert text.startswith(written)  # never the start of a stop string, never half a character
    written += writer.finish()
    assert written == text
    assert writer.push([])[1] == stop
    assert found == stop or found is None  # it may be complete only with the end


@settings(max_examples=400, deadline=None)
@given(streams(), st.booleans(), st.data())
def test_a_restart_goes_on_where_it_was(stream, include, data):
    name, ids, stops, cuts = stream
    pieces = TokenPieces(TOKENIZERS[name]())
    fields = {"stop": stops, "include_stop": include}
    expected, _ = cut(pieces.tokenizer.decode(ids), stops, include)
    writer, written = IncrementalText(pieces, **fields), ""
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        piece, found = writer.push(ids[start:end])
        written += piece
        if found is None and data.draw(st.booleans()):
            writer = IncrementalText(pieces, **fields)
            # The tokens of the last push may be known although their text was never handed out.
            lost = data.draw(st.booleans())
            writer.restore(ids[:end], len(written) - (len(piece) if lost else 0))
            written = written[: len(written) - len(piece)] if lost else written
    written += writer.finish()
    assert written == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(3, 258), max_size=30), st.lists(st.integers(0, 30), max_size=5))
def test_bytes_that_are_no_text_are_replaced_whatever_the_chunks(ids, cuts):
    tokenizer = byte_fallback()
    data = bytes(i - 3 for i in ids)
    assert [tokenizer.id_to_token(i) for i in ids] == [f"<0x{byte:02X}>" for byte in data]
    expected = data.decode("utf-8", "replace").removeprefix(" ")
    writer, written, cuts = IncrementalText(tokenizer), "", sorted(c for c in cuts if c <= len(ids))
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        written += writer.push(ids[start:end])[0]
    assert written + writer.finish() == expected


def test_a_character_comes_when_it_is_whole():
    tokenizer = byte_level()
    ids = tokenizer.encode("a\u20ac").ids
    assert len(ids) > 2
    writer = IncrementalText(tokenizer)
    assert [writer.push([i])[0] for i in ids] == ["a", *[""] * (len(ids) - 2), "\u20ac"]
    half = IncrementalText(tokenizer)
    assert half.push(ids[:-1]) == ("a", None)
    assert half.finish() == "\ufffd"
    assert half.finish() == ""


def test_text_is_held_no_longer_than_it_might_be_a_stop_string():
    tokenizer = byte_level()
    ids = {c: tokenizer.encode(c).ids[0] for c in "abcdx"}
    writer = IncrementalText(tokenizer, stop=("abad", "bc"))
    assert [writer.push([ids[c]])[0] for c in "xababx"] == ["x", "", "", "", "ab", "abx"]
    assert writer.push([ids[c] for c in "aba"]) == ("", None)
    assert writer.push([ids["d"], ids["x"]]) == ("", "abad")
    assert writer.push([ids["x"]]) == ("", "abad")
    assert writer.finish() == ""


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xab")])
def test_of_two_stop_strings_the_one_complete_first_counts(include, text):
    tokenizer = byte_level()
    ids = [tokenizer.encode(c).ids[0] for c in "xabcd"]
    for order in (("abc", "ab"), ("ab", "abc")):
        whole = IncrementalText(tokenizer, stop=order, include_stop=include)
        assert whole.push(ids) == (text, "ab")
    assert IncrementalText(tokenizer, stop=("c", "abc")).push(ids) == ("x", "abc")  # they end together: the longer


def test_special_tokens_are_skipped_or_shown():
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|end|>")
    [other, *_] = (token for token in SPECIAL if token != "<|end|>")
    special = tokenizer.token_to_id(other)
    ids = [*tokenizer.encode("hi").ids, end, tokenizer.token_to_id("<tool call>")]
    assert IncrementalText(tokenizer).push(ids) == ("hi<tool call>", None)
    assert IncrementalText(tokenizer, skip_special_tokens=False).push(ids) == ("hi<|end|><tool call>", None)
    assert IncrementalText(tokenizer, shown=("<|end|>", "none")).push([*ids, special]) == ("hi<|end|><tool call>", None)
    words = word_piece()
    ended = [words.token_to_id(token) for token in ("<|end|>", other)]
    assert IncrementalText(words, shown=("<|end|>",)).push(ended) == ("<|end|>", None)
    shown = IncrementalText(tokenizer, skip_special_tokens=False, stop=("<|end|>",))
    assert shown.push(ids) == ("hi", "<|end|>")


@pytest.mark.parametrize("make", [byte_fallback, metaspace])
def test_a_text_that_goes_on_keeps_its_first_space(make):
    tokenizer = make()
    ids = tokenizer.encode("capital of").ids
    assert IncrementalText(tokenizer).push(ids)[0] == "capital of" == tokenizer.decode(ids)
    assert IncrementalText(tokenizer, at_start=False).push(ids)[0] == " capital of"


def test_ids_without_a_token_add_no_text():
    assert IncrementalText(byte_level()).push([10**6, 2**31 - 1]) == ("", None)


def test_a_restart_that_claims_more_text_than_there_is_is_refused():
    with pytest.raises(ValueError, match="3 characters were returned"):
        IncrementalText(byte_level()).restore(byte_level().encode("ab").ids, 3)


@pytest.mark.parametrize("make", list(TOKENIZERS.values()))
@pytest.mark.parametrize("kind", ["words", "broken", "special"])
def test_the_cost_of_a_token_does_not_grow(make, kind):
    """Counted in calls into Python functions and the tokenizer, not in seconds."""
    tokenizer = make()
    if kind == "words":
        ids = tokenizer.encode(CORPUS[0]).ids
    elif kind == "broken":
        ids = [i for i in range(tokenizer.get_vocab_size()) if "\ufffd" in tokenizer.decode([i])][:1] or [5]
    else:
        ids = [tokenizer.token_to_id("<|end|>")]
    counted = _CountingTokenizer(tokenizer)
    writer = IncrementalText(TokenPieces(counted), stop=("never there",))
    costs = []
    for _ in range(2):
        counted.tokens = 0
        for place in range(1500):
            writer.push([ids[place % len(ids)]])
        costs.append(counted.tokens)
    assert costs[1] <= costs[0] + 10
    assert costs[1] <= 1500 * 40
    assert sys.getsizeof(writer.finish()) < 2000


class _CountingTokenizer:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = 0

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.tokens += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)
