"""A question of the test set, and readers of the JSON and of the calls in an answer."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Question", "calls_of", "object_of", "tool"]


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation to continue, and whether the text that continues it is right."""

    subject: str
    messages: list[dict[str, Any]]
    right: Callable[[str], bool]
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = False


def object_of(text: str) -> dict[str, Any] | None:
    """The text as a JSON object; None if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def calls_of(text: str) -> list[dict[str, Any] | None]:
    """The calls in an answer, in order; None for a broken one."""
    return [object_of(block) for block in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)]


def tool(name: str, description: str, **arguments: str) -> dict[str, Any]:
    """A tool in OpenAI's form; `arguments` are the types of its arguments, all of them required."""
    properties = {key: {"type": kind} for key, kind in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
