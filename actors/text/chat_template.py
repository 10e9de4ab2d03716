"""Chat templates: Jinja text of a checkpoint, the command line or (if allowed) a request, in a sandbox.

The sandbox gives a template access to its variables only. It cannot prevent endless loops or unbounded memory, which
are possible even during compilation (Jinja evaluates constant expressions). So compile and render in
:mod:`actors.text.renderer`.
"""

from __future__ import annotations

import datetime
import re
from typing import Any

import jinja2
import msgspec
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from actors.protocol.requests import Chat, InvalidRequest

__all__ = ["RESERVED_NAMES", "ChatTemplate", "check_template"]

RESERVED_NAMES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now", "self"}
)
"""Names that ``chat_template_kwargs`` may not set, in addition to special tokens. Jinja reserves ``self``."""

_MAX_OUTPUT_CHARS = 12 << 20
"""At four bytes each, still less than the frame limit between two processes."""

_MAX_SOURCE_CHARS = 1 << 20

_NULL_CONTENT = re.compile(r"content['\"\]]* is (not )?none", re.IGNORECASE)
"""In templates that render the calls of a message only if its content is null."""

_THINKING = re.compile(r"(\.|\[['\"])thinking\b")
"""In templates that read a message's thought under gpt-oss's name for it."""

_JOINED_DESCRIPTION = re.compile(r"\+\s*[\w.\[\]'\"]+(\.|\[['\"])description\b")
"""In templates that join a tool's description to text, which fails without one (DeepSeek)."""

_MAX_REFUSAL_CHARS = 512
"""Most characters of a template's own error message that are reported; a template may compute any length."""


class _TemplateRefused(Exception):
    """The template called raise_exception because the conversation does not fit it."""


def _raise_exception(message: object) -> None:
    text = message if isinstance(message, str) else type(message).__name__
    raise _TemplateRefused(_short(text))


def _short(text: str) -> str:
    return text if len(text) <= _MAX_REFUSAL_CHARS else f"{text[:_MAX_REFUSAL_CHARS]} ..."


def _strftime_now(format_: str) -> str:
    return datetime.datetime.now().strftime(format_)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    # Unlike Jinja's own filter this does not escape HTML: models were trained on plain JSON.
    del ensure_ascii
    text = msgspec.json.encode(value).decode()
    if indent is None:
        return _spaced(text)
    return msgspec.json.format(text, indent=indent)


def _spaced(compact: str) -> str:
    """``json.dumps``' default separators (", " and ": "), which the models saw in training."""
    out: list[str] = []
    in_string = escaped = False
    for char in compact:
        out.append(char)
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in ",:":
            out.append(" ")
    return "".join(out)


class _CallArguments(dict[str, Any]):
    """An object that a template may also join to text, which gives its JSON."""

    def __str__(self) -> str:
        return _tojson(self)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def _suited(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return call | {"function": function | {"arguments": _CallArguments(function["arguments"])}}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def check_template(source: str) -> None:
    """Raise ValueError if the template is not valid Jinja. The template is only parsed, not evaluated."""
    if len(source) > _MAX_SOURCE_CHARS:
        raise ValueError(f"The chat template has {len(source)} characters; at most {_MAX_SOURCE_CHARS} are allowed.")
    try:
        _environment().parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"The chat template does not compile: line {error.lineno}: {_short(error.message or '')}"
        ) from error
    except RecursionError as error:
        raise ValueError("The chat template does not compile: it is nested too deeply.") from error


class ChatTemplate:
    """A compiled chat template.

    ``variables``: special tokens by name (``bos_token``, ``eos_token`` ...). Raises ValueError if the template does not
    compile.
    """

    def __init__(self, source: str, variables: dict[str, str]) -> None:
        check_template(source)
        try:
            self._template = _environment().from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # constant expressions may raise any exception
            raise ValueError(f"The chat template does not compile: {type(error).__name__}.") from error
        self._variables = variables
        self._null_content = _NULL_CONTENT.search(source) is not None
        self._joins_description = _JOINED_DESCRIPTION.search(source) is not None
        self._thinking = _THINKING.search(source) is not None

    def render(self, chat: Chat) -> str:
        """The prompt as text. Raises InvalidRequest if the template refuses the conversation, and MemoryError."""
        reserved = (RESERVED_NAMES | self._variables.keys()).intersection(chat.template_kwargs)
        if reserved:
            name = min(reserved)
            raise InvalidRequest(
                f"chat_template_kwargs may not set {name!r}: the server sets it. Leave it out.",
                param=f"chat_template_kwargs.{name}",
            )
        final_text: str | None = None
        if chat.continue_final_message:
            final_text = self._final_text(chat)
        try:
            pieces: list[str] = []
            length = 0
            for piece in self._template.generate(
                **self._variables,
                **chat.template_kwargs,
                messages=self._messages(chat.messages),
                tools=self._tools(chat.tools),
                add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
            ):
                length += len(piece)
                if length > _MAX_OUTPUT_CHARS:
                    raise InvalidRequest(
                        f"messages render to more than {_MAX_OUTPUT_CHARS} characters. Shorten them.", param="messages"
                    )
                pieces.append(piece)
        except _TemplateRefused as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from None
        except (InvalidRequest, MemoryError):
            raise
        except Exception as error:  # a template may call methods of Python's built-in types
            raise InvalidRequest(
                f"The model's chat template cannot render these messages ({type(error).__name__}). "
                "Check roles and content types.",
                param="messages",
            ) from error
        text = "".join(pieces)
        if final_text is not None:
            end = text.rfind(final_text)
            if end < 0:
                raise InvalidRequest(
                    "continue_final_message: the chat template changes the final message, so it cannot be continued.",
                    param="continue_final_message",
                )
            text = text[: end + len(final_text)]
        return text

    def _tools(self, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        if tools is None or not self._joins_description:
            return tools
        return [tool | {"function": {"description": ""} | tool["function"]} for tool in tools]

    def _messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages whose tool calls suit templates that expect the arguments as an object, and those that expect text.

        A message with calls and without text has null content if the template asks for it. gpt-oss's template takes a
        thought as ``thinking``, and with calls no text beside it: both come before the call.
        """
        suited: list[dict[str, Any]] = []
        for message in messages:
            calls = message.get("tool_calls")
            thought = message.get("reasoning_content")
            if self._thinking and thought:
                message = message | {"thinking": thought}
                if calls and message.get("content"):
                    message |= {"thinking": f"{thought}\n{message['content']}", "content": ""}
            if calls:
                message = message | {"tool_calls": [_suited(call) for call in calls]}
                if self._null_content and not message.get("content"):
                    message["content"] = None
            suited.append(message)
        return suited

    @staticmethod
    def _final_text(chat: Chat) -> str:
        content = chat.messages[-1].get("content") if chat.messages else None
        if not isinstance(content, str) or not content.strip():
            raise InvalidRequest(
                "continue_final_message needs a final message whose content is text.", param="continue_final_message"
            )
        return content.strip()
