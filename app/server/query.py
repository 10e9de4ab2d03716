"""Values behind the ``?`` of a path. Wrong ones raise 400."""

from __future__ import annotations

from quart import request

from app.server.errors import invalid

__all__ = ["choice", "number", "word"]

_MAX_CHARS = 512


def word(name: str) -> str | None:
    """A text; None if it is absent or empty."""
    text = request.args.get(name) or None
    if text is not None and len(text) > _MAX_CHARS:
        raise invalid(f"{name}: at most {_MAX_CHARS} characters. Shorten it.", param=name)
    return text


def choice(name: str, choices: tuple[str, ...]) -> str:
    """One of the choices; the first is the default."""
    text = word(name)
    if text is None:
        return choices[0]
    if text not in choices:
        raise invalid(f"{name}: must be one of {', '.join(choices)}, not {text[:64]!r}.", param=name)
    return text


def number(name: str, default: int, least: int, most: int) -> int:
    """A whole number."""
    text = word(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or not least <= int(text[:12]) <= most:
        raise invalid(f"{name}: must be a whole number from {least} to {most}, not {text[:64]!r}.", param=name)
    return int(text)
