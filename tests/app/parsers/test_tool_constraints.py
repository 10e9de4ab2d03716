"""Grammars that make an answer call tools."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jsonschema
import msgspec
import pytest

from app.parsers.base import StreamingParser
from app.parsers.events import CallArguments, CallBegun, Text
from app.parsers.registry import TOOL_PARSERS
from app.parsers.tools.constraints import AnswerForm, forced_calls, native_calls, strict_calls
from app.parsers.tools.lark import Unenforceable
from app.parsers.tools.parameters import types_of
from tests.kits.tool_formats import ADD, TOOLS, written
from tests.kits.tool_grammars import MarkedTokenizer

FORMATS = sorted(set(TOOL_PARSERS) - {"passthrough"})
AT_START = {"json", "pythonic", "gpt-oss"}
FRAMED = {
    "hermes",
    "llama3_json",
    "internlm",
    "mistral",
    "deepseekv3",
    "deepseekv31",
    "longcat",
    "granite-20b-fc",
    "gigachat3",
    "inkling",
}


def schema(**keywords: Any) -> dict[str, Any]:
    constraint = forced_calls(**keywords)
    assert constraint.kind == "json_schema"
    return msgspec.json.decode(constraint.text)


def test_a_named_tool_is_called_once() -> None:
    found = schema(tools={"add": TOOLS["add"]}, named=True, parallel=True)
    assert found["properties"] == {"name": {"enum": ["add"]}, "arguments": TOOLS["add"]}
    assert (found["required"], found["additionalProperties"]) == (["name", "arguments"], False)


def test_required_calls_are_a_list_of_any_tools() -> None:
    found = schema(tools=TOOLS, named=False, parallel=True)
    assert (found["type"], found["minItems"], "maxItems" in found) == ("array", 1, False)
    assert [each["properties"]["name"]["enum"] for each in found["items"]["anyOf"]] == [[name] for name in TOOLS]
    assert schema(tools=TOOLS, named=False, parallel=False)["maxItems"] == 1
    assert schema(tools={"f": {}}, named=False, parallel=True)["items"]["properties"]["arguments"] == {"type": "object"}


def test_references_still_find_their_definitions() -> None:
    tree = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/X"}, "self": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "$defs": {"X": {"type": "integer"}},
    }
    found = schema(tools={"f": tree, "g": tree}, named=False, parallel=True)
    first, second = (each["properties"]["arguments"] for each in found["items"]["anyOf"])
    assert (first, second) == ({"$ref": "#/$defs/tool0"}, {"$ref": "#/$defs/tool1"})
    moved = found["$defs"]["tool1"]
    assert moved["properties"]["x"] == {"$ref": "#/$defs/tool1/$defs/X"}
    assert moved["properties"]["self"]["anyOf"][0] == {"$ref": "#/$defs/tool1"}
    assert moved["$defs"] == tree["$defs"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_structural_tag_is_a_call_in_the_format(name: str) -> None:
    form = TOOL_PARSERS[name]
    if name not in FRAMED:
        with pytest.raises(Unenforceable):
            strict_calls(form, TOOLS)
        return
    tag = msgspec.json.decode(strict_calls(form, TOOLS).text)
    [trigger] = tag["triggers"]
    assert [each["schema"] for each in tag["structures"]] == list(TOOLS.values())
    for each in tag["structures"]:
        assert each["begin"].startswith(trigger)
    framed = tag["structures"][1]["begin"] + '{"a": -1.5, "b": null}' + tag["structures"][1]["end"]
    [call, *pieces] = form(TOOLS).read(framed)
    assert isinstance(call, CallBegun)
    assert (call.name, msgspec.json.decode("".join(piece.text for piece in pieces))) == ADD


STRICT = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 5},
            "days": {"type": "integer", "minimum": 1, "maximum": 30},
            "unit": {"enum": ["C", "F"]},
            "color": {"$ref": "#/$defs/Color"},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/Color"}, "maxItems": 2},
            "some": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
            "code": {"type": "string", "pattern": "^[a-z]{2}/[0-9]$"},
            "day": {"type": "string", "format": "date"},
            "ok": {"type": "boolean"},
            "none": {"type": "null"},
        },
        "required": ["city", "days", "color", "code", "none"],
        "additionalProperties": False,
        "$defs": {"Color": {"type": "string", "enum": ["red", "dark green", "5"]}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
RIGHT = {"city": "Os", "days": 2, "color": "5", "tags": ["red"], "code": "ab/1", "ok": True, "none": None}


def calls_of(form: type[StreamingParser], text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Content, and calls."""
    reader, content, calls = form(STRICT), "", []
    for event in (*reader.read(text), *reader.end()):
        if isinstance(event, Text):
            content += event.text
        elif isinstance(event, CallBegun):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[-1][1] += event.text
    return content, [(called, msgspec.json.decode(arguments)) for called, arguments in calls]


@cache
def marked(name: str, special: bool) -> MarkedTokenizer:
    return MarkedTokenizer(TOOL_PARSERS[name], special=special)


@pytest.mark.parametrize("name", FORMATS)
def test_random_texts_of_forced_calls_are_calls_that_validate(name: str) -> None:
    form, vocabulary = TOOL_PARSERS[name], marked(name, True)
    compiled = vocabulary.compile(native_calls(form, STRICT, vocabulary.tokens, forced=True, single=True))
    names = set()
    for seed in range(12):
        text = vocabulary.sample(compiled, seed)
        content, [(called, arguments)] = calls_of(form, text)
        jsonschema.Draft202012Validator(STRICT[called], format_checker=jsonschema.FormatChecker(["date"])).validate(
            arguments
        )
        names.add(called)
        assert content.strip() == "" or name == "gpt-oss"
    assert names == set(STRICT)


def spelled(name: str, *calls: tuple[str, Any]) -> str:
    """The calls as ``written``, without what its models need not write. Python's values are JSON in grammars."""
    if name in ("gemma4", "functiongemma"):
        begin, end = TOOL_PARSERS[name].OPEN[0], TOOL_PARSERS[name].MARKS[0]
        return "".join(
            f"{begin}call:{called}{{"
            + ",".join(f"{key}:{msgspec.json.encode(value).decode()}" for key, value in arguments.items())
            + f"}}{end}"
            for called, arguments in calls
        )
    if name == "minimax-m3":
        calls = tuple((called, {key: as_text(value) for key, value in given.items()}) for called, given in calls)
    if name in ("pythonic", "llama4", "lfm2", "olmo3"):
        listed = [
            f"{called}({', '.join(f'{key}={value}' for key, value in python(arguments))})"
            for called, arguments in calls
        ]
        if name == "olmo3":
            return "\n".join(("<function_calls>", *listed, "</function_calls>"))
        text = f"[{', '.join(listed)}]"
        begin, end = TOOL_PARSERS[name].SECTION
        return f"{begin.removesuffix('[')}{text}{end.removeprefix(']')}"
    text = written(name, *calls).rstrip("\n")
    if name == "gpt-oss":
        text = text.removeprefix("<|start|>assistant").replace("<|call|>", "")
    return text


def as_text(value: Any) -> Any:
    return msgspec.json.encode(value).decode() if isinstance(value, list | dict) else value


def python(arguments: dict[str, Any]) -> list[tuple[str, str]]:
    words = {True: "True", False: "False", None: "None"}
    return [
        (key, words[value] if value is None or isinstance(value, bool) else msgspec.json.encode(value).decode())
        for key, value in arguments.items()
    ]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_held_to_their_schemas_in_text_and_beside_a_form(name: str, special: bool) -> None:
    form, vocabulary = TOOL_PARSERS[name], marked(name, special)
    if name == "gpt-oss" and not special:
        with pytest.raises(Unenforceable, match="vocabulary"):
            native_calls(form, STRICT, vocabulary.tokens, forced=True)
        return
    final = "<|channel|>final<|message|>" if name == "gpt-oss" else ""
    other = AnswerForm("json_schema", '{"type": "integer"}', "")
    kinds = {"forced": {"forced": True}, "auto": {"forced": False}, "form": {"forced": False, "other": other}}
    for kind, keywords in kinds.items():
        compiled = vocabulary.compile(native_calls(form, STRICT, vocabulary.tokens, **keywords))  # type: ignore[arg-type]

        def accepts(text: str, compiled: Any = compiled) -> bool:
            if name == "granite" and not special:  # then its other mark is the one that is a token
                text = text.replace("<|tool_call|>", "<tool_call>")
            if name == "gigachat3" and special:  # likewise
                text = text.replace("function call<|role_sep|>", "<|function_call|>")
            return vocabulary.accepts(compiled, text)

        good = spelled(name, ("weather", RIGHT))
        assert accepts(good), kind
        assert accepts(spelled(name, ("now", {}))), kind
        assert calls_of(form, good) == ("", [("weather", RIGHT)])
        for wrong in ({"days": 31}, {"days": "x"}, {"color": "blue"}, {"city": "Stockholm"}, {"code": "abc"}):
            assert not accepts(spelled(name, ("weather", RIGHT | wrong))), (kind, wrong)
        assert not accepts(spelled(name, ("weather", {"city": "Os"}))), kind
        assert not accepts(spelled(name, ("rm", {}))), kind
        assert accepts(final + "Hello! <b>") == (kind == "auto"), kind
        assert accepts(final + "5") == (kind != "forced"), kind
        if name != "gpt-oss":
            assert accepts(spelled(name, ("weather", RIGHT), ("now", {}))), kind
        if name not in AT_START and kind == "auto":
            assert accepts(f"I look. {good} So.")
            assert not accepts(f"I look. {spelled(name, ('rm', {}))} So.")


def test_a_mark_cannot_be_spelled_with_other_tokens() -> None:
    vocabulary = marked("hermes", True)
    compiled = vocabulary.compile(native_calls(TOOL_PARSERS["hermes"], STRICT, vocabulary.tokens, forced=False))
    state = compiled()
    assert not all(state.follow(token) for token in [*vocabulary.encode("<tool_"), *vocabulary.encode("call>")])


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "format": "iri"}}}, "format iri"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "alternatives"),
        ({"type": "object", "required": ["a"]}, "required 'a'"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"type": "object", "properties": {"a<": {}}}, "the name 'a<'"),
    ],
)
def test_what_tags_cannot_be_held_to_is_named(parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unenforceable, match=re.escape(reason)):
        native_calls(TOOL_PARSERS["qwen3_coder"], {"f": parameters}, {}, forced=False)


def test_a_schema_in_itself_ends() -> None:
    tree = {"anyOf": [{"$ref": "#/$defs/t"}, {"$ref": "#/$defs/t"}, {"type": "string"}]}
    parameters = {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}, "$defs": {"t": tree}}
    assert types_of({"$ref": "#/$defs/t"}, parameters) == set()
    loop = {"type": "object", "properties": {"t": {"$ref": "#/$defs/u"}}, "$defs": {"u": {"$ref": "#/$defs/u"}}}
    assert native_calls(TOOL_PARSERS["qwen3_coder"], {"f": loop}, {}, forced=True)


def test_the_length_of_a_grammar_is_bounded_while_it_is_made() -> None:
    color = {"enum": ["c" * 1000]}
    properties = {f"p{number}": {"items": {"$ref": "#/$defs/Color"}, "type": "array"} for number in range(1000)}
    tool = {"type": "object", "properties": properties, "$defs": {"Color": color}}
    with pytest.raises(Unenforceable, match="65536 bytes"):
        native_calls(TOOL_PARSERS["qwen3_coder"], {"f": tool}, {}, forced=False)


def test_other_forms_stand_beside_calls() -> None:
    vocabulary = marked("hermes", True)
    for form, good, wrong in (
        (AnswerForm("regex", "[a-z]{2}/[0-9]", ""), "ab/1", "abc"),
        (AnswerForm("choice", '["red", "dark green"]', ""), "dark green", "green"),
        (AnswerForm("json_object", "", " ?"), '{"a": 1}', "5"),
        (AnswerForm("json_schema", "true", ""), "[1,2]", "x"),
    ):
        found = native_calls(TOOL_PARSERS["hermes"], STRICT, vocabulary.tokens, forced=False, other=form)
        compiled = vocabulary.compile(found)
        assert vocabulary.accepts(compiled, good)
        assert not vocabulary.accepts(compiled, wrong)
    with pytest.raises(Unenforceable, match="ebnf"):
        native_calls(TOOL_PARSERS["hermes"], STRICT, vocabulary.tokens, forced=False, other=AnswerForm("ebnf", "x", ""))
