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
    "messages[].content[].citations": blocks("citations", block("document", citations={"enabled": True})),
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

SAMPLING: Table = {
    "temperature": [-0.1, 100.1],
    "top_k": [-2, HUGE],
    "top_p": [0, 1.01],
    "min_p": [-0.1, 1.1],
    "seed": [2**64, 1.5],
    "stop": [["x"] * (LIMITS.stop_strings + 1), [LONG_STOP], [""], 5],
    "repeat_penalty": [0, 101],
    "presence_penalty": [2.01],
    "frequency_penalty": [-2.01],
    "repeat_last_n": [1.5, HUGE],
}


def function(**fields: object) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


def called(**fields: object) -> list[dict[str, Any]]:
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", **fields}}]}, MESSAGE]


TOOLS: Table = {
    "tools": [function() * (LIMITS.tools + 1), 5],
    "tools[].type": [([{"type": "other", "function": {"name": "f"}}], "tools[0].type", {})],
    "tools[].function": [([{"type": "function", "function": 5}], "tools[0].function", {})],
    "tools[].function.name": [(function(name=LONG_TOOL), "tools[0].function.name", {})],
    "tools[].function.description": [(function(description=5), "tools[0].function.description", {})],
    "tools[].function.parameters": [
        (function(parameters={"x": "y" * LIMITS.schema_bytes}), "tools[0].function.parameters", {})
    ],
    "tools[].function.strict": [(function(strict=5), "tools[0].function.strict", {})],
}
OLLAMA: Table = {
    "model": [LONG, 5, ""],
    "stream": [5],
    "format": [5, "xml", {"type": "nope"}],
    "options": [5],
    **{
        f"options.{name}": [({name: value}, f"options.{name}", {}) for value in values]
        for name, values in {
            **SAMPLING,
            "num_predict": [0, 2**31, HUGE, 5000],
            "num_ctx": [1_000_000, HUGE],
            "num_keep": [1.5],
        }.items()
    },
    "keep_alive": ["x" * 65, [5]],
    "think": ["x", 5],
    "logprobs": [5],
    "top_logprobs": [5, (LIMITS.logprobs + 1, "top_logprobs", {"logprobs": True})],
    "priority": [2**31],
    "rid": ["x" * (LIMITS.request_id_chars + 1)],
}
LLAMA: Table = SAMPLING | {
    "model": [LONG, 5],
    "n_predict": [0, -2, HUGE, 100_000],
    "ignore_eos": [5],
    "logit_bias": [[[1, 101]], [[1, "x"]], [["x", 1]], [[1]], {str(i): 1 for i in range(LIMITS.logit_bias + 1)}],
    "n_probs": [-1, LIMITS.logprobs + 1],
    "grammar": [5, "root ::= ("],
    "json_schema": [5, "{", {"type": "nope"}],
    "stream": [5],
    "return_tokens": [5],
    "priority": [2**31],
    "rid": ["x" * (LIMITS.request_id_chars + 1)],
}

OTHER_APIS: dict[str, Table] = {
    "/api/chat": OLLAMA
    | TOOLS
    | {
        "messages": [[MESSAGE] * (LIMITS.messages + 1), 5, ([{**MESSAGE, "content": LONG_CONTEXT}], "prompt", {})],
        "messages[].role": [([{"role": "x"}], "messages[0].role", {})],
        "messages[].content": [([{"role": "user", "content": 5}], "messages[0].content", {})],
        "messages[].thinking": [([{"role": "user", "thinking": 5}], "messages[0].thinking", {})],
        "messages[].images": [([{**MESSAGE, "images": ["x"]}], "messages[0].images", {})],
        "messages[].tool_name": [([{**MESSAGE, "tool_name": LONG}], "messages[0].tool_name", {})],
        "messages[].tool_call_id": [([{**MESSAGE, "tool_call_id": LONG}], "messages[0].tool_call_id", {})],
        "messages[].tool_calls": [
            ([{**MESSAGE, "tool_calls": [{"function": {"name": "f"}}]}], "messages[0].tool_calls", {}),
            (called(arguments={"x": "y" * LIMITS.tools_bytes}), "messages[].tool_calls", {}),
        ],
        "messages[].tool_calls[].id": [
            (
                [{"role": "assistant", "tool_calls": [{"id": LONG, "function": {"name": "f"}}]}],
                "messages[0].tool_calls[0].id",
                {},
            )
        ],
        "messages[].tool_calls[].function": [
            ([{"role": "assistant", "tool_calls": [{"function": 5}]}], "messages[0].tool_calls[0].function", {})
        ],
        "messages[].tool_calls[].function.name": [
            (called(name="a b"), "messages[0].tool_calls[0].function.name", {}),
        ],
        "messages[].tool_calls[].function.arguments": [
            (called(arguments={"x": deep(70)}), "messages[0].tool_calls[0].function.arguments", {}),
            (called(arguments="x"), "messages[0].tool_calls[0].function.arguments", {}),
        ],
    },
    "/api/generate": OLLAMA
    | {
        "prompt": [5, (LONG_CONTEXT, "prompt", {"raw": True})],
        "suffix": ["x", 5],
        "system": [5, ("x", "system", {"raw": True})],
        "raw": [5],
        "template": ["x"],
        "context": [[1], 5],
        "images": [["x"]],
    },
    "/api/show": {"model": [LONG, 5], "name": [LONG], "verbose": [5]},
    "/api/embed": {
        "model": [LONG, "", 5],
        "input": [["x"] * (LIMITS.prompts + 1), 5],
        "truncate": [5],
        "dimensions": [0, 70_000],
        "options": [5],
        "keep_alive": ["x" * 65],
    },
    "/api/embeddings": {"model": [LONG, "", 5], "prompt": [5], "options": [5], "keep_alive": ["x" * 65]},
    "/completion": LLAMA | {"prompt": ["", [], [[]], ["x"] * (LIMITS.prompts + 1), [HUGE], LONG_CONTEXT, 5]},
    "/infill": {name: [] for name in LLAMA}  # checked as those of /completion, where there is a template
    | {
        "input_prefix": [5],
        "input_suffix": ["x", 5],
        "input_extra": [["x"]],
        "prompt": [5],
    },
    "/apply-template": TOOLS
    | {
        "model": [LONG],
        "messages": [[], 5],
        "messages[].role": [([{"role": "x", "content": "x"}], "messages[0].role", {})],
        "messages[].content": [([{"role": "user", "content": 5}], "messages[0].content", {})],
        "messages[].content[].type": blocks("type", block("image")),
        "messages[].content[].text": blocks("text", block(text=5)),
        "messages[].content[].refusal": blocks("refusal", block("refusal", refusal=5)),
        **{
            f"messages[].{name}": [([{**MESSAGE, name: 5}], f"messages[0].{name}", {})]
            for name in ("name", "reasoning_content", "reasoning", "refusal", "tool_calls", "tool_call_id")
        },
        **{
            f"messages[].tool_calls[].{name}": [
                (
                    [{**MESSAGE, "tool_calls": [{"function": {"name": "f"}, name: 5}]}],
                    f"messages[0].tool_calls[0].{name}",
                    {},
                )
            ]
            for name in ("id", "type", "function")
        },
        **{
            f"messages[].tool_calls[].function.{name}": [
                (called(**{name: 5}), f"messages[0].tool_calls[0].function.{name}", {})
            ]
            for name in ("name", "arguments")
        },
        "chat_template": ["{{ 1 }}"],
        "chat_template_kwargs": [({"_x": 1}, "chat_template_kwargs._x", {})],
        "add_generation_prompt": [5],
    },
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
    "/api/chat": {**MESSAGES, "model": "tiny", "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "hi", "model": "tiny", "options": {"num_predict": 1}},
    "/api/show": {"model": "tiny"},
    "/api/embed": {"model": "tiny", "input": "x"},
    "/api/embeddings": {"model": "tiny", "prompt": "x"},
    "/completion": {"prompt": "hi", "n_predict": 1},
    "/infill": {"input_prefix": "hi", "n_predict": 1},
    "/apply-template": MESSAGES,
    "/v1/messages": {**MESSAGES, "max_tokens": 1, "model": "tiny"},
    "/v1/messages/count_tokens": {**MESSAGES, "model": "tiny"},
}
