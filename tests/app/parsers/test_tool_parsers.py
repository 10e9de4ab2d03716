"""Formats of tool calls: the text of a choice, taken apart as it arrives."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.options import ARGUMENTS
from app.parsers.registry import OFF, TOOL_PARSERS, tool_parser
from app.parsers.tools.hermes import HermesParser

NAMES = ("get_weather", "add")
OSLO = '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "Oslo"}}\n</tool_call>'
SUM = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
CALLS = {re.sub("</?tool_call>", "", text).strip() for text in (OSLO, SUM, '{"name": "add"}')}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]


def pieces(*texts: str, size: int = 7) -> list[str]:
    return [text[at : at + size] for text in texts for at in range(0, len(text), size)]


Read = tuple[str, list[tuple[str, str]]]

TEXTS: dict[str, Read] = {
    "": ("", []),
    "a < b </tool_call> <tool_cal <think": ("a < b </tool_call> <tool_cal <think", []),
    OSLO: ("", [("get_weather", '{"city":  "Oslo"}')]),
    f"Let me look. {OSLO}\n{SUM}\n": ("Let me look. ", [("get_weather", '{"city":  "Oslo"}'), ("add", '{"a": 1}')]),
    f"{SUM}  so <b>": ("so <b>", [("add", '{"a": 1}')]),
    '<tool_call>{"name": "add"}</tool_call>': ("", [("add", "{}")]),
    f"<think>\nI say {OSLO} </think>\n\n{SUM}": (f"<think>\nI say {OSLO} </think>\n\n", [("add", '{"a": 1}')]),
    OSLO.removesuffix("</tool_call>"): ("", [("get_weather", '{"city":  "Oslo"}')]),
    f"<think>{OSLO}": (f"<think>{OSLO}", []),
    f" \n<think>{OSLO}</think><think>{SUM}": (f" \n<think>{OSLO}</think><think>", [("add", '{"a": 1}')]),
    f"I <think> so. {SUM}": ("I <think> so. ", [("add", '{"a": 1}')]),
    f"{SUM}<think>{SUM}": ("<think>", [("add", '{"a": 1}')] * 2),
    **{
        text: (text, [])
        for text in (
            '<tool_call>{"name": "rm", "arguments": {}}</tool_call> x',
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "add", "arguments": "[1]"}</tool_call>',
            '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
            '<tool_call>{"name": "add", "arguments": {"a": ',
            "<tool_call>__import__('os')</tool_call>\n",
            f'<tool_call>{{"name": "add", "arguments": {"[" * 5000}</tool_call>',
        )
    },
}


def read(pieces: list[str], **keywords: Any) -> Read:
    reader = HermesParser(NAMES, **keywords)
    told = [*map(reader.read, pieces), reader.end()]
    calls = [call for _, some in told for call in some]
    assert [call.index for call in calls] == list(range(reader.calls))
    assert len({call.id for call in calls}) == len(calls)
    return "".join(text for text, _ in told), [(call.function.name, call.function.arguments) for call in calls]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:60]))
def test_a_text_is_taken_apart_however_it_comes(text: str) -> None:
    for size in (len(text) + 1, 1, 2, 5, 11):
        assert read(pieces(text, size=size)) == TEXTS[text]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([*TEXTS, "<tool_call>", "</tool_call>", "<think>", "</think>", "\n", "é"]), max_size=6))
def test_nothing_but_calls_is_lost(parts: list[str]) -> None:
    text = "".join(parts)
    whole = read([text])
    assert read(list(text)) == whole
    thought = re.match(r"\s*<think>.*?(?:</think>|\Z)|", text, re.DOTALL)[0]
    assert whole[0] == thought + re.sub(
        r"<tool_call>(.*?)(?:</tool_call>|\Z)\s*", left, text[len(thought) :], flags=re.DOTALL
    )


def left(block: re.Match[str]) -> str:
    """Nothing of a call, all of another block."""
    return "" if block[1].strip() in CALLS else block[0]


def test_a_thought_may_have_begun_in_the_prompt() -> None:
    text = f"I say {OSLO}<think> </think>{SUM}"
    assert read(list(text), thinking=True) == (text.removesuffix(SUM), [("add", '{"a": 1}')])
    assert read([OSLO], thinking=True) == (OSLO, [])


def test_text_is_returned_as_soon_as_it_cannot_be_a_call() -> None:
    reader = HermesParser(NAMES)
    told = [reader.read(piece)[0] for piece in ("Hel", "lo <", "b> <tool", "_box>")]
    assert told == ["Hel", "lo ", "<b> ", "<tool_box>"]


def test_only_the_first_call_where_there_may_be_one() -> None:
    assert read([f"x {OSLO}{SUM} y"], parallel=False) == ("x y", [("get_weather", '{"city":  "Oslo"}')])


def test_every_choice_of_the_option_is_a_registered_format() -> None:
    (option,) = (argument for argument in ARGUMENTS if argument.name == "tool-call-parser")
    assert set(option.choices) == {*TOOL_PARSERS, OFF}
    assert tool_parser(OFF) is None
    assert tool_parser(None) is TOOL_PARSERS[option.default_text]
    for parser in TOOL_PARSERS.values():
        assert all(parser.MARKS)
