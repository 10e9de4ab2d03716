"""The grammar of an answer that must call tools, or whose calls must match their schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from actors.protocol.requests import Grammar
from app.apis.openai.tool_schemas import closed, without_nulls
from app.parsers.base import StreamingParser
from app.parsers.tools.constraints import AnswerForm, ToolConstraint, forced_calls, native_calls, strict_calls
from app.parsers.tools.lark import Unenforceable
from app.parsers.tools.passthrough import PassthroughParser
from app.server.errors import ApiError, invalid
from app.server.service import Service

__all__ = ["NO_TOOLS", "Mode", "ToolChoice", "tool_constraint"]

Mode = Literal["none", "auto", "required", "named"]


class ToolChoice(msgspec.Struct, frozen=True):
    """``tools``: parameters of the tools that may be called, by name. ``mode``: whether one must be called; ``named``:
    exactly that one. ``strict``: whether a tool asks that its calls match its schema."""

    mode: Mode
    tools: dict[str, dict[str, Any]]
    strict: bool = False

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")


NO_TOOLS = ToolChoice("none", {})

_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,16}"


async def tool_constraint(
    service: Service,
    choice: ToolChoice,
    given: Grammar | None,
    names: Mapping[str, str],
    *,
    parallel: bool,
) -> ToolConstraint | None:
    """What the choice of tools adds to a request; None if nothing.

    A forced call replaces the ``given`` form, which is the content's. Where none is forced, the answer is either calls
    or in that form. ``names``: of the request's fields. Raises 400 where this cannot be enforced.
    """
    backend, form = service.arguments.grammar_backend, service.output_format.tools
    tools = {name: closed(without_nulls(tool)) for name, tool in choice.tools.items()}
    choice = msgspec.structs.replace(choice, tools=tools)
    if form is None or form is PassthroughParser:
        form = None
    if choice.forced:
        named = choice.mode == "named"
        if form is not None and backend not in ("xgrammar", "none"):
            tokens = await _tokens(service, form)
            try:
                return native_calls(form, choice.tools, tokens, forced=True, single=named or not parallel)
            except Unenforceable:  # JSON is always possible
                pass
        calls = forced_calls(choice.tools, named=named, parallel=parallel)
        # xgrammar takes no pattern of white space.
        return msgspec.structs.replace(calls, whitespace=None) if backend == "xgrammar" else calls
    if not choice.tools or not (choice.strict or (given is not None and form is not None)):
        return None
    try:
        return await _auto(service, choice, given, form, single=not parallel)
    except Unenforceable as error:
        raise _refused(str(error), choice, names.get("grammar", "grammar") if given is not None else None) from None


async def _auto(
    service: Service, choice: ToolChoice, given: Grammar | None, form: type[StreamingParser] | None, *, single: bool
) -> ToolConstraint | None:
    backend = service.arguments.grammar_backend
    if form is None:
        raise Unenforceable("this server reads no tool calls (--tool-call-parser)")
    if backend == "none":
        raise Unenforceable("the server runs with --grammar-backend none")
    if backend == "xgrammar":
        if given is not None:
            raise Unenforceable("one grammar of both needs --grammar-backend llguidance")
        return strict_calls(form, choice.tools)
    other = None if given is None else AnswerForm(given.kind, given.text, _whitespace(service, given))
    return native_calls(form, choice.tools, await _tokens(service, form), forced=False, single=single, other=other)


async def _tokens(service: Service, form: type[StreamingParser]) -> dict[str, int | None]:
    return {mark: await service.mark_token(mark) for mark in (*form.OPEN, *form.MARKS, *form.TOKENS)}


def _whitespace(service: Service, given: Grammar) -> str:
    arguments = service.arguments
    if given.whitespace is not None:
        return given.whitespace
    if arguments.constrained_json_whitespace_pattern is not None:
        return arguments.constrained_json_whitespace_pattern
    return "" if arguments.constrained_json_disable_any_whitespace else _WHITESPACE


def _refused(reason: str, choice: ToolChoice, field: str | None) -> ApiError:
    if field is not None:
        text = f"{field}: cannot be enforced beside tools here: {reason}. Leave one out, or set tool_choice."
    else:
        text = f"tools: strict cannot be enforced here: {reason}. Leave strict out, or force a call with tool_choice."
    return invalid(text, param=field or "tools", code="unsupported_parameter")
