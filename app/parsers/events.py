"""What the text of a choice says, in its order: the events that parsers make and all APIs write."""

from __future__ import annotations

import msgspec

__all__ = ["CallArguments", "CallBegun", "Piece", "Reasoning", "Text"]


class Text(msgspec.Struct, gc=False):
    """A piece of the answer's content."""

    text: str


class Reasoning(msgspec.Struct, gc=False):
    """A piece of the thought."""

    text: str


class CallBegun(msgspec.Struct, gc=False):
    """A tool call begins. ``index``: its position among the calls of the choice."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, gc=False):
    """A piece of a call's arguments; joined, all of a call's pieces are a JSON object, unless the answer is cut."""

    index: int
    text: str


Piece = Text | Reasoning | CallBegun | CallArguments
