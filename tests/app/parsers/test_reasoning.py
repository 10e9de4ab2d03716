"""Thoughts: the text of a choice, divided into thought and answer as it arrives."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.options import ARGUMENTS
from app.parsers.base import StreamingParser
from app.parsers.events import CallArguments, CallBegun, Reasoning, Text
from app.parsers.harmony import HarmonyParser
from app.parsers.reasoning.formats import REASONING_FORMATS
from app.parsers.registry import AUTO, OFF, output_format
from app.parsers.tools.kimi_k2 import KimiK2Parser
from tests.kits.tool_formats import ADD, TOOLS, written

Read = tuple[str, str, int]

BASE = REASONING_FORMATS["base"]
SEPARATED = [name for name, form in REASONING_FORMATS.items() if not form.inline]


def read(pieces: list[str], kind: type[StreamingParser] = StreamingParser, **keywords: Any) -> Read:
    """Thought, content and the number of calls."""
    reader = kind(keywords.pop("tools", None), **{"reasoning_format": BASE, **keywords})
    events = [event for part in (*map(reader.read, pieces), reader.end()) for event in part]
    thought, content = (
        "".join(event.text for event in events if isinstance(event, kind)) for kind in (Reasoning, Text)
    )
    return thought, content, reader.calls


@pytest.mark.parametrize("name", SEPARATED)
def test_a_thought_is_separated_in_any_pieces(name: str) -> None:
    form = REASONING_FORMATS[name]
    text = f"{form.begin}{form.label}\nHm, a < b.\n\nYes \n{form.end}\n\nIt is."
    for size in (len(text), 1, 2, 3, 7):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(pieces, reasoning_format=form) == ("Hm, a < b.\n\nYes", "It is.", 0)


@pytest.mark.parametrize("name", SEPARATED)
def test_a_thought_may_begin_in_the_prompt(name: str) -> None:
    form = REASONING_FORMATS[name]
    text = f"Hm{form.end}It is."
    thinking = form.in_prompt(f"<|assistant|>{form.begin}{form.label}\n")
    assert thinking is True
    assert read([text], reasoning_format=form, thinking=thinking) == ("Hm", "It is.", 0)
    assert form.in_prompt(f"{form.begin}\n\n{form.end}\n\n") is False
    assert form.in_prompt("<|assistant|>") is None
    assert read(["It is."], reasoning_format=form, thinking=False) == ("", "It is.", 0)


def test_some_models_think_without_a_mark() -> None:
    for name in SEPARATED:
        form = REASONING_FORMATS[name]
        expected = ("Hm", "It is.", 0) if form.always else ("", f"Hm{form.end}It is.", 0)
        assert read([f"Hm{form.end}It is."], reasoning_format=form) == expected, name


def test_a_thought_that_does_not_end_is_all_thought() -> None:
    assert read(list("<think>Hm, so </thi")) == ("Hm, so </thi", "", 0)


def test_without_a_thought_all_is_content() -> None:
    assert read(list(" \nIt <think> is</think>.")) == ("", " \nIt <think> is</think>.", 0)


def test_a_thought_may_stay_in_the_content() -> None:
    text = "<think>\nHm\n</think>\n\nIt is."
    assert read(list(text), separate=False) == ("", text, 0)
    assert read(list(text), OutputKind, separate=False, tools=TOOLS) == ("", text, 0)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_thought_of_minimax_append_think_stays_in_the_answer(size: int) -> None:
    form = REASONING_FORMATS["minimax-append-think"]
    for text, thinking, expected in (
        ("Hm</think>\n\nIt is.", True, "<think>Hm</think>\n\nIt is."),
        ("Hm</think>It is.", None, "<think>Hm</think>It is."),
        ("<think>Hm</think>It is.", None, "<think>Hm</think>It is."),
        ("It is.", False, "It is."),
    ):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(pieces, reasoning_format=form, thinking=thinking) == ("", expected, 0)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", [name for name, form in REASONING_FORMATS.items() if form.answer])
def test_marks_around_the_answer_are_dropped(name: str, tools: Any) -> None:
    form = REASONING_FORMATS[name]
    begin, end = form.answer[:2]
    text = f"{form.begin}Hm{form.end}\n{begin}\nIt < is.\n{end}\n"
    for size in (len(text), 1, 2, 7):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(pieces, OutputKind, reasoning_format=form, tools=tools) == ("Hm", "It < is.", 0)
    assert read([f"It is.{end}"], reasoning_format=form, thinking=False) == ("", "It is.", 0)
    assert read([text], reasoning_format=form, separate=False) == ("", text, 0)


@pytest.mark.parametrize("name", [name for name, form in REASONING_FORMATS.items() if form.others])
def test_marks_may_have_other_spellings(name: str) -> None:
    form = REASONING_FORMATS[name]
    for begin, end in form.others:
        assert read(list(f"{begin}Hm{end}It is."), reasoning_format=form) == ("Hm", "It is.", 0)
        assert (form.in_prompt(f"user {begin}\n"), form.in_prompt(f"{begin}\n{end}\n")) == (True, False)
        if form.begin in begin:
            continue  # both stand in one template
        spelled = form.spelled(f"<|assistant|>{begin}")
        assert (spelled.begin, spelled.end, set(spelled.marks)) == (begin, end, set(form.marks))
    assert form.spelled(form.end) is form.spelled("") is form


@pytest.mark.parametrize(
    ("name", "thoughts"),
    [
        *((name, name) for name in ("apertus", "solar_open2", "kimi_k3", "kimi_k2", "glm45")),
        ("qwen3_coder", "qwen3"),
        ("qwen3_coder", "nemotron"),
        ("hermes", "qwen3-thinking"),
    ],
)
def test_a_call_ends_an_open_thought(name: Any, thoughts: Any) -> None:
    form = output_format(name, thoughts, None, "")
    kind = form.parser(True)
    assert kind is not None
    assert form.reasoning_format is not None
    text = form.reasoning_format.begin + "Hm" + written(name, ADD)
    assert read(list(text), kind, reasoning_format=form.reasoning_format, tools=TOOLS) == ("Hm", "", 1)
    assert read(list(text), reasoning_format=form.reasoning_format)[1:] == ("", 0)  # no calls are read


def test_kimi_k3_puts_its_answer_and_calls_in_elements() -> None:
    form = output_format("kimi_k3", "kimi_k3", None, "")
    kind = form.parser(True)
    assert kind is not None
    assert {"<|open|>", "<|close|>", "<|sep|>"} <= set(form.special_tokens(False))
    end = "<|close|>message<|sep|>"
    for answer in ("It is.", ""):
        text = f"Hm<|close|>think<|sep|><|open|>response<|sep|>{answer}<|close|>response<|sep|>"
        keywords: dict[str, Any] = {"reasoning_format": form.reasoning_format, "thinking": True}
        assert read(list(text + end), **keywords) == ("Hm", answer, 0)
        text += written("kimi_k3", ADD) + end
        assert read(list(text), kind, **dict(keywords), tools=TOOLS) == ("Hm", answer, 1)


def test_a_thought_may_come_as_a_whole() -> None:
    reader = StreamingParser(None, reasoning_format=BASE, stream_reasoning=False)
    events = [reader.read(piece) for piece in ("<think>", "Hm", ", so", "</think>", "x")]
    assert events == [[], [], [], [Reasoning("Hm, so")], [Text("x")]]


def test_calls_in_a_thought_are_thought() -> None:
    call = written("hermes", ADD)
    kind = output_format("hermes", "base", None, "").parser(True)
    assert kind is not None
    thought, content, calls = read(list(f"<think>I say {call}</think>\n{call}"), kind, tools=TOOLS)
    assert (thought, content, calls) == (f"I say {call}", "", 1)


def test_kimi_calls_tools_in_the_middle_of_a_thought() -> None:
    form = output_format("kimi_k2", "kimi_k2", None, "")
    kind = form.parser(True)
    assert kind is not None
    text = "<think>Hm" + written("kimi_k2", ADD)
    assert read(list(text), kind, reasoning_format=form.reasoning_format, tools=TOOLS) == ("Hm", "", 1)


HARMONY = (
    "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    + written("gpt-oss", ADD)
    + "<|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
    + "<|start|>assistant<|channel|>commentary to=python code<|message|>1+1<|call|>"
    + "<|start|>assistant<|channel|>final<|message|> It is.<|return|>"
)


def test_harmony_channels_become_fields() -> None:
    for size in (len(HARMONY), 1, 2, 3, 7):
        pieces = [HARMONY[at : at + size] for at in range(0, len(HARMONY), size)]
        assert read(pieces, HarmonyParser, tools=TOOLS) == ("Hm, <b>.\nSo.\n1+1", "I look. It is.", 1)
    assert read([HARMONY], HarmonyParser)[2] == 0
    assert read(["Just text."], HarmonyParser) == ("", "Just text.", 0)
    assert read([HARMONY], HarmonyParser, separate=False)[:2] == (
        "", 'Hm, <b>.I look.{"a":-1.5,"b":null}So.1+1 It is.',
    )  # fmt: skip


OutputKind = output_format("hermes", "base", None, "").parser(True) or StreamingParser


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", [*REASONING_FORMATS, "gpt-oss"])
def test_any_chunking_of_any_text_gives_the_same(name: str, data: st.DataObject) -> None:
    form = output_format("hermes", name, None, "")
    kind = form.parser(True)
    assert kind is not None
    marks = [
        *form.special_tokens(True),
        form.reasoning_format.label if form.reasoning_format else "",
        "<think",
        "\n",
        " ",
        "a",
        HARMONY,
    ]
    text = data.draw(st.lists(st.sampled_from(marks)).map("".join))
    keywords = {
        "reasoning_format": form.reasoning_format,
        "thinking": data.draw(st.sampled_from([None, True, False])),
        "separate": data.draw(st.booleans()),
        "stream_reasoning": data.draw(st.booleans()),
        "tools": data.draw(st.sampled_from([None, TOOLS])),
    }
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces, kind, **dict(keywords)) == read([text], kind, **dict(keywords))


TEMPLATES = {
    "base": "{{ message.content.split('</think>')[-1] }}",
    "kimi": "◁think▷",
    "mistral": "[THINK]",
    "gemma": "<|channel>thought",
    "cohere": "<|START_THINKING|>",
    "minimax": "<minimax:tool_call> <think> </think>",
    "kimi_k2": "<|tool_call_begin|> <think></think>",
    "minimax-m3": "]<]minimax[>[<tool_call> <mm:think>",
    "seed_oss": "<seed:tool_call> <seed:think>",
    "hy_v3": "<tool_calls> <tool_call> <tool_sep> <think> </think>",
    "hunyuan_a13b": "<tool_calls>[{name}]</tool_calls> <think>\n\n</think>\n",
    "apertus": "<|inner_prefix|>",
    "solar_open2": "<|think:start|>",
    "kimi_k3": "'<|open|>' + tag + '<|sep|>'",
    "k2_horizon": "<ifm|think>",
    "granite": "Here is my thought process:",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_auto_reads_the_format_off_the_template(name: str) -> None:
    for option in (None, AUTO):
        assert output_format(None, option, TEMPLATES[name], "").reasoning_format == REASONING_FORMATS[name]
    assert output_format(None, None, "{{ messages }}", "").reasoning_format is None
    suffixed = output_format(None, None, "<arg_key:6124c78e> <think:6124c78e>", "").reasoning_format
    assert suffixed is not None
    assert (suffixed.begin, suffixed.end) == ("<think:6124c78e>", "</think:6124c78e>")


def test_every_choice_of_the_option_is_a_format() -> None:
    (option,) = (argument for argument in ARGUMENTS if argument.name == "reasoning-parser")
    assert set(option.choices) == {*REASONING_FORMATS, "gpt-oss", OFF, AUTO}
    assert set(option.synonyms.values()) <= set(option.choices)
    assert not any(re.search("[A-Z]", name) for name in option.synonyms)


@pytest.mark.parametrize("section", ["<|tool_calls_section_begin|>", ""])
def test_a_call_of_kimi_ends_an_open_thought(section):
    parser = KimiK2Parser({"add": {}}, reasoning_format=REASONING_FORMATS["kimi_k2"], thinking=True)
    call = '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    pieces = [*parser.read(f"Adding.{section}{call}"), *parser.end()]
    assert pieces == [Reasoning("Adding."), CallBegun(0, "functions.add:0", "add"), CallArguments(0, '{"a": 1}')]
