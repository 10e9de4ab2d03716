"""Every field of every body has a limit: past it the answer is a 400 in the API's own envelope that names the field."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from actors.protocol.requests import LIMITS
from app.route_table import ROUTES
from app.server.dialect import OPENAI as OPENAI_FORM
from tests.kits.field_limits import NEEDED_ELSEWHERE, OTHER_APIS
from tests.kits.target import ADMIN, Target

HUGE = 2**70
BODY = 8 * 1024 * 1024
"""What bounds a text that has no limit of its own; then the model's context."""


def deep(levels: int) -> object:
    value: object = 0
    for _ in range(levels):
        value = [value]
    return value


def deep_object(levels: int) -> object:
    value: object = 0
    for _ in range(levels):
        value = {"anyOf": [value]}
    return value


def strings(count: int) -> list[str]:
    return ["x"] * count


OVER_NAME = "x" * 513
OVER_TOOL = "x" * (LIMITS.tool_name_chars + 1)
OVER_LABEL = "x" * (LIMITS.request_id_chars + 1)
OVER_SALT = "x" * (LIMITS.cache_salt_chars + 1)
OVER_STOP = "x" * (LIMITS.stop_string_chars + 1)
OVER_CONTEXT = "x" * 1_000_000  # characters, far more than the tiny model's context can hold

# A field -> values past its limit. A value may be (value, the field that is named, other fields of the body).
SAMPLING: dict[str, list[Any]] = {
    "frequency_penalty": [2.01, -2.01, 10**400, "1"],
    "presence_penalty": [2.01, -2.01],
    "temperature": [-0.1, 100.1, 10**400],
    "top_p": [0, 1.01, -1],
    "top_k": [-2, 2**31, HUGE, 1.5],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, 101, -1],
    "logit_bias": [{"1": 101}, {"384": 1}, {"-1": 1}, {str(i): 1 for i in range(LIMITS.logit_bias + 1)}, {"a": 1}],
    "n": [0, LIMITS.n + 1, HUGE, -1],
    "seed": [2**64, -(2**63) - 1, HUGE, 1.5],
    "stop": [strings(LIMITS.stop_strings + 1), [OVER_STOP], OVER_STOP, [""], deep(100)],
    "stop_regex": [["x"] * (LIMITS.stop_patterns + 1), OVER_STOP, ["("], "a*", [""], 5],
    "stop_token_ids": [[-1], [384], [HUGE], [0] * (LIMITS.stop_token_ids + 1)],
    "min_tokens": [-1, 2**31, HUGE],
    "bad_words": [strings(LIMITS.bad_words + 1), [OVER_STOP], [""]],
    "allowed_token_ids": [[], [-1], [384], [0] * (LIMITS.allowed_token_ids + 1)],
    "prompt_logprobs": [-1, LIMITS.logprobs + 1, HUGE],
    "ignore_eos": [2, "true"],
    "skip_special_tokens": [2],
    "include_stop_str_in_output": ["no"],
    "no_stop_trim": [1],
    "speculative": ["yes", 2],
    "speculative_num_draft_tokens": [0, -1, 65, HUGE, 1.5],
    "json_schema": [5, "{", "x" * 70_000, {"type": "nope"}, deep_object(100)],
    "regex": [5, "(", "(" * 500, "x" * 70_000],
    "ebnf": [5, "root ::= (", "(" * 500, "x" * 70_000],
    "structural_tag": [5, "{", {"structures": []}, {"structures": [5], "triggers": ["<"]}, deep_object(100)],
}
FORMS: dict[str, list[Any]] = {
    "json": [5, "{", {"type": "nope"}],
    "regex": [5, "("],
    "choice": [5, strings(LIMITS.grammar_choices + 1)],
    "grammar": [5, "root ::= ("],
    "structural_tag": [5, "{"],
    "whitespace": [5],
    "whitespace_pattern": [5],
}
OPENAI: dict[str, list[Any]] = SAMPLING | {
    "model": [OVER_NAME, 5],
    "max_tokens": [-1, 2**31, HUGE, 100_000],
    "stream": ["yes"],
    "stream_options": [{"include_usage": 3}, 5],
    "stream_options.include_usage": [({"include_usage": 3}, "stream_options.include_usage", {})],
    "stream_options.continuous_usage_stats": [
        ({"continuous_usage_stats": 3}, "stream_options.continuous_usage_stats", {})
    ],
    "return_token_ids": [5],
    "return_hidden_states": [5],
    "return_tokens_as_token_ids": [5],
    "priority": [2**31, -(2**31) - 1, HUGE],
    "data_parallel_rank": [-1, 2**31, HUGE],
    "routed_dp_rank": [-1, 2**31, HUGE],
    "cache_salt": [OVER_SALT],
    "extra_key": [OVER_SALT],
    "rid": [OVER_LABEL],
    "request_id": [OVER_LABEL],
    "user": [OVER_NAME, 5],
    "metadata": [{str(i): "x" for i in range(17)}, {"x" * 65: "x"}, {"a": "x" * 513}, {"a": 5}, "x"],
    "safety_identifier": [OVER_NAME],
    "prompt_cache_key": [OVER_NAME],
    "prompt_cache_retention": [OVER_NAME],
    "store": [5],
    "service_tier": ["banana", 5],
    "verbosity": ["banana"],
    "response_format": [5, {"type": "xml"}, {"type": "json_schema"}, {"type": "structural_tag"}],
    "structured_outputs": [5, {"regex": "a", "choice": ["a"]}],
    **{
        f"structured_outputs.{name}": [({name: value}, f"structured_outputs.{name}", {}) for value in values]
        for name, values in FORMS.items()
    },
    "structured_outputs.json_object": [({"json_object": 5}, "structured_outputs.json_object", {})],
    "structured_outputs.disable_any_whitespace": [
        ({"disable_any_whitespace": 5}, "structured_outputs.disable_any_whitespace", {})
    ],
    "grammar": ["root ::= (", 5],
    **{f"guided_{name}": values for name, values in FORMS.items() if name in ("json", "regex", "choice", "grammar")},
    "guided_json_object": [5],
    "guided_whitespace_pattern": [5, ("(", "guided_json_object", {"guided_json_object": True})],
}
MESSAGE = {"role": "user", "content": "hi"}


def message(**fields: object) -> list[dict[str, object]]:
    return [{**MESSAGE, **fields}]


def called(**function: object) -> list[dict[str, object]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return message(role="assistant", tool_calls=[{**call, **function}])


def tool(**function: object) -> list[dict[str, object]]:
    return [{"type": "function", "function": {"name": "f", **function}}]


CONVERSATION: dict[str, list[Any]] = {
    "messages": [[], [MESSAGE] * (LIMITS.messages + 1), message(content=OVER_CONTEXT), 5],
    "messages[].role": [
        (message(role="x" * 33), "messages[0].role", {}),
        (message(role="{{x}}"), "messages[0].role", {}),
    ],
    "messages[].content": [
        (message(content=5), "messages[0].content", {}),
        (message(content=["x"] * 4097), "messages[0].content", {}),
        (message(content=OVER_CONTEXT), "messages", {}),
    ],
    "messages[].content[].type": [
        (message(content=[{"type": OVER_NAME}]), "messages[0].content[0].type", {}),
        (message(content=[{"type": "image_url", "text": "x"}]), "messages[0].content[0].type", {}),
    ],
    "messages[].content[].text": [(message(content=[{"type": "text", "text": 5}]), "messages[0].content[0].text", {})],
    "messages[].content[].refusal": [
        (message(content=[{"type": "refusal", "refusal": 5}]), "messages[0].content[0].refusal", {})
    ],
    "messages[].name": [(message(name=OVER_NAME), "messages[0].name", {})],
    "messages[].reasoning_content": [(message(reasoning_content=5), "messages[0].reasoning_content", {})],
    "messages[].reasoning": [(message(reasoning=5), "messages[0].reasoning", {})],
    "messages[].refusal": [(message(refusal=5), "messages[0].refusal", {})],
    "messages[].tool_call_id": [
        (message(role="tool"), "messages[0].tool_call_id", {}),
        (message(tool_call_id=OVER_NAME), "messages[0].tool_call_id", {}),
    ],
    "messages[].tool_calls": [
        (
            called(function={"name": "f", "arguments": '"' + "x" * LIMITS.tools_bytes + '"'}),
            "messages[].tool_calls",
            {},
        ),
        (message(tool_calls=[{"function": {"name": "f"}}] * (LIMITS.tools + 1)), "messages[0].tool_calls", {}),
    ],
    "messages[].tool_calls[].id": [(called(id=OVER_NAME), "messages[0].tool_calls[0].id", {})],
    "messages[].tool_calls[].type": [
        (called(type=OVER_NAME), "messages[0].tool_calls[0].type", {}),
        (called(type="custom"), "messages[0].tool_calls[0].type", {}),
    ],
    "messages[].tool_calls[].function": [(called(function=5), "messages[0].tool_calls[0].function", {})],
    "messages[].tool_calls[].function.name": [
        (called(function={"name": OVER_NAME}), "messages[0].tool_calls[0].function.name", {}),
        (called(function={"name": "a b"}), "messages[0].tool_calls[0].function.name", {}),
    ],
    "messages[].tool_calls[].function.arguments": [
        (called(function={"name": "f", "arguments": "{"}), "messages[0].tool_calls[0].function.arguments", {}),
        (called(function={"name": "f", "arguments": "[1]"}), "messages[0].tool_calls[0].function.arguments", {}),
        (
            called(function={"name": "f", "arguments": {"x": deep(70)}}),
            "messages[0].tool_calls[0].function.arguments",
            {},
        ),
    ],
    "tools": [tool() * (LIMITS.tools + 1), tool(description="x" * (LIMITS.tools_bytes // 16)) * 16, 5],
    "tools[].type": [
        ([{"type": OVER_NAME, "function": {"name": "f"}}], "tools[0].type", {}),
        ([{"type": "other", "function": {"name": "f"}}], "tools[0].type", {}),
    ],
    "tools[].function": [([{"type": "function", "function": 5}], "tools[0].function", {})],
    "tools[].function.name": [
        (tool(name=name), "tools[0].function.name", {}) for name in (OVER_NAME, "", "a.b", OVER_TOOL, "é")
    ],
    "tools[].function.description": [(tool(description=5), "tools[0].function.description", {})],
    "tools[].function.parameters": [
        (tool(parameters={"type": "array"}), "tools[0].function.parameters.type", {}),
        (tool(parameters={"x": deep(70)}), "tools[0].function.parameters", {}),
        (tool(parameters={"x": "y" * LIMITS.schema_bytes}), "tools[0].function.parameters", {}),
    ],
    "tools[].function.strict": [(tool(strict=5), "tools[0].function.strict", {})],
    "chat_template": ["{{ 1 }}", "x" * (LIMITS.template_chars + 1)],
    "chat_template_kwargs": [
        {f"a{i}": 1 for i in range(33)},
        ({"x": deep(10)}, "chat_template_kwargs.x", {}),
        {"x": "y" * LIMITS.template_kwargs_bytes},
        ({"messages": 1}, "chat_template_kwargs.messages", {}),
        ({"_x": 1}, "chat_template_kwargs._x", {}),
    ],
    "add_generation_prompt": [5],
    "continue_final_message": [5],
}
SESSION: dict[str, list[Any]] = {
    "session_params": [5, {"id": "none"}],
    "session_params.id": [({"id": value}, "session_params.id", {}) for value in ("none", OVER_NAME)],
    "session_params.rid": [({"id": "x", "rid": OVER_LABEL}, "session_params.rid", {})],
    "session_params.offset": [({"id": "x", "offset": value}, "session_params.offset", {}) for value in (HUGE, 1.5)],
    "session_params.replace": [({"id": "x", "replace": 5}, "session_params.replace", {})],
    "session_params.drop_previous_output": [
        ({"id": "x", "drop_previous_output": 5}, "session_params.drop_previous_output", {})
    ],
}
PROMPT = ["", [], [[]], strings(LIMITS.prompts + 1), [[-1]], [HUGE], [384], OVER_CONTEXT, [0] * 10_000, deep(100), 5]

LOAD_ADAPTER: dict[str, list[Any]] = {
    "lora_name": ["", "x" * (LIMITS.adapter_name_chars + 1), 5],
    "lora_path": ["", "x" * (LIMITS.path_chars + 1), 5],
    "pinned": [5],
}
VLLM_ADAPTER = LOAD_ADAPTER | {"load_inplace": [5]}

TABLE: dict[str, dict[str, list[Any]]] = {
    "/v1/completions": OPENAI
    | SESSION
    | {
        "best_of": [0, LIMITS.n + 1, (1, "best_of", {"n": 2}), (2, "best_of", {"stream": True})],
        "prompt": PROMPT,
        "echo": [5],
        "logprobs": [-1, LIMITS.logprobs + 1, HUGE],
        "suffix": ["x", 5],
        "add_special_tokens": [5],
    },
    "/v1/chat/completions": OPENAI
    | SESSION
    | CONVERSATION
    | {
        "max_completion_tokens": [0, -1, 2**31, HUGE],
        "logprobs": [5],
        "top_logprobs": [
            (LIMITS.logprobs + 1, "top_logprobs", {"logprobs": True}),
            (-1, "top_logprobs", {"logprobs": True}),
            5,
        ],
        "tool_choice": [OVER_NAME, "required", {"type": "function"}, deep(100)],
        "parallel_tool_calls": [5],
        "prediction": [5, {"type": "content", "content": "x"}],
        "prediction.type": [({"type": "image", "content": "x"}, "prediction.type", {})],
        "prediction.content": [({"type": "content", "content": 5}, "prediction.content", {})],
        "prediction.content[].type": [
            ({"type": "content", "content": [{"type": "x", "text": "x"}]}, "prediction.content[0].type", {})
        ],
        "prediction.content[].text": [
            ({"type": "content", "content": [{"type": "text", "text": 5}]}, "prediction.content[0].text", {})
        ],
        "reasoning_effort": ["banana", "", 5],
        "separate_reasoning": [5],
        "stream_reasoning": [5],
        "include_reasoning": [5],
        "thinking_budget": [-1, 2**31, 1.5],
        "max_thinking_tokens": [-1, 2**31],
        "thinking_token_budget": [-1, 2**31],
        "reasoning.max_tokens": [({"max_tokens": -1}, "reasoning.max_tokens", {})],
        "reasoning": [{"max_tokens": 5}, {"effort": "x" * 33}],
        "reasoning.effort": [({"effort": "x" * 33}, "reasoning.effort", {})],
    },
    "/generate": {
        "text": [strings(LIMITS.prompts + 1), [], "", OVER_CONTEXT, 5],
        "input_ids": [
            (PROMPT[1], "input_ids", {"text": None}),
            ([HUGE], "input_ids", {"text": None}),
            ([0] * 10_000, "input_ids", {"text": None}),
            ([384], "input_ids", {"text": None}),
        ],
        "sampling_params": [5, [{}] * (LIMITS.prompts + 1)],
        **{
            f"sampling_params.{native}": [
                ({native: value}, f"sampling_params.{native}", {}) for value in SAMPLING[name]
            ]
            for native, name in {
                **{name: name for name in SAMPLING},
                "max_new_tokens": "min_tokens",
                "min_new_tokens": "min_tokens",
                "sampling_seed": "seed",
            }.items()
            if native
            in (
                "max_new_tokens",
                "min_new_tokens",
                "sampling_seed",
                "stop",
                "stop_regex",
                "stop_token_ids",
                "temperature",
                "top_p",
                "top_k",
                "min_p",
                "frequency_penalty",
                "presence_penalty",
                "repetition_penalty",
                "n",
                "ignore_eos",
                "skip_special_tokens",
                "no_stop_trim",
                "logit_bias",
                "speculative",
                "speculative_num_draft_tokens",
                "json_schema",
                "regex",
                "ebnf",
                "structural_tag",
            )
        },
        "rid": [OVER_LABEL, strings(LIMITS.prompts + 1)],
        "stream": [5],
        "return_logprob": [5, [True] * (LIMITS.prompts + 1)],
        "logprob_start_len": [
            (10_000, "logprob_start_len", {"return_logprob": True}),
            [0] * (LIMITS.prompts + 1),
        ],
        "top_logprobs_num": [
            (LIMITS.logprobs + 1, "top_logprobs_num", {"return_logprob": True}),
            (HUGE, "top_logprobs_num", {"return_logprob": True}),
            [0] * (LIMITS.prompts + 1),
        ],
        "return_text_in_logprobs": [5],
        "return_routed_experts": [5],
        "routed_experts_start_len": [-1, 2**31, HUGE],
        "return_prompt_token_ids": [5],
        "return_hidden_states": [5],
        "priority": [2**31],
        "data_parallel_rank": [-1],
        "routed_dp_rank": [-1],
        "cache_salt": [OVER_SALT],
        "extra_key": [OVER_SALT],
        "lora_path": ["", "x" * (LIMITS.adapter_name_chars + 1), ["a", "b"], 5],
        **SESSION,
    },
    "/open_session": {
        "capacity_of_str_len": [-1, HUGE, 1.5],
        "session_id": ["", OVER_NAME],
        "streaming": [5],
        "timeout": [0, 86_401],
    },
    "/close_session": {"session_id": [OVER_NAME, 5]},
    "/tokenize": {
        "model": [OVER_NAME],
        "prompt": [strings(LIMITS.prompts + 1), 5, deep(100)],
        "add_special_tokens": [5],
        "return_token_strs": [(True, "return_token_strs", {"prompt": "x" * 300_000})],
        "content": [5, "x"],
        "add_special": [5],
        "parse_special": [5, (False, "parse_special", {"prompt": None, "content": "x"})],
        "with_pieces": [5],
        **{
            field: [
                (
                    *(value if isinstance(value, tuple) else (value, field, {}))[:2],
                    {"prompt": None, "messages": [MESSAGE]},
                )
                for value in values
            ]
            for field, values in CONVERSATION.items()
        },
    },
    "/detokenize": {
        "model": [OVER_NAME],
        "tokens": [[[0]] * (LIMITS.prompts + 1), [0] * 70_000, [384], [-1], [HUGE], deep(100), 5],
        "skip_special_tokens": [5],
    },
    "/abort_request": {"rid": [OVER_LABEL, "", 5], "abort_all": [5]},
    "/pause_generation": {"mode": ["stop", 5]},
    "/set_trace_level": {"level": [-1, 4, HUGE, "1"]},
    "/load_lora_adapter": LOAD_ADAPTER,
    "/v1/load_lora_adapter": VLLM_ADAPTER,
    **{f"{prefix}/unload_lora_adapter": {"lora_name": LOAD_ADAPTER["lora_name"]} for prefix in ("", "/v1")},
}
TABLE |= OTHER_APIS


def item(**fields: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": "hi", **fields}]


def parted(**fields: object) -> list[dict[str, object]]:
    return item(content=[{"type": "input_text", "text": "hi", **fields}])


def called_item(kind: str, **fields: object) -> list[dict[str, object]]:
    return [{"type": kind, "call_id": "1", "name": "f", **fields}]


def answered(**part: object) -> list[dict[str, object]]:
    return called_item("function_call_output", output=[{"type": "input_text", "text": "hi", **part}])


def thought(**part: object) -> list[dict[str, object]]:
    return [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hi", **part}]}, *item()]


def function(**fields: object) -> list[dict[str, object]]:
    return [{"type": "function", "name": "f", **fields}]


def inside(field: str, *values: object, **others: object) -> list[Any]:
    """Values of a field of the body's objects: ``a.b``."""
    inner = field.partition(".")[2]
    return [({inner: value, **others}, field, {}) for value in values]


def named(field: str, *values: object) -> list[Any]:
    return [(value, field, {}) for value in values]


ITEMS: dict[str, list[Any]] = {
    "[].type": [item(type=OVER_NAME), item(type="computer_call")],
    "[].id": [item(id=OVER_NAME)],
    "[].role": [item(role="owner"), item(role=5)],
    "[].content": [item(content=5), item(content=[{"type": "input_image"}])],
    "[].content[].type": [parted(type=OVER_NAME), parted(type="input_image")],
    "[].content[].text": [parted(text=5), parted(text=None)],
    "[].content[].refusal": [parted(refusal=5), parted(type="refusal")],
    "[].status": [item(status="banana")],
    "[].call_id": [called_item("function_call", call_id=OVER_NAME), called_item("function_call", call_id=None)],
    "[].name": [called_item("function_call", name=OVER_NAME), called_item("custom_tool_call", name=None)],
    "[].arguments": [called_item("function_call", arguments=5)],
    "[].input": [called_item("custom_tool_call", input=5)],
    "[].output": [called_item("function_call_output"), called_item("function_call_output", output=5)],
    "[].output[].type": [answered(type="input_image")],
    "[].output[].text": [answered(text=5)],
    "[].output[].refusal": [answered(refusal=5)],
    "[].summary": [[{"type": "reasoning", "summary": 5}]],
    "[].summary[].type": [thought(type="input_image")],
    "[].summary[].text": [thought(text=5)],
    "[].summary[].refusal": [thought(refusal=5)],
    "[].encrypted_content": [[{"type": "reasoning", "encrypted_content": 5}]],
    "[].phase": [item(phase=OVER_NAME)],
}
TABLE["/v1/responses"] = {
    **{name: OPENAI[name] for name in (
        "model", "cache_salt", "metadata", "priority", "prompt_cache_key", "prompt_cache_retention",
        "safety_identifier", "seed", "service_tier", "store", "stream", "temperature", "top_k", "top_p", "user",
    )},
    "input": [[], item() * (LIMITS.messages + 1), 5, OVER_CONTEXT, item(content=OVER_CONTEXT)],
    **{f"input{path}": named(f"input{path}".replace("[]", "[0]"), *values) for path, values in ITEMS.items()},
    "background": [5, (True, "background", {"store": False})],
    "chat_template_kwargs": CONVERSATION["chat_template_kwargs"],
    "conversation": [OVER_NAME, 5, ("conv_1", "conversation", {"previous_response_id": "resp_1"})],
    "conversation.id": inside("conversation.id", OVER_NAME, 5),
    "include": [5, ["everything"], ["message.output_text.logprobs"] * 33],
    "instructions": [5, (OVER_CONTEXT, "input", {})],
    "max_output_tokens": [0, -1, 2**31, HUGE],
    "max_tool_calls": [0, HUGE],
    "parallel_tool_calls": [5],
    "previous_response_id": [OVER_NAME, 5],
    "reasoning": [5, {"budget": 5}],
    "reasoning.effort": inside("reasoning.effort", "x" * 33, 5),
    "reasoning.summary": inside("reasoning.summary", "long"),
    "reasoning.generate_summary": inside("reasoning.generate_summary", "long"),
    "stream_options": [5],
    "stream_options.include_obfuscation": inside("stream_options.include_obfuscation", 5),
    "text": [5, {"banana": 5}],
    "text.format": inside("text.format", 5, {"type": "xml"}, {"type": "json_schema", "schema": {"type": "nope"}}),
    "text.verbosity": inside("text.verbosity", "banana"),
    "tool_choice": [OVER_NAME, "required", {"type": "function"}, deep(100)],
    "tools": [5, function() * (LIMITS.tools + 1)],
    "tools[].type": named("tools[0].type", [{"type": OVER_NAME}], [{"type": "web_search"}]),
    "tools[].name": named("tools[0].name", function(name="a b"), function(name=OVER_NAME), function(name=None)),
    "tools[].description": named("tools[0].description", function(description=5)),
    "tools[].parameters": named("tools[0].parameters", function(parameters=5), function(parameters={"type": "nope"})),
    "tools[].strict": named("tools[0].strict", function(strict=5)),
    "tools[].format": named("tools[0].format", function(format=5), function(type="custom", format={"type": "grammar"})),
    "top_logprobs": [-1, LIMITS.logprobs + 1, HUGE],
    "truncation": ["banana"],
}  # fmt: skip
TABLE["/v1/responses/input_tokens"] = {name: [] for name in TABLE["/v1/responses"]}  # the same body
TABLE["/v1/conversations"] = {
    "items": [5, item() * 21],
    **{f"items{path}": named(f"items{path}".replace("[]", "[0]"), *values) for path, values in ITEMS.items()},
    "metadata": OPENAI["metadata"],
}
TABLE["/v1/conversations/{conversation_id}"] = {"metadata": OPENAI["metadata"]}
TABLE["/v1/conversations/{conversation_id}/items"] = {
    "items": [[], 5, item() * 21],
    # The items themselves are checked as those of a new conversation, when the conversation was found.
    **{f"items{path}": [] for path in ITEMS},
}
TABLE["/v1/embeddings"] = {
    "input": [5, []],
    "model": [OVER_NAME, 5, "tiny"],
    "encoding_format": ["hex"],
    "dimensions": [0, -1, HUGE],
    "user": OPENAI["user"],
    "cache_salt": [5],
    "priority": OPENAI["priority"],
    "rid": [OVER_LABEL],
    "prompt_name": [5, OVER_NAME],
    "truncate_prompt_tokens": [-2, HUGE, 1.5],
}
RANKING: dict[str, list[Any]] = {
    name: TABLE["/v1/embeddings"][name]
    for name in ("model", "user", "cache_salt", "priority", "rid", "truncate_prompt_tokens")
}
RERANK: dict[str, list[Any]] = {
    "query": [5],
    "documents": [[], 5, ["x"] * 2049],
    "documents[].text": [([{"text": 5}], "documents[0]", {}), ([{}], "documents[0]", {})],
    "top_n": [0, -1, HUGE],
    "model": RANKING["model"],
}
IDS: list[Any] = [5, [HUGE], [[-1]]]
for path in ("/rerank", "/v1/rerank"):
    TABLE[path] = RANKING | RERANK | {"return_documents": [5], "instruction": [5]}
TABLE["/v2/rerank"] = RERANK | {"priority": [-1, 1000, 1.5], "return_documents": [5]}
for path in ("/score", "/v1/score"):
    TABLE[path] = RANKING | {
        "text_1": [5, [], ["x"] * 2049],
        "text_2": [5, [], ["x"] * 2049],
        "query": [5, [HUGE]],
        "items": [5, []],
        "label_token_ids": [5, [], [-1], [1] * 1025],
        "apply_softmax": [5],
        "item_first": [5],
    }
TABLE["/classify"] = RANKING | {
    "input": [5, []],
    "text": [5, [], ["x"] * 2049],
    "input_ids": IDS,
    "activation": [5],
}
TABLE["/pooling"] = RANKING | {
    "input": [5, []],
    "task": ["score", 5],
    "encoding_format": ["hex"],
    "dimensions": [0, -1, HUGE],
    "activation": [5],
    "prompt_name": [5, OVER_NAME],
}
TABLE["/encode"] = {"text": [5, [], ["x"] * 2049], "input_ids": IDS, "rid": [OVER_LABEL]}
TABLE["/v1/batches"] = {
    "input_file_id": [OVER_NAME, 5, "file-x"],
    "endpoint": [OVER_NAME, "/v1/embeddings", 5],
    "completion_window": ["1h", 5],
    "metadata": OPENAI["metadata"],
    "output_expires_after": [5, {"anchor": "x", "seconds": 3600}],
    "output_expires_after.anchor": [({"anchor": "x", "seconds": 3600}, "output_expires_after.anchor", {})],
    "output_expires_after.seconds": [
        ({"anchor": "created_at", "seconds": 3599}, "output_expires_after.seconds", {}),
        ({"anchor": "created_at", "seconds": HUGE}, "output_expires_after.seconds", {}),
    ],
}
TABLE |= {f"/v1{path}": TABLE[path] for path in ("/tokenize", "/detokenize")}

NEEDED: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "hi"},
    **{path: {"query": "hi", "documents": ["x"]} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    **{path: {"text_1": "hi", "text_2": "x"} for path in ("/score", "/v1/score")},
    "/classify": {"input": "hi"},
    "/pooling": {"input": "hi"},
    "/encode": {},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/open_session": {},
    "/close_session": {"session_id": "none"},
    "/v1/responses/input_tokens": {},
    "/v1/conversations": {},
    "/v1/conversations/{conversation_id}": {},
    "/v1/conversations/{conversation_id}/items": {},
    "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [MESSAGE], "max_tokens": 1},
    "/generate": {"text": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/v1/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/detokenize": {"tokens": [1]},
    "/abort_request": {},
    "/pause_generation": {},
    "/set_trace_level": {},
    **{f"{prefix}/load_lora_adapter": {"lora_name": "a", "lora_path": "/none"} for prefix in ("", "/v1")},
    **{f"{prefix}/unload_lora_adapter": {"lora_name": "a"} for prefix in ("", "/v1")},
} | NEEDED_ELSEWHERE

# Where another field than the one in hand is named, by design: a conversation that is too long, an unknown model ...
ALSO_NAMED = {
    "prompt": ("prompt", "prompt[0]"),
    "messages": ("messages", "prompt"),
    "n": ("n",),
}


def fields_of(kind: Any, prefix: str = "") -> Iterator[str]:
    """The path of every field of a struct, those of structs inside it as well; ``[]`` for the members of a list."""
    for field in msgspec.structs.fields(kind):
        path = f"{prefix}{field.encode_name}"
        yield path
        for inner, listed in structs_in(field.type):
            yield from fields_of(inner, f"{path}[]." if listed else f"{path}.")


def structs_in(annotation: Any, listed: bool = False) -> Iterator[tuple[Any, bool]]:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation, listed
        return
    listed = listed or typing.get_origin(annotation) is list
    for argument in typing.get_args(annotation):
        yield from structs_in(argument, listed)


BODIES = {route.path: route.body for route in ROUTES if route.body is not None}
DIALECTS = {route.path: route.dialect for route in ROUTES}


def test_every_field_of_every_body_is_in_the_table() -> None:
    assert set(TABLE) == set(BODIES)
    for path, kind in BODIES.items():
        declared = {name.replace("sampling_params[].", "sampling_params.") for name in fields_of(kind)}
        missing = declared - set(TABLE[path])
        assert not missing, f"add these fields of {path} to TABLE, with values past their limits: {sorted(missing)}"


CASES = [
    pytest.param(path, field, value, id=f"{path}-{field}-{number}")
    for path, fields in TABLE.items()
    if path not in ("/v1/tokenize", "/v1/detokenize")
    for field, values in fields.items()
    for number, value in enumerate(values)
]


@pytest.mark.parametrize(("path", "field", "value"), CASES)
def test_past_its_limit_a_field_is_named(target: Target, path: str, field: str, value: Any) -> None:
    value, named, others = value if isinstance(value, tuple) else (value, field, {})
    body = {**NEEDED[path], **others, field.partition("[")[0].partition(".")[0]: value}
    data = encoded({name: given for name, given in body.items() if given is not None})
    answer = target.post(path, data, headers={"Content-Type": "application/json", **ADMIN})
    assert answer.status_code == 400, answer.text[:500]
    found = answer.json()
    error = found["error"] if "error" in found else found["message"]  # Cohere's form
    if DIALECTS[path] is not OPENAI_FORM:  # most have the field's name in the message alone
        message = error if isinstance(error, str) else error["message"]
        place = message if isinstance(error, str) else error.get("param", message)
        assert place.startswith((*ALSO_NAMED.get(named, ()), named, f"The {named}")), error
        assert len(message) < 1000
        return
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] is not None, error
    accepted = (*ALSO_NAMED.get(named, ()), named)
    assert error["param"].startswith(accepted), error
    assert len(error["message"]) < 1000


def encoded(body: dict[str, Any]) -> bytes:
    """JSON with numbers that no 64 bits hold."""
    import json

    return json.dumps(body).encode()


def test_at_its_limit_a_field_is_taken(target: Target) -> None:
    most = {
        "prompt": ["hi"],
        "max_tokens": 1,
        "n": 2,
        "stop": ["x" * LIMITS.stop_string_chars] * LIMITS.stop_strings,
        "logprobs": LIMITS.logprobs,
        "temperature": LIMITS.temperature,
        "frequency_penalty": LIMITS.penalty,
        "logit_bias": {str(i % 384): 100 for i in range(384)},
        "cache_salt": "x" * LIMITS.cache_salt_chars,
        "rid": "x" * LIMITS.request_id_chars,
        "seed": 2**64 - 1,
        "bad_words": ["x"] * LIMITS.bad_words,
    }
    answer = target.post("/v1/completions", most)
    assert answer.status_code == 200, answer.text


def test_nothing_was_harmed(target: Target) -> None:
    target.assert_unharmed()
