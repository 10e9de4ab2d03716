"""Chat templates: Jinja text of a checkpoint, the command line or (where that is allowed) a request, in a sandbox.

The sandbox keeps a template from everything but its variables. It cannot keep it from looping or from filling the
memory, also while it is compiled (Jinja computes constant expressions then): :mod:`actors.renderer` is the place to do
both.
"""

from __future__ import annotations

import datetime
from typing import Any

import jinja2
import msgspec
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from actors.requests import Chat, InvalidRequest

__all__ = ["RESERVED_NAMES", "ChatTemplate", "check_template"]

RESERVED_NAMES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now", "self"}
)
"""Names that ``chat_template_kwargs`` may not set, beside those of special tokens. ``self`` is Jinja's."""

_MAX_OUTPUT_CHARS = 12 << 20
"""Four bytes each are still less than a frame between two processes may have."""

_MAX_SOURCE_CHARS = 1 << 20

_MAX_REFUSAL_CHARS = 512
"""Of what a template says when it refuses: it becomes an error's message, and a template may compute any length."""


class _TemplateRefused(Exception):
    """The template called raise_exception: the conversation does not fit it."""


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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def check_template(source: str) -> None:
    """Raise ValueError when the template is not Jinja. Nothing of it is evaluated."""
    if len(source) > _MAX_SOURCE_CHARS:
        raise ValueError(f"The chat template has {len(source)} characters; at most {_MAX_SOURCE_CHARS} are read.")
    try:
        _environment().parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"The chat template does not compile: line {error.lineno}: {_short(error.message or '')}"
        ) from error
    except RecursionError as error:
        raise ValueError("The chat template does not compile: it is nested too deep.") from error


class ChatTemplate:
    """A compiled chat template.

    ``variables`` are the names a template may use for special tokens (``bos_token``, ``eos_token`` ...).
    Raises ``ValueError`` when the template does not compile.
    """

    def __init__(self, source: str, variables: dict[str, str]) -> None:
        check_template(source)
        try:
            self._template = _environment().from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # what it computes of constants may raise anything
            raise ValueError(f"The chat template does not compile: {type(error).__name__}.") from error
        self._variables = variables

    def render(self, chat: Chat) -> str:
        """The prompt's text. Raises InvalidRequest when the template refuses the conversation, and MemoryError."""
        reserved = (RESERVED_NAMES | self._variables.keys()).intersection(chat.template_kwargs)
        if reserved:
            name = min(reserved)
            raise InvalidRequest(
                f"chat_template_kwargs may not set {name!r}: it is the server's own. Leave it out.",
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
                messages=chat.messages,
                tools=chat.tools,
                add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
            ):
                length += len(piece)
                if length > _MAX_OUTPUT_CHARS:
                    raise InvalidRequest(
                        f"messages render to more than {_MAX_OUTPUT_CHARS} characters. Send less.", param="messages"
                    )
                pieces.append(piece)
        except _TemplateRefused as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from None
        except (InvalidRequest, MemoryError):
            raise
        except Exception as error:  # a template may do anything that Python's own types can
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

    @staticmethod
    def _final_text(chat: Chat) -> str:
        content = chat.messages[-1].get("content") if chat.messages else None
        if not isinstance(content, str) or not content.strip():
            raise InvalidRequest(
                "continue_final_message needs a final message whose content is text.", param="continue_final_message"
            )
        return content.strip()
