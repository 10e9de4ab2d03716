"""Values past the limits of fields, for bodies of Anthropic's, Ollama's and llama.cpp's APIs.

A field -> values; one may be (value, the field that is named, other fields of the body).
"""

from __future__ import annotations

from typing import Any

from actors.protocol.requests import LIMITS

__all__ = ["NEEDED_ELSEWHERE", "OTHER_APIS"]

HUGE = 2**70
LONG = "x" * 513
LONG_TOOL = "x" * (LIMITS.tool_name_chars + 1)
LONG_SALT = "x" * (LIMITS.cache_salt_chars + 1)
LONG_STOP = "x" * (LIMITS.stop_string_chars + 1)
LONG_CONTEXT = "x" * 1_000_000
MESSAGE = {"role": "user", "content": "hi"}
MESSAGES = {"messages": [MESSAGE]}

Table = dict[str, list[Any]]


def deep(levels: int) -> object:
    value: object = 0
    for _ in range(levels):
        value = [value]
    return value


def block(kind: str = "text", role: str = "user", **fields: object) -> list[dict[str, Any]]:
    return [{"role": role, "content": [{"type": kind, **fields}]}]


def blocks(name: str, *values: list[dict[str, Any]], at: str = "messages[0].content[0]") -> list[Any]:
    return [(value, f"{at}.{name}", {}) for value in values]


def tool(**fields: object) -> list[dict[str, Any]]:
    return [{"name": "f", "input_schema": {"type": "object"}, **fields}]


def one(field: str, *values: object) -> Table:
    """A field of an object in the body."""
    _, _, name = field.partition(".")
    return {field: [({name: value}, field, {}) for value in values]}


CALLED = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1"}


def result(**fields: object) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": [CALLED]}, {"role": "user", "content": [{**RESULT, **fields}]}]


def parts(name: str, value: object) -> list[Any]:
    inner = [{"type": "text", "text": "x", name: value}]
    return [(result(content=inner), f"messages[1].content[0].content[0].{name}", {})]


SHARED: Table = {
    "model": [LONG, 5],
    "messages": [[], [MESSAGE] * (LIMITS.messages + 1), 5, ([{**MESSAGE, "content": LONG_CONTEXT}], "prompt", {})],
    "messages[].role": [([{"role": "tool", "content": "x"}], "messages[0].role", {})],
    "messages[].content": [([{"role": "user", "content": 5}], "messages[0].content", {})],
    "messages[].content[].type": blocks(
        "type", block("image"), block(LONG), block("redacted_thinking", "assistant"), block("tool_result", "assistant")
    ),
    "messages[].content[].text": blocks("text", block(text=5), block()),
    "messages[].content[].thinking": blocks("thinking", block("thinking", "assistant")),
    "messages[].content[].signature": blocks("signature", block(text="x", signature=5)),
    "messages[].content[].id": blocks("id", block(**{**CALLED, "kind": "tool_use", "type": "tool_use", "id": LONG})),
    "messages[].content[].name": blocks("name", [{"role": "assistant", "content": [{**CALLED, "name": LONG_TOOL}]}]),
    "messages[].content[].input": [
        *blocks("input", [{"role": "assistant", "content": [{**CALLED, "input": {"x": deep(70)}}]}]),
        (
            [{"role": "assistant", "content": [{**CALLED, "input": {"x": "y" * LIMITS.tools_bytes}}]}],
            "messages[].content[].input",
            {},
        ),
    ],
    "messages[].content[].tool_use_id": blocks("tool_use_id", block("tool_result", tool_use_id="none")),
    "messages[].content[].content": blocks("content", block("tool_result", content=5)),
    "messages[].content[].content[].type": parts("type", "image"),
    "messages[].content[].content[].text": parts("text", 5),
    "messages[].content[].content[].cache_control": parts("cache_control", 5),
    "messages[].content[].is_error": blocks("is_error", block("tool_result", is_error=5)),
    "messages[].content[].source": blocks("source", block("document", source={"type": "url"})),
    "messages[].content[].title": blocks("title", block("document", title=5)),
    "messages[].content[].context": blocks("context", block("document", context=5)),
    "messages[].content[].cache_control": blocks("cache_control", block(text="x", cache_control=5)),
    "system": [5, [{"type": "text", "text": "x"}] * 4097],
    "system[].type": [([{"type": "image"}], "system[0].type", {})],
    "system[].text": [([{"type": "text"}], "system[0].text", {})],
    "system[].cache_control": [([{"type": "text", "text": "x", "cache_control": 5}], "system[0].cache_control", {})],
    "tools": [tool() * (LIMITS.tools + 1), 5, tool(description="x" * (LIMITS.tools_bytes // 16)) * 16],
    "tools[].name": [(tool(name=name), "tools[0].name", {}) for name in (LONG_TOOL, "", "a.b", 5)],
    "tools[].description": [(tool(description=5), "tools[0].description", {})],
    "tools[].input_schema": [
        (tool(input_schema={"type": "array"}), "tools[0].input_schema", {}),
        (tool(input_schema={"x": "y" * LIMITS.schema_bytes}), "tools[0].input_schema", {}),
    ],
    "tools[].type": [(tool(type="web_search_20260318"), "tools[0].type", {})],
    "tools[].strict": [(tool(strict=5), "tools[0].strict", {})],
    "tools[].input_examples": [
        (tool(input_examples=[{}] * 65), "tools[0].input_examples", {}),
        (tool(input_examples=[{"x": deep(70)}]), "tools[0].input_examples", {}),
    ],
    "tools[].defer_loading": [(tool(defer_loading=True), "tools[0].defer_loading", {})],
    "tools[].allowed_callers": [(tool(allowed_callers=["code_execution"]), "tools[0].allowed_callers", {})],
    "tools[].eager_input_streaming": [(tool(eager_input_streaming=5), "tools[0].eager_input_streaming", {})],
    "tools[].cache_control": [(tool(cache_control=5), "tools[0].cache_control", {})],
    "tool_choice": [{"type": "any"}, "auto"],
    "tool_choice.type": [({"type": "x"}, "tool_choice.type", {})],
    "tool_choice.name": [({"type": "tool", "name": "g"}, "tool_choice.name", {"tools": tool()})],
    "tool_choice.disable_parallel_tool_use": [
        ({"type": "auto", "disable_parallel_tool_use": 5}, "tool_choice.disable_parallel_tool_use", {})
    ],
    "thinking": [5],
    "thinking.type": [({"type": "between_tools"}, "thinking.type", {})],
    "thinking.display": [({"type": "adaptive", "display": "x"}, "thinking.display", {})],
    "output_config": [5],
    **one("output_config.effort", "x", 5),
    "context_management": [5, {"edits": [{"type": "compact_20260112"}]}, {"edits": 5}],
    "cache_control": [5],
    "chat_template_kwargs": [{f"a{i}": 1 for i in range(33)}, ({"_x": 1}, "chat_template_kwargs._x", {})],
}
FORM = {"type": "json_schema", "schema": {"type": "nope"}}

OTHER_APIS: dict[str, Table] = {
    "/v1/messages": SHARED
    | {
        "max_tokens": [0, -1, 2**31, HUGE],
        "stream": [5],
        "stop_sequences": [["x"] * (LIMITS.stop_strings + 1), [LONG_STOP], [""], 5],
        "temperature": [-0.1, 100.1],
        "top_p": [0, 1.01],
        "top_k": [-2, HUGE],
        "thinking.budget_tokens": [({"type": "enabled"}, "thinking.budget_tokens", {})],
        "output_format": [FORM, {"type": "xml"}],
        **one("output_config.format", FORM, {"type": "xml"}),
        "metadata": [5],
        **one("metadata.user_id", "x" * 4097, 5),
        "service_tier": ["banana"],
        "seed": [2**64, 1.5],
        "priority": [2**31],
        "cache_salt": [LONG_SALT],
    },
    "/v1/messages/count_tokens": SHARED
    | {
        "messages": SHARED["messages"][:3],
        "thinking.budget_tokens": [({"type": "enabled", "budget_tokens": "x"}, "thinking.budget_tokens", {})],
        **one("output_config.format", 5),
    },
}

NEEDED_ELSEWHERE: dict[str, dict[str, Any]] = {
    "/v1/messages": {**MESSAGES, "max_tokens": 1, "model": "tiny"},
    "/v1/messages/count_tokens": {**MESSAGES, "model": "tiny"},
}
