"""Formats of tool calls: the text of a choice, taken apart as it arrives."""

from __future__ import annotations

import logging
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.options import ARGUMENTS
from app.parsers.base import StreamingParser
from app.parsers.events import CallArguments, CallBegun, Text
from app.parsers.registry import AUTO, OFF, TOOL_PARSERS, output_format
from tests.kits.tool_formats import ADD, OSLO, TOOLS, written

FORMATS = sorted(set(TOOL_PARSERS) - {"passthrough"})
AT_START = {"json", "pythonic"}  # formats without marks
NOW: tuple[str, dict[str, Any]] = ("now", {})

Read = tuple[str, list[tuple[str, str]]]


def read(pieces: list[str], name: str = "hermes", **keywords: Any) -> Read:
    """Content, and the calls with their arguments as text."""
    reader = TOOL_PARSERS[name](TOOLS, **keywords)
    content, calls = "", []
    for event in [event for part in (*map(reader.read, pieces), reader.end()) for event in part]:
        if isinstance(event, Text):
            content += event.text
        elif isinstance(event, CallBegun):
            assert event.index == len(calls)
            calls.append([event.name, "", event.id])
        elif isinstance(event, CallArguments):
            assert event.index == len(calls) - 1
            calls[-1][1] += event.text
    assert len({call[2] for call in calls}) == len(calls) == reader.calls
    return content, [(called, arguments) for called, arguments, _ in calls]


def values(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, msgspec.json.decode(arguments)) for name, arguments in calls]


def splits(text: str) -> st.SearchStrategy[list[str]]:
    cuts = st.lists(st.integers(0, len(text)), max_size=12).map(sorted)
    return cuts.map(lambda at: [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])


def test_ids_that_a_model_repeats_are_made_unique() -> None:
    whole = written("kimi_k2", OSLO, ADD)
    events = TOOL_PARSERS["kimi_k2"](TOOLS).read(whole + whole)
    names = ["get_weather:0", "add:1", "get_weather:2", "add:3"]
    ids = [event.id for event in events if isinstance(event, CallBegun)]
    assert ids == [f"functions.{name}" for name in names]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_in_any_pieces(name: str) -> None:
    text = written(name, OSLO, NOW, ADD)
    for size in (len(text), 1, 2, 3, 7):
        content, calls = read([text[at : at + size] for at in range(0, len(text), size)], name)
        assert (content, values(calls)) == ("", [OSLO, NOW, ADD])


@pytest.mark.parametrize("name", sorted(set(FORMATS) - AT_START))
def test_text_around_calls_stays(name: str) -> None:
    before, after = ("Let me look. ", "So be it.")
    end = "<|start|>assistant<|channel|>final<|message|>" if name == "gpt-oss" else " "
    if name == "gpt-oss":
        before = f"<|channel|>commentary<|message|>{before}<|end|>"
    content, calls = read(list(before + written(name, ADD) + end + after), name)
    assert (content, values(calls)) == ("Let me look. So be it.", [ADD])


@settings(max_examples=40, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", FORMATS)
def test_any_chunking_of_any_text_gives_the_same(name: str, data: st.DataObject) -> None:
    whole = written(name, OSLO, ADD)
    parser = TOOL_PARSERS[name]
    parts = st.sampled_from(
        [*re.findall(r"\W{1,8}|\w{1,8}", whole), *parser.OPEN, *parser.MARKS, whole, written(name, NOW), "x", "\n", "é"]
    )
    text = data.draw(st.one_of(st.integers(0, len(whole)).map(lambda cut: whole[:cut]), st.lists(parts).map("".join)))
    content, calls = read([text], name)
    assert read(data.draw(splits(text)), name) == (content, calls)
    marks = [mark for mark in (*parser.OPEN, *parser.MARKS) if mark != "functools["]
    whole_marks = "|".join(map(re.escape, marks))
    begun = "|".join(re.escape(mark[:end]) for mark in marks for end in range(1, len(mark)))
    without = re.sub(whole_marks, "", text) if marks else text
    joins = bool(marks) and re.search(f"(?:{begun})(?:{whole_marks})", text) is not None
    if not joins and not any(mark in without for mark in marks):  # else the text around calls makes new ones
        assert not any(mark in content for mark in marks)


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_call_keeps_what_it_has(name: str) -> None:
    text = written(name, OSLO)
    whole = read([text], name)[1][0][1]
    at = text.index("Oslo") + 3
    content, calls = read(list(text[:at]), name)
    assert content == ""
    assert [called for called, _ in calls] == ["get_weather"]
    assert whole.startswith(calls[0][1])
    assert calls[0][1].endswith("Osl")


@pytest.mark.parametrize("name", sorted(set(FORMATS) - AT_START))
def test_a_call_of_no_given_tool_is_text(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "troupe.parsers"):
        content, calls = read(list(written(name, ("rm", {"a": "x"}), ADD)), name)
    assert "rm" in content or name == "gpt-oss"
    assert not any(mark in content for mark in (*TOOL_PARSERS[name].OPEN, *TOOL_PARSERS[name].MARKS))
    assert "no tool 'rm'" in caplog.text
    assert [called for called, _ in calls] in (["add"], [])


@pytest.mark.parametrize("name", FORMATS)
def test_only_the_first_call_where_there_may_be_one(name: str) -> None:
    assert values(read([written(name, ADD, OSLO)], name, parallel=False)[1]) == [ADD]


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_arrive_while_they_are_made(name: str) -> None:
    text = written(name, OSLO)
    reader = TOOL_PARSERS[name](TOOLS)
    reader.read(text[: text.index("Oslo")])
    [piece] = reader.read("Oslo ")
    assert isinstance(piece, CallArguments)
    assert piece.text.rstrip() == "Oslo"


HERMES: dict[str, Read] = {
    "": ("", []),
    "a < b <tool_cal <think": ("a < b <tool_cal <think", []),
    '<tool_call>{"name": "add"}</tool_call>': ("", [("add", "{}")]),
    '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>  so': ("so", [("add", '{"a": 1}')]),
    '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>': ("", [("add", '{"a": 1}')]),
    '<tool_call>{"name": "add", "arguments": {"a":  1}}': ("", [("add", '{"a":  1}')]),
    '<tool_call>{"name": "add", "arguments": {"a": ': ("", [("add", '{"a": ')]),
    '<tool_call>{"name": "add", "argu': ("", [("add", "")]),
    '<tool_call>{"name": "add", "arguments": {"a": "b\n\\d"}}': ("", [("add", '{"a": "b\\u000a\\\\d"}')]),
    '<tool_call>{"name": "rm", "arguments": {}}</tool_call> x': ('{"name": "rm", "arguments": {}}x', []),
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>': ('{"name": "add", "arguments": [1]}', []),
    '<tool_call>{"name": "add", "arguments": "[1]"}</tool_call>': ('{"name": "add", "arguments": "[1]"}', []),
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>': ('{"name": 5, "arguments": {}}', []),
    "<tool_call>__import__('os')</tool_call>": ("__import__('os')", []),
    '<tool_call>{"name": "add", "arguments": {"a": 01}}</tool_call>': ("01}}", [("add", '{"a": ')]),
}


@pytest.mark.parametrize("text", HERMES, ids=lambda text: repr(text[:60]))
def test_what_cannot_be_read_is_text(text: str) -> None:
    assert read([text]) == HERMES[text]
    assert read(list(text)) == HERMES[text]


def test_deep_nesting_ends_a_call() -> None:
    content, [(called, arguments)] = read([f'<tool_call>{{"name": "add", "arguments": {{"a": {"[" * 5000}'])
    assert (called, arguments.count("["), content.count("[")) == ("add", 64, 4936)


def test_python_values_become_json() -> None:
    text = "[add(a='it\\'s', b=[1, -2.5e3, (True, None), {\"k\": 'v\\n'}], c=\"\\x41\\u00e9\",), now()]"
    [(_, first), second] = values(read(list(text), "pythonic")[1])
    assert first == {"a": "it's", "b": [1, -2500.0, [True, None], {"k": "v\n"}], "c": "Aé"}
    assert second == NOW
    for wrong in ("[add(a=open('x'))]", "[add(a=1+1)]", "[1, 2]", "[x for x in y]"):
        assert not any(re.search(r"open|\+", arguments) for _, arguments in read([wrong], "pythonic")[1])


def test_values_take_the_types_of_the_schema() -> None:
    tools = {
        "f": {
            "properties": {
                "text": {"type": "string"},
                "either": {"type": ["string", "null"]},
                "some": {"anyOf": [{"type": "string"}, {"type": "object"}]},
                "flag": {"type": "boolean"},
                "wrong": {"type": "integer"},
                "choice": {"enum": ["1", "2"]},
            }
        }
    }
    given = {
        "text": "1",
        "either": "null",
        "some": '{"a": 1}',
        "flag": "True",
        "wrong": "two",
        "choice": "1",
        "free": "[1]",
    }
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    reader = TOOL_PARSERS["qwen3_coder"](tools)
    _, arguments = reader.read(f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>")
    assert isinstance(arguments, CallArguments)
    assert msgspec.json.decode(arguments.text) == {
        "text": "1", "either": None, "some": {"a": 1}, "flag": True, "wrong": "two", "choice": "1", "free": [1],
    }  # fmt: skip


def test_ids_are_those_that_the_models_know() -> None:
    def ids(name: str, text: str) -> list[str]:
        return [event.id for event in TOOL_PARSERS[name](TOOLS).read(text) if isinstance(event, CallBegun)]

    assert ids("kimi_k2", written("kimi_k2", NOW, ADD)) == ["functions.now:0", "functions.add:1"]
    assert ids("mistral", '[TOOL_CALLS][{"name": "now", "id": "abcdefghi", "arguments": {}}]') == ["abcdefghi"]
    assert ids("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghj[ARGS]{}") == ["abcdefghj"]
    [made] = ids("mistral", written("mistral", NOW))
    assert re.fullmatch("[a-z0-9]{9}", made)
    mistral, kimi = TOOL_PARSERS["mistral"], TOOL_PARSERS["kimi_k2"]
    assert mistral.history_id("abcdefghi", "now", 0) == "abcdefghi"
    assert re.fullmatch("[a-z0-9]{9}", mistral.history_id("call_1", "now", 0))
    assert kimi.history_id("call_1", "now", 3) == "functions.now:3"
    assert kimi.history_id("functions.now:7", "now", 3) == "functions.now:7"


def test_calls_in_other_spellings() -> None:
    assert values(read(['[TOOL_CALLS] [{"name": "now", "arguments": {}}]'], "mistral")[1]) == [NOW]
    assert values(read(['{"name": "now", "parameters": {}}'], "llama3_json")[1]) == [NOW]
    assert values(read(["functools[" + written("json", NOW)[1:]], "phi4")[1]) == [NOW]
    assert values(read([written("pythonic", NOW)], "llama4")[1]) == [NOW]
    assert values(read(["<function=now>\n</function>\n</tool_call>"], "qwen3_coder")[1]) == [NOW]
    assert values(read(["<tool_call>now</tool_call>"], "glm45")[1]) == [NOW]
    to = "<|start|>assistant to=functions.now<|channel|>commentary<|message|>{}"
    assert values(read([to], "gpt-oss")[1]) == [NOW]
    assert read(['{"a": 1} is JSON'], "llama3_json") == ('{"a": 1} is JSON', [])


def test_text_is_returned_as_soon_as_it_cannot_be_a_call() -> None:
    reader = TOOL_PARSERS["hermes"](TOOLS)
    events = [reader.read(piece) for piece in ("Hel", "lo <", "b> <tool", "_box>")]
    assert events == [[Text("Hel")], [Text("lo ")], [Text("<b> ")], [Text("<tool_box>")]]


def test_every_choice_of_the_options_is_a_registered_format() -> None:
    (option,) = (argument for argument in ARGUMENTS if argument.name == "tool-call-parser")
    assert set(option.choices) == {*TOOL_PARSERS, OFF, AUTO}
    assert set(option.synonyms.values()) <= set(option.choices)


TEMPLATES = {
    "hermes": "<tool_call>\n{{ tool_call }}</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=' + name + '>",
    "glm45": "<tool_call>{{ name }}<arg_key>",
    "deepseekv3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + name + '\\n```json",
    "deepseekv31": "<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>",
    "llama3_json": "Environment: ipython",
    "gpt-oss": "<|channel|>commentary json <|constrain|>",
    "granite": "<|tool_call|>",
    "gemma4": "'<|tool_call>call:' + name + '{'",
    "lfm2": "List of tools: <|tool_list_start|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_auto_reads_the_format_off_the_template(name: str) -> None:
    for option in (None, AUTO):
        assert output_format(option, None, TEMPLATES[name], "").tools is TOOL_PARSERS[name]


def test_gemma_4_may_quote_keys_and_write_json() -> None:
    text = '<|tool_call>call:add{<|"|>a<|"|>: "1:{" , "b":{}, c:[ ]}<tool_call|>so'
    content, calls = read([text], "gemma4")
    assert (content, values(calls)) == ("so", [("add", {"a": "1:{", "b": {}, "c": []})])


@pytest.mark.parametrize("size", [1, 100])
def test_gemma_4_may_write_words_without_quotes(size: int) -> None:
    """Its template writes None so."""
    text = "<|tool_call>call:add{a:None,b:[nil, -1.5e3 ,null],c:{d:fast car\n,e:true}}<tool_call|>so"
    content, calls = read([text[at : at + size] for at in range(0, len(text), size)], "gemma4")
    expected = {"a": None, "b": [None, -1500.0, None], "c": {"d": "fast car", "e": True}}
    assert (content, values(calls)) == ("so", [("add", expected)])


@pytest.mark.parametrize(("text", "rest"), [("a:x<b", "x<b"), ("a:,b:1", ",b:1")])
def test_a_value_of_gemma_4_that_is_no_word_stays_text(text: str, rest: str) -> None:
    content, calls = read([f"<|tool_call>call:add{{{text}}}<tool_call|>"], "gemma4")
    assert (content, calls) == (f"{rest}}}", [("add", '{"a": ')])


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_lfm2_writes_json_where_a_prompt_asks_for_it(size: int) -> None:
    text = f"<|tool_call_start|>{written('json', OSLO, ADD)}<|tool_call_end|>so"
    content, calls = read([text[at : at + size] for at in range(0, len(text), size)], "lfm2")
    assert (content, values(calls)) == ("so", [OSLO, ADD])


def test_auto_falls_back_on_the_family() -> None:
    assert output_format(None, None, None, "GptOssForCausalLM").harmony
    assert output_format(None, None, None, "Llama4ForCausalLM").tools is TOOL_PARSERS["llama4"]
    assert output_format(None, None, None, "Gemma4ForConditionalGeneration").tools is TOOL_PARSERS["gemma4"]
    assert output_format(None, None, None, "Lfm2MoeForCausalLM").tools is TOOL_PARSERS["lfm2"]
    assert output_format(None, None, None, "Ministral3ForCausalLM").tools is TOOL_PARSERS["mistral"]
    assert output_format(None, None, None, "Mistral4ForCausalLM").tools is TOOL_PARSERS["mistral"]
    assert output_format(None, None, None, "MistralForCausalLM").tools is TOOL_PARSERS["mistral"]
    assert output_format(None, None, None, "").tools is TOOL_PARSERS["hermes"]
    assert output_format(None, None, None, "").parser(False) is None
    assert output_format(OFF, OFF, TEMPLATES["hermes"], "").parser(True) is None
    assert output_format(OFF, "base", None, "").parser(True) is StreamingParser
