"""Values after the ``?`` of a path. Wrong ones raise 400."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from quart import request

from app.server.errors import invalid

__all__ = ["choice", "number", "page", "word"]

One = TypeVar("One")

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


def number(name: str, default: int, minimum: int, maximum: int) -> int:
    """A whole number."""
    text = word(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or not minimum <= int(text[:12]) <= maximum:
        raise invalid(f"{name}: must be a whole number from {minimum} to {maximum}, not {text[:64]!r}.", param=name)
    return int(text)


def page(newest_first: list[One], name: Callable[[One], str], *, maximum: int, default: int) -> tuple[list[One], bool]:
    """The part of a list that ``after``, ``limit`` and ``order`` ask for, and whether there is more after it.

    ``name``: the id of a member. ``maximum`` and ``default``: of the limit.
    """
    after, limit = word("after"), number("limit", default, 1, maximum)
    result = newest_first if choice("order", ("desc", "asc")) == "desc" else newest_first[::-1]
    if after is not None:
        place = next((place for place, one in enumerate(result) if name(one) == after), None)
        if place is None:
            raise invalid(f"after: there is no {after[:64]!r} in this list.", param="after")
        result = result[place + 1 :]
    return result[:limit], len(result) > limit
