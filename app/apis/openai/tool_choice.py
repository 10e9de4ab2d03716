"""``tool_choice``: which tools an answer may or must call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.apis.conversations import NO_TOOLS, Mode, ToolChoice
from app.apis.openai.requests import ChatRequest
from app.server.errors import invalid

__all__ = ["tool_choice_of"]


def tool_choice_of(body: ChatRequest) -> ToolChoice:
    """The choice that a body makes. Raises 400."""
    given = body.tool_choice
    mode: Mode
    tools = {tool.function.name: tool for tool in body.tools or ()}
    if given in (None, "none") or not tools:
        if given not in (None, "none"):
            raise invalid("tool_choice: needs tools beside it.", param="tool_choice")
        names, mode = list(tools), "auto" if tools and given is None else "none"
    elif isinstance(given, str):
        if given not in ("auto", "required", "any"):
            raise invalid(
                f"tool_choice: must be auto, none, required, or an object that names a function, not {given[:64]!r}.",
                param="tool_choice",
            )
        names, mode = list(tools), "auto" if given == "auto" else "required"
    else:
        names, mode = _object(given or {}, set(tools))
    if mode == "none":
        return NO_TOOLS
    return ToolChoice(
        mode,
        {name: tools[name].function.parameters or {} for name in names},
        any(tools[name].function.strict for name in names),
    )


def _object(given: dict[str, Any], known: set[str]) -> tuple[list[str], Mode]:
    kind = given.get("type")
    if kind == "function":
        [name] = _names([given], "tool_choice", known)
        return [name], "named"
    if kind == "allowed_tools":
        inner = given.get("allowed_tools", given)
        where = "tool_choice.allowed_tools"
        if not isinstance(inner, dict) or not isinstance(inner.get("tools"), list) or not inner["tools"]:
            raise invalid(f"{where}: must be an object with a mode and a list of tools.", param=where)
        mode: Mode
        match inner.get("mode", "auto"):
            case "auto":
                mode = "auto"
            case "required":
                mode = "required"
            case _:
                raise invalid(f"{where}.mode: must be auto or required.", param=f"{where}.mode")
        names = list(_names(inner["tools"], f"{where}.tools", known))
        return list(dict.fromkeys(names)), mode
    raise invalid("tool_choice.type: must be function or allowed_tools.", param="tool_choice.type")


def _names(given: list[Any], where: str, known: set[str]) -> Iterator[str]:
    for index, each in enumerate(given):
        at = where if where == "tool_choice" else f"{where}[{index}]"
        function = each.get("function", each) if isinstance(each, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise invalid(f"{at}.function.name: this field is required.", param=f"{at}.function.name")
        if name not in known:
            raise invalid(
                f"{at}.function.name: {name[:64]!r} is none of the request's tools.", param=f"{at}.function.name"
            )
        yield name
