"""Answers with tool calls as the models' templates write them: for each format."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["ADD", "OSLO", "TOOLS", "written"]

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
    },
    "add": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"anyOf": [{"type": "null"}]}}},
    "now": {"type": "object", "properties": {}},
}

Call = tuple[str, dict[str, Any]]

OSLO: Call = ("get_weather", {"city": 'Oslo "é"\n<b>', "days": 2, "tags": ["a", {"b": [1.5, None, True]}]})
ADD: Call = ("add", {"a": -1.5, "b": None})


def _dump(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _named(call: Call, name: str = "name", arguments: str = "arguments", **more: object) -> str:
    return f"{{{_dump(name)}: {_dump(call[0])}, {_dump(arguments)}: {_dump(call[1])}{_more(more)}}}"


def _more(more: dict[str, object]) -> str:
    return "".join(f", {_dump(key)}: {_dump(value)}" for key, value in more.items())


def _text(value: object) -> str:
    return value if isinstance(value, str) else _dump(value)


def _invoke(call: Call, prefix: str = "", typed: bool = False) -> str:
    def sign(value: object) -> str:
        return f' string="{_dump(isinstance(value, str))}"' if typed else ""

    members = "".join(
        f'<{prefix}parameter name="{key}"{sign(value)}>{_text(value)}</{prefix}parameter>\n'
        for key, value in call[1].items()
    )
    return f'<{prefix}invoke name="{call[0]}">\n{members}</{prefix}invoke>\n'


def _python(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


def _gemma(value: object) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return f"{{{','.join(f'{key}:{_gemma(inner)}' for key, inner in value.items())}}}"
        case list():
            return f"[{','.join(map(_gemma, value))}]"
    return _dump(value)


def written(name: str, *calls: Call) -> str:
    """The calls in a format, as its models write them behind text."""
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{_named(call)}\n</tool_call>" for call in calls)
        case "granite":
            return f"<|tool_call|>[{', '.join(_named(call) for call in calls)}]"
        case "phi4":
            return f"<|tool_call|>[{', '.join(_named(call) for call in calls)}]<|/tool_call|>"
        case "json":
            return f"[{', '.join(_named(call) for call in calls)}]"
        case "internlm":
            return "".join(
                f"<|action_start|><|plugin|>\n{_named(call, arguments='parameters')}<|action_end|>\n" for call in calls
            )
        case "cohere":
            listed = ",\n    ".join(
                f'{{"tool_call_id": "{number}", "tool_name": "{call[0]}", "parameters": {_dump(call[1])}}}'
                for number, call in enumerate(calls)
            )
            return f"<|START_ACTION|>[\n    {listed}\n]<|END_ACTION|>"
        case "llama3_json":
            return "<|python_tag|>" + "; ".join(_named(call, arguments="parameters") for call in calls)
        case "mistral":
            return "".join(f"[TOOL_CALLS]{call[0]}[ARGS]{_dump(call[1])}" for call in calls)
        case "deepseekv3":
            blocks = "\n".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call[0]}\n```json\n{_dump(call[1])}\n```<｜tool▁call▁end｜>"
                for call in calls
            )
            return f"<｜tool▁calls▁begin｜>{blocks}<｜tool▁calls▁end｜>"
        case "deepseekv31":
            blocks = "".join(
                f"<｜tool▁call▁begin｜>{call[0]}<｜tool▁sep｜>{_dump(call[1])}<｜tool▁call▁end｜>" for call in calls
            )
            return f"<｜tool▁calls▁begin｜>{blocks}<｜tool▁calls▁end｜>"
        case "deepseekv32" | "deepseek_v4":
            around = "function_calls" if name == "deepseekv32" else "tool_calls"
            blocks = "".join(_invoke(call, "｜DSML｜", True) for call in calls)
            return f"<｜DSML｜{around}>\n{blocks}</｜DSML｜{around}>"
        case "minimax-m1":
            return "\n".join(("<tool_calls>", *map(_named, calls), "</tool_calls>"))
        case "minimax-m2":
            return f"<minimax:tool_call>\n{''.join(map(_invoke, calls))}</minimax:tool_call>"
        case "step3":
            blocks = "".join(
                f"<｜tool_call_begin｜>function<｜tool_sep｜>{_invoke(call, 'steptml:').strip()}<｜tool_call_end｜>\n"
                for call in calls
            )
            return f"<｜tool_calls_begin｜>\n{blocks}<｜tool_calls_end｜>"
        case "kimi_k2":
            blocks = "".join(
                f"<|tool_call_begin|>functions.{call[0]}:{number}<|tool_call_argument_begin|>{_dump(call[1])}<|tool_call_end|>"
                for number, call in enumerate(calls)
            )
            return f"<|tool_calls_section_begin|>{blocks}<|tool_calls_section_end|>"
        case "qwen3_coder":
            return "\n".join(
                f"<tool_call>\n<function={call[0]}>\n"
                + "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in call[1].items())
                + "</function>\n</tool_call>"
                for call in calls
            )
        case "glm45":
            return "\n".join(
                f"<tool_call>{call[0]}\n"
                + "".join(
                    f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
                    for key, value in call[1].items()
                )
                + "</tool_call>"
                for call in calls
            )
        case "pythonic":
            return f"[{', '.join(map(_python, calls))}]"
        case "llama4":
            return f"<|python_start|>[{', '.join(map(_python, calls))}]<|python_end|>"
        case "lfm2":
            return f"<|tool_call_start|>[{', '.join(map(_python, calls))}]<|tool_call_end|>"
        case "gemma4":
            return "".join(f"<|tool_call>call:{call[0]}{_gemma(call[1])}<tool_call|>" for call in calls)
        case "gpt-oss":
            return "".join(
                f"<|start|>assistant<|channel|>commentary to=functions.{call[0]} <|constrain|>json<|message|>"
                f"{_dump(call[1])}<|call|>"
                for call in calls
            )
    raise KeyError(name)
