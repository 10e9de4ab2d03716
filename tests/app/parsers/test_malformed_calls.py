"""What a model writes wrongly ends as text: never an error, never lost, and the same in any pieces."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.parsers.events import CallArguments, CallBegun, Reasoning, Text
from app.parsers.reasoning.formats import REASONING_FORMATS
from app.parsers.registry import TOOL_PARSERS
from tests.kits.tool_formats import ADD, OSLO, TOOLS, written

FORMATS = sorted(set(TOOL_PARSERS) - {"passthrough"})
WORD = "quux"

Read = tuple[str, str, list[list[str]]]


def read(pieces: list[str], name: str, **keywords: Any) -> Read:
    """Content, thought, and the calls with their arguments as text."""
    reader = TOOL_PARSERS[name](TOOLS, **keywords)
    texts: dict[type, str] = {Text: "", Reasoning: ""}
    calls: list[list[str]] = []
    for event in [event for part in (*map(reader.read, pieces), reader.end()) for event in part]:
        if isinstance(event, CallBegun):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[event.index][1] += event.text
        else:
            texts[type(event)] += event.text
    return texts[Text], texts[Reasoning], calls


def pieces(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def broken(text: str, name: str, rng: random.Random) -> str:
    """The text with a few parts deleted, doubled, moved or replaced, and at times cut."""
    parser = TOOL_PARSERS[name]
    for _ in range(rng.randrange(1, 4)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.randrange(12))
        other = rng.randrange(len(text) + 1)
        part = rng.choice(
            [
                "",
                text[start:end] * 2,
                text[other : other + 8],
                rng.choice([*parser.OPEN, *parser.MARKS, "<think>", "</think>"]),
                rng.choice(["{", "}", '"', "\\", "\n", "[", ",", ">", "</", "\x00", "é"]),
            ]
        )
        text = text[:start] + part + text[end:]
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.3 else text


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("name", FORMATS)
def test_broken_calls_are_read_alike_in_any_pieces(name: str, seed: int) -> None:
    rng = random.Random(seed)
    thoughts = rng.choice([None, *REASONING_FORMATS.values()])
    before = rng.choice(["", "Hm. ", "<think>Hm</think>\n\n", "<|channel|>analysis<|message|>Hm<|end|>"])
    text = broken(before + written(name, OSLO, ADD) + rng.choice(["", " So."]), name, rng)
    keywords = {
        "reasoning_format": thoughts,
        "thinking": rng.choice([None, True, False]),
        "separate": rng.random() < 0.8,
        "parallel": rng.random() < 0.8,
        "hidden": rng.choice([(), ("<think>", "</think>")]),
    }
    assert read(pieces(text, rng), name, **keywords) == read([text], name, **keywords)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("name", FORMATS)
def test_a_word_in_a_call_is_never_lost(name: str, seed: int) -> None:
    """It breaks the call, and is then text or argument, or the call is whole and it stands where calls say nothing."""
    rng = random.Random(seed)
    text = written(name, OSLO, ADD)
    at = rng.randrange(len(text) + 1)
    if name == "gpt-oss" and text.rfind("<|message|>", 0, at) < text.rfind("<|start|>", 0, at):
        return  # names in headers belong to no channel that is shown
    content, _, calls = read(pieces(text[:at] + WORD + text[at:], rng), name)
    if WORD not in content + "".join(arguments for _, arguments in calls):
        assert [[called, json.loads(arguments)] for called, arguments in calls] == [list(OSLO), list(ADD)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_call_adds_nothing_to_the_content(name: str) -> None:
    text = written(name, ("add", {"a": -1.5, "b": None}), OSLO)
    begun = text.index("add") + 3
    whole = read([text], name)[2][0][1]
    for at in range(text.index("-1.5") + 1, text.index("Oslo")):
        content, _, calls = read(list(text[:at]), name)
        assert calls[0][0] == "add"
        if len(calls) == 1 and calls[0][1] != whole:
            assert content == "", (text[begun:at], calls)


@pytest.mark.parametrize("name", FORMATS)
def test_marks_without_calls_lose_no_word(name: str) -> None:
    parser, rng = TOOL_PARSERS[name], random.Random(4)
    marks = [*parser.OPEN, *parser.MARKS, *re.findall(r"\W{1,8}", written(name, ADD))]
    marks = [mark for mark in marks if mark not in ("<|start|>", "<|channel|>", "<|constrain|>")]  # begin headers
    for _ in range(60):
        words = [f"w{number}" for number in range(6)]
        text = "".join(word + rng.choice(marks) + rng.choice(["", " "]) for word in words)
        content, _, calls = read([text], name)
        texts = content + json.dumps(calls, ensure_ascii=False)
        assert not [word for word in words if word not in texts], text


HARMONY = {
    "<|channel|>final Hello!": "final Hello!",
    "<|channel|>final Hello!<|end|>Bye": "final Hello!Bye",
    "<|channel|>fin": "",
    " to=me, said he": " to=me, said he",
    " to=functions.now": "",
    "<|start|>assistant<|channel|>final<|return|>": "",
    "<|start|>assistant<|channel|>commentary to=functions.ad": "",
    "<|channel|>" + "long " * 200 + "<|end|>.": "long " * 200 + ".",
    "<|message|>Hello!<|return|>": "Hello!",
    "<|channel|>final<|message|>It is.<|channel|>final<|message|> So.": "It is. So.",
}


@pytest.mark.parametrize("text", HARMONY, ids=lambda text: repr(text[:60]))
def test_a_header_without_a_message_is_text(text: str) -> None:
    for parts in ([text], list(text)):
        assert read(parts, "gpt-oss", reasoning_format=REASONING_FORMATS["base"])[0] == HARMONY[text]


def test_text_behind_a_broken_header_is_not_held_back() -> None:
    reader = TOOL_PARSERS["gpt-oss"](TOOLS)
    assert any(isinstance(event, Text) for event in reader.read("<|channel|>" + "word " * 200))


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_repeated_end_marks_of_a_thought_are_dropped(tools: Any) -> None:
    for text, thinking, expected in (
        ("<think>Hm</think>\n</think>\n\nIt is.", None, "It is."),
        ("Hm</think></think>It is.", True, "It is."),
        ("</think>\n\nIt is.", False, "It is."),
        ("\n\nIt is.", False, "\n\nIt is."),
        ("<think>Hm</think>It is</think>.", None, "It is</think>."),
    ):
        for parts in ([text], list(text)):
            parser = TOOL_PARSERS["hermes"](tools, reasoning_format=REASONING_FORMATS["base"], thinking=thinking)
            events = [event for part in (*map(parser.read, parts), parser.end()) for event in part]
            assert "".join(event.text for event in events if isinstance(event, Text)) == expected


def test_marks_that_are_special_tokens_are_hidden() -> None:
    for tools in (None, TOOLS):
        parser = TOOL_PARSERS["hermes"](
            tools, reasoning_format=REASONING_FORMATS["base"], hidden=("<think>", "</think>")
        )
        events = [*parser.read("<think>Hm</think>It <think>is</think>."), *parser.end()]
        assert [event.text for event in events if isinstance(event, Text)] == ["It is."]
