"""Every field that asks for structured output becomes one grammar, and errors name the field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from actors.protocol.requests import Grammar, Thought
from actors.requests.intake import grammar_start
from app.apis.grammars import grammar_of
from app.apis.openai.requests import ChatRequest
from app.apis.sglang.requests import NativeSampling
from app.server.errors import ApiError

SCHEMA = {"type": "object"}
TEXT = '{"type":"object"}'
TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}
TAG_TEXT = '{"structures":[{"begin":"<f>","schema":{},"end":"</f>"}],"triggers":["<f"]}'


def chat(fields: dict[str, Any]) -> ChatRequest:
    return msgspec.convert({"messages": [{"role": "user", "content": "x"}], **fields}, ChatRequest)


@pytest.mark.parametrize(
    ("fields", "grammar", "name"),
    [
        ({}, None, "grammar"),
        ({"response_format": {"type": "text"}}, None, "grammar"),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object"), "response_format"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            Grammar("json_schema", TEXT),
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            Grammar("json_schema", TEXT),
            "response_format",
        ),
        (
            {"response_format": {"type": "structural_tag", **TAG}},
            Grammar("structural_tag", TAG_TEXT),
            "response_format",
        ),
        ({"structured_outputs": {"json": TEXT}}, Grammar("json_schema", TEXT), "structured_outputs.json"),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace": " ?"}},
            Grammar("json_schema", TEXT, " ?"),
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            Grammar("json_object", "", ""),
            "structured_outputs.json_object",
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a","b"]'), "structured_outputs.choice"),
        ({"guided_json": {}}, Grammar("json_schema", "{}"), "guided_json"),
        ({"guided_regex": "a+"}, Grammar("regex", "a+"), "guided_regex"),
        ({"guided_choice": ["a"]}, Grammar("choice", '["a"]'), "guided_choice"),
        ({"guided_grammar": "g"}, Grammar("ebnf", "g"), "guided_grammar"),
        ({"grammar": "g"}, Grammar("ebnf", "g"), "grammar"),
        ({"json_schema": SCHEMA}, Grammar("json_schema", TEXT), "json_schema"),
        ({"regex": "a"}, Grammar("regex", "a"), "regex"),
        ({"ebnf": "g"}, Grammar("ebnf", "g"), "ebnf"),
        ({"structural_tag": json.dumps(TAG)}, Grammar("structural_tag", TAG_TEXT), "structural_tag"),
    ],
)
def test_a_field_becomes_a_grammar(fields: dict[str, Any], grammar: Grammar | None, name: str) -> None:
    assert grammar_of(chat(fields)) == (grammar, name)


def test_sampling_params_of_generate_become_a_grammar() -> None:
    given = NativeSampling(json_schema=TEXT)
    assert grammar_of(given, "sampling_params.") == (Grammar("json_schema", TEXT), "sampling_params.json_schema")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "sonnet"}}, "response_format.type"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "5"}, "guided_json"),
        ({"structural_tag": "{}"}, "structural_tag"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        grammar_of(chat(fields))
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("always", "prompt", "start"),
    [
        (False, [1, 2], ((9,), 8)),  # the model may begin with a thought
        (False, [1, 8, 3], ((9,), -1)),  # the prompt has begun one
        (False, [1, 8, 3, 9, 3], ((), -1)),  # and ended it
        (False, [9, 8], ((9,), -1)),
        (True, [1, 2], ((9,), -1)),
        (True, [9, 3], ((), -1)),
    ],
)
def test_a_grammar_begins_behind_the_thought(always: bool, prompt: list[int], start: object) -> None:
    marks = {"<think>": (8,), "</think>": (9,)}
    assert grammar_start(Thought(begin="<think>", end="</think>", always=always), prompt, marks.__getitem__) == start
