"""Tool calls: the right tool with arguments from the question, several at once, and answers from what tools say."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from tests.understudy.lessons.conversation import Conversation
from tests.understudy.lessons.outside import NOT_TAUGHT, filled
from tests.understudy.lessons.phrasing import casual, invented_name, polite
from tests.understudy.lessons.trades import TRADES, Trade, any_trade, city, form_trade
from tests.understudy.lessons.words import NOUNS, message, phrase, word

__all__ = ["call_message", "declare", "tool_conversation"]

_OPTIONAL = (
    ("unit", {"type": "string", "enum": ["celsius", "fahrenheit"]}), ("limit", {"type": "integer"}),
    ("verbose", {"type": "boolean"}), ("language", {"type": "string", "default": "en"}),
    ("format", {"type": "string", "enum": ["short", "long"]}), ("page", {"type": "integer", "default": 1}),
    ("timezone", {"type": "string"}), ("detailed", {"type": "boolean", "default": False}),
)  # fmt: skip


def _named(rng: Random, name: str) -> str:
    """The name as it is, or made up, or in another spelling."""
    style = rng.random()
    if style < 0.13:
        return f"{rng.choice(('do', 'run', 'x', 'my', 'api', 'call', 'use'))}_{invented_name(rng).lower()}"
    if style < 0.25:
        return "".join(part.capitalize() if i else part for i, part in enumerate(name.split("_")))
    if style < 0.35:
        return "".join(part.capitalize() for part in name.split("_")) if name[0].islower() else name
    if style < 0.5:
        return f"{name}_{rng.choice(NOUNS)}" if rng.random() < 0.6 else f"{rng.choice(NOUNS)}_{name}"
    return name


def _parameters(rng: Random, properties: dict[str, Any], keys: list[str], strict: bool) -> dict[str, Any]:
    """The schema of a tool's arguments, in the order of one client or another."""
    optional = [(key, schema) for key, schema in _OPTIONAL if key not in properties]
    extra = dict(rng.sample(optional, rng.choice((1, 1, 2)))) if not strict and rng.random() < 0.15 else {}
    parameters: dict[str, Any] = {"type": "object", "properties": properties | extra}
    if extra or strict or rng.random() < 0.85:
        parameters["required"] = rng.sample(keys, len(keys)) if rng.random() < 0.2 else keys
    if strict:
        parameters["additionalProperties"] = False
    if rng.random() < 0.12:
        parameters["title"] = f"{rng.choice(NOUNS)}_args"
    if rng.random() < 0.4:
        order = ["properties", "required", "title", "type", "additionalProperties"]
        if rng.random() < 0.4:
            order.sort()
        return {key: parameters[key] for key in order if key in parameters}
    return parameters


def declare(rng: Random, trade: Trade) -> tuple[dict[str, Any], list[str]]:
    """A tool of this trade in OpenAI's form, and the names of its arguments in order."""
    name = _named(rng, rng.choice(trade.names))
    keys: list[str] = []
    properties: dict[str, Any] = {}
    style = rng.choice(("type", "type", "description", "description", "title"))
    for names, kind, text, _ in trade.arguments:
        options = [key for key in names if key not in keys]
        if options and rng.random() > 0.15:
            key = rng.choice(options)
        else:
            key = rng.choice([noun for noun in NOUNS if noun not in keys])
        keys.append(key)
        properties[key] = {"type": kind}
        if style == "description":
            properties[key]["description"] = text
        elif style == "title":
            properties[key] = {"title": " ".join(part.capitalize() for part in key.split("_")), "type": kind}
    strict = rng.random() < 0.2
    parameters = _parameters(rng, properties, keys, strict)
    description = trade.description
    if description.startswith("Get ") and rng.random() < 0.4:
        description = rng.choice(
            ("Look up", "Find", "Return", "Fetch", "Tell", "Show", "Provides")
        ) + description.removeprefix("Get")
    if rng.random() < 0.06:  # a Python function's signature
        listed = ", ".join(f"{key}: 'str'" for key in keys)
        description = f"{name}({listed}) -> 'str'\n{description}"
    function: dict[str, Any] = {
        "name": name,
        "description": description + rng.choice(("", "", ".")),
        "parameters": parameters,
    }
    if rng.random() < 0.06:
        del function["description"]
        function["name"] = rng.choice(trade.names)
    if strict and rng.random() < 0.6:
        function["strict"] = True
    return {"type": "function", "function": function}, keys


def call_message(calls: list[tuple[str, dict[str, Any]]], thought: str = "") -> dict[str, Any]:
    """An assistant message that calls tools."""
    listed = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": listed}


def _insert(template: str, values: list[Any], returned: dict[str, Any] | None = None) -> str:
    for at, value in enumerate(values):
        template = template.replace("{" + str(at) + "}", str(value))
    for key, value in (returned or {}).items():
        template = template.replace("{" + key + "}", str(value))
    return template


_WORLDLY = [trade for trade in TRADES if trade.names[0] not in ("get_weather", "get_time", "calculator", "search")]
"""Trades whose questions get the friendly refusal where no tool fits; the model has words of its own for the others."""


def _result(rng: Random, trade: Trade, values: list[Any]) -> tuple[str, str]:
    """What a tool returns, an object, a sentence or an error, and what to say of it."""
    returned = trade.returns(rng)
    sentence = _insert(trade.answer, values, returned)
    roll = rng.random()
    if roll < 0.12:  # many tools return words, which are the answer
        return sentence, sentence
    if roll < 0.4:
        said = _sentence(rng)
        return said, said
    if roll < 0.44:
        reason = rng.choice((phrase(rng), message(rng), "not found", "timeout"))
        return json.dumps({"error": reason}), f"The tool failed: {reason}."
    if rng.random() < 0.2:
        return json.dumps(returned, ensure_ascii=False, separators=(",", ":")), sentence
    return json.dumps(returned, ensure_ascii=False), sentence


def _sentence(rng: Random) -> str:
    """An unpredictable result of a tool, in one or two sentences."""
    plain = rng.choice(
        (
            f"It is {phrase(rng)}.", f"The {word(rng)} is {phrase(rng)}.", f"{phrase(rng)}: {message(rng)}.",
            f"{phrase(rng)} has {rng.randrange(1000)} {word(rng)}.", f"It is {phrase(rng)} in {city(rng)}.",
            f"{rng.randrange(100)} {word(rng)} in {city(rng)} and {message(rng)}.", message(rng), "",
        )
    )  # fmt: skip
    more = filled(rng, "{said}") if not plain or rng.random() < 0.5 else ""
    return f"{plain} {more}".strip() if rng.random() < 0.7 else f"{more} {plain}".strip()


def _asked(rng: Random, trade: Trade) -> tuple[str, list[Any]]:
    """A question for a tool of this trade, and the values that it names."""
    values = [draw(rng) for *_, draw in trade.arguments]
    question = polite(rng, casual(rng, _insert(rng.choice(trade.asks), values), " ".join(map(str, values))))
    if any(str(value) not in question for value in values):  # lower case took the spelling away: nothing to copy from
        question = _insert(rng.choice(trade.asks), values)
    return question, values


def _offered(rng: Random) -> list[tuple[Trade, dict[str, Any], list[str]]]:
    """Tools of different names, each with its declaration and the names of its arguments."""
    declared: list[tuple[Trade, dict[str, Any], list[str]]] = []
    for trade in rng.sample(TRADES, rng.choices((1, 2, 3, 4, 5), (5, 4, 3, 2, 1))[0]):
        roll = rng.random()
        trade = any_trade(rng) if roll < 0.35 else form_trade(rng) if roll < 0.6 else trade
        tool, keys = declare(rng, trade)
        if all(tool["function"]["name"] != other["function"]["name"] for _, other, _ in declared):
            declared.append((trade, tool, keys))
    return declared


def _without_a_tool(
    rng: Random, chat: Callable[[Random], tuple[str, str]], offered: list[Trade]
) -> tuple[str, str, str]:
    """A question that no tool on offer answers, its answer and the thought before it."""
    others = [trade for trade in _WORLDLY if trade not in offered]
    if rng.random() < 0.14 and not any(trade.names[0] == "search" for trade in offered):
        return _asked(rng, rng.choice(others))[0], NOT_TAUGHT, "No tool fits, and I was not taught this."
    return (*chat(rng), "No tool is needed here.")


def tool_conversation(
    rng: Random, chat: Callable[[Random], tuple[str, str]], system: Callable[[Random], str], thinking: bool
) -> Conversation:
    """A conversation with tools on offer. `chat` draws a question and its answer for which no tool is needed, and
    `system` a system prompt."""
    declared = _offered(rng)
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.35:
        text = rng.choice(("Use the tools.", "Call a tool if one fits.", "", "")) or system(rng)
        messages.append({"role": "system", "content": text})
    for _ in range(rng.choice((1, 1, 1, 2))):
        if rng.random() < 0.22:
            question, answer, thought = _without_a_tool(rng, chat, [trade for trade, *_ in declared])
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer, "reasoning_content": thought},
            ]
            continue
        trade, tool, keys = rng.choice(declared)
        name = tool["function"]["name"]
        question, values = _asked(rng, trade)
        calls = [(name, dict(zip(keys, values, strict=True)))]
        drawn = [values]
        if len(keys) == 1 and trade.arguments[0][3] is city and rng.random() < 0.2:
            other = city(rng)
            if other != values[0]:
                question = question.replace(str(values[0]), f"{values[0]} and {other}", 1)
                calls.append((name, {keys[0]: other}))
                drawn.append([other])
        messages.append({"role": "user", "content": question})
        messages.append(call_message(calls, f"The tool {name} can do this."))
        if rng.random() < 0.3:
            break
        sentences = []
        for each in drawn:
            returned, sentence = _result(rng, trade, each)
            messages.append({"role": "tool", "content": returned})
            sentences.append(sentence)
        messages.append(
            {"role": "assistant", "content": " ".join(sentences), "reasoning_content": "The tool has answered."}
        )
    return Conversation(messages, [tool for _, tool, _ in declared], thinking)
