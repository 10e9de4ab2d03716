"""Answers with tool calls as the models' templates write them: for each format."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["ADD", "OSLO", "TOOLS", "hunyuan", "written"]

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


def _gemma(value: object, quote: str = '<|"|>') -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return f"{{{','.join(f'{key}:{_gemma(inner, quote)}' for key, inner in value.items())}}}"
        case list():
            return f"[{','.join(_gemma(inner, quote) for inner in value)}]"
    return _dump(value)


def _pairs(call: Call, prefix: str = "", suffix: str = "") -> str:
    """Keys and values as GLM-4.5 writes them, with a prefix and a suffix of the names of tags."""
    return "".join(
        f"<{prefix}arg_key{suffix}>{key}</{prefix}arg_key{suffix}>\n"
        f"<{prefix}arg_value{suffix}>{_text(value)}</{prefix}arg_value{suffix}>\n"
        for key, value in call[1].items()
    )


def hunyuan(*calls: Call, suffix: str = "", separator: bool = True) -> str:
    """The calls as Hunyuan 3 writes them; without the separator, as Hunyuan 4 does."""
    behind = f"<tool_sep{suffix}>" if separator else ""
    blocks = "".join(
        f"<tool_call{suffix}>{call[0]}{behind}\n{_pairs(call, '', suffix)}</tool_call{suffix}>\n" for call in calls
    )
    return f"<tool_calls{suffix}>\n{blocks}</tool_calls{suffix}>"


NAMESPACE = "]<]minimax[>["


def _elements(value: object) -> str:
    """A value as MiniMax-M3 writes it: objects and lists are elements."""
    match value:
        case dict():
            return "".join(f"{NAMESPACE}<{key}>{_elements(inner)}{NAMESPACE}</{key}>" for key, inner in value.items())
        case list():
            return "".join(f"{NAMESPACE}<item>{_elements(inner)}{NAMESPACE}</item>" for inner in value)
    return _text(value)


_KINDS = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}


def _kimi_k3(call: Call, number: int) -> str:
    members = "".join(
        f'<|open|>argument key="{key}" type="{_KINDS.get(type(value), "null")}"<|sep|>'
        f"{_text(value)}<|close|>argument<|sep|>"
        for key, value in call[1].items()
    )
    return f'<|open|>call tool="{call[0]}" index="{number}"<|sep|>{members}<|close|>call<|sep|>'


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
            return "\n".join(f"<tool_call>{call[0]}\n{_pairs(call)}</tool_call>" for call in calls)
        case "pythonic":
            return f"[{', '.join(map(_python, calls))}]"
        case "llama4":
            return f"<|python_start|>[{', '.join(map(_python, calls))}]<|python_end|>"
        case "lfm2":
            return f"<|tool_call_start|>[{', '.join(map(_python, calls))}]<|tool_call_end|>"
        case "gemma4":
            return "".join(f"<|tool_call>call:{call[0]}{_gemma(call[1])}<tool_call|>" for call in calls)
        case "functiongemma":
            return "".join(
                f"<start_function_call>call:{call[0]}{_gemma(call[1], '<escape>')}<end_function_call>" for call in calls
            )
        case "minimax-m3":
            blocks = "".join(
                f'{NAMESPACE}<invoke name="{call[0]}">{_elements(call[1])}{NAMESPACE}</invoke>\n' for call in calls
            )
            return f"{NAMESPACE}<tool_call>\n{blocks}{NAMESPACE}</tool_call>"
        case "hy_v3":
            return hunyuan(*calls)
        case "hunyuan_a13b":
            return f"<tool_calls>[{', '.join(map(_named, calls))}]</tool_calls>"
        case "seed_oss":
            return "\n".join(
                f"<seed:tool_call>\n<function={call[0]}>\n"
                + "".join(f"<parameter={key}>{_text(value)}</parameter>\n" for key, value in call[1].items())
                + "</function>\n</seed:tool_call>"
                for call in calls
            )
        case "longcat":
            return "\n".join(f"<longcat_tool_call>\n{_named(call)}\n</longcat_tool_call>" for call in calls)
        case "olmo3":
            return "\n".join(("<function_calls>", *map(_python, calls), "</function_calls>"))
        case "granite-20b-fc":
            return "\n".join(f"<function_call> {_named(call)}" for call in calls)
        case "gigachat3":
            return "\n".join(f"function call<|role_sep|>\n{_named(call)}" for call in calls)
        case "gigachat35":
            blocks = "".join(_invoke(call, "｜GCML｜", True) for call in calls)
            return f"<｜GCML｜tool_calls>\n{blocks}</｜GCML｜tool_calls>"
        case "apertus":
            listed = ", ".join(f"{{{_dump(call[0])}: {_dump(call[1])}}}" for call in calls)
            return f"<|tools_prefix|>[{listed}]<|tools_suffix|>"
        case "minicpm5":
            return "\n".join(
                f'<function name="{call[0]}">'
                + "".join(f'<param name="{key}">{_text(value)}</param>' for key, value in call[1].items())
                + "</function>"
                for call in calls
            )
        case "kimi_k3":
            blocks = "".join(_kimi_k3(call, number) for number, call in enumerate(calls, 1))
            return f"<|open|>tools<|sep|>{blocks}<|close|>tools<|sep|>"
        case "solar_open2":
            return "\n".join(
                f"<|tool_call:start|>{call[0]}\n"
                + "".join(
                    f"<|tool_arg:start|>{key}<|tool_arg:value|>{_text(value)}<|tool_arg:end|>\n"
                    for key, value in call[1].items()
                )
                + "<|tool_call:end|>"
                for call in calls
            )
        case "dots":
            return f"<dots_function_call>\n{''.join(map(_invoke, calls))}</dots_function_call>"
        case "k2_horizon":
            blocks = "".join(f"<ifm|tool_call>{call[0]}\n{_pairs(call, 'ifm|')}</ifm|tool_call>\n" for call in calls)
            return f"<ifm|tool_calls>\n{blocks}</ifm|tool_calls>"
        case "inkling":
            return "".join(
                f"<|message_model|>{call[0]}<|content_invoke_tool_json|>{_named(call, arguments='args')}<|end_message|>"
                for call in calls
            )
        case "gpt-oss":
            return "".join(
                f"<|start|>assistant<|channel|>commentary to=functions.{call[0]} <|constrain|>json<|message|>"
                f"{_dump(call[1])}<|call|>"
                for call in calls
            )
    raise KeyError(name)
