"""Grammars that make an answer call tools."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from app.apis.events import Call, join
from app.parsers.registry import TOOL_PARSERS
from app.parsers.tools.constraints import forced_calls, native_calls, strict_calls
from app.understudy import MODEL_DIR
from kernels.contract.grammar import Grammar, GrammarSettings
from kernels.grammar.llguidance_backend import LlGuidance
from tests.kits.tool_formats import ADD, TOOLS

FRAMED = {"hermes", "llama3_json", "internlm", "mistral", "deepseekv3", "deepseekv31"}


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


@pytest.mark.parametrize("name", sorted(set(TOOL_PARSERS)))
def test_a_frame_around_arguments_is_a_call_in_the_format(name: str) -> None:
    form = TOOL_PARSERS[name]
    constraint = strict_calls(form, TOOLS)
    assert (constraint is not None) == (name in FRAMED)
    if constraint is None:
        return
    tag = msgspec.json.decode(constraint.text)
    [trigger] = tag["triggers"]
    assert [each["schema"] for each in tag["structures"]] == list(TOOLS.values())
    for each in tag["structures"]:
        assert each["begin"].startswith(trigger)
    framed = tag["structures"][1]["begin"] + '{"a": -1.5, "b": null}' + tag["structures"][1]["end"]
    [call] = join(form(TOOLS).read(framed))
    assert isinstance(call, Call)
    assert (call.name, msgspec.json.decode(call.arguments)) == ADD


def test_forced_calls_are_in_the_models_format_where_it_is_json() -> None:
    form, tokens = TOOL_PARSERS["deepseekv31"], {"<｜tool▁call▁begin｜>": 7, "<｜tool▁sep｜>": None}
    constraint = native_calls(form, {"add": {}, "now": {}}, tokens, forced=True)
    assert constraint is not None
    start, call, first, arguments, *_ = constraint.text.splitlines()
    assert start.endswith('call ("\\n"? call)* "<\\uff5ctool\\u2581calls\\u2581end\\uff5c>"')
    assert (call, first.split(" ")[:2]) == ("call: call0 | call1", ["call0:", "<[7]>"])
    assert msgspec.json.decode(arguments.partition("%json ")[2])["type"] == "object"
    single = native_calls(form, {"add": {}}, tokens, forced=True, single=True)
    assert single is not None
    assert ")*" not in single.text
    assert native_calls(TOOL_PARSERS["glm45"], {"add": {}}, {}, forced=True) is None


TREE = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/X"}, "a": {"type": "number"}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"X": {"enum": ["é", '"']}},
}


def tokens_of(text: str) -> list[int]:
    found: list[int] = _VOCABULARY.encode(text, add_special_tokens=False).ids
    return found


_VOCABULARY = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def backend() -> LlGuidance:
    settings = GrammarSettings("llguidance", (MODEL_DIR / "tokenizer.json").read_text(), (2,))
    return LlGuidance(settings, _VOCABULARY.get_vocab_size())


@pytest.mark.parametrize("name", sorted(FRAMED))
def test_the_backend_takes_forced_calls_and_no_other_text(name: str) -> None:
    form, ids = TOOL_PARSERS[name], tokens_of
    tokens = {mark: found[0] if len(found := ids(mark)) == 1 else None for mark in (*form.OPEN, *form.MARKS)}
    constraint = native_calls(form, {"tree": TREE, "now": TOOLS["now"]}, tokens, forced=True)
    assert constraint is not None
    compiled = backend().compile(Grammar("ebnf", constraint.text))

    def accepts(text: str) -> bool:
        state = compiled()
        return all(state.accept(token) for token in [*ids(text), 2])

    def call(name: str, arguments: str) -> str:
        begin, end = form.frame(name) or ("", "")
        return begin + arguments + end

    before, behind = form.SECTION
    assert accepts(before + call("tree", '{"x": "é", "a": 1}') + call("now", "{}") + behind)
    assert not accepts(before + behind)
    assert not accepts(before + call("tree", '{"x": "y"}') + behind)
    assert not accepts(before + call("rm", "{}") + behind)
    assert not accepts("Hello!")


def test_the_backend_takes_text_with_calls_that_match() -> None:
    form, ids = TOOL_PARSERS["hermes"], tokens_of
    constraint = native_calls(form, {"tree": TREE}, {"<tool_call>": 5, "</tool_call>": 6}, forced=False)
    assert constraint is not None
    compiled = backend().compile(Grammar("ebnf", constraint.text))
    good = '<tool_call>\n{"name": "tree", "arguments": {"x": "é"}}\n</tool_call>'

    def accepts(text: str) -> bool:
        state = compiled()
        return all(state.accept(token) for token in [*ids(text), 2])

    assert accepts("Hello!")
    assert accepts(f"I look. {good}\n{good} So.")
    assert not accepts(good.replace("é", "y"))
    assert not accepts(good.replace("tree", "rm"))
    assert native_calls(form, {"tree": TREE}, {"<tool_call>": None}, forced=False) is None
