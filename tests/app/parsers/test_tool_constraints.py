"""Grammars that make an answer call tools."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from app.parsers.registry import TOOL_PARSERS
from app.parsers.tools.constraints import forced_calls, strict_calls
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
    [call] = form(TOOLS).read(framed).calls
    assert (call.function.name, msgspec.json.decode(call.function.arguments)) == ADD
