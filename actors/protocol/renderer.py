"""The renderer turns conversations into text, in a child process of its own."""

from __future__ import annotations

import msgspec

from actors.protocol.requests import Chat
from actors.runtime import Message

__all__ = [
    "Render",
    "RendererConfig",
    "RendererProtocol",
]


class RendererProtocol:
    """Turns conversations into text, by templates that need not be trusted."""


class Render(Message[RendererProtocol, str], frozen=True):
    """A conversation as the text that is encoded. Raises InvalidRequest when the template refuses it."""

    chat: Chat


class RendererConfig(msgspec.Struct, frozen=True):
    """What a renderer is started with. ``template``: the model's, for conversations that bring none of their own."""

    template: str
    variables: dict[str, str]  # special tokens by the names that templates know them by
    processor_seconds: float  # of one rendering, after which the process ends
    memory: int  # bytes of the process's own data
    faults: str = ""  # a test's plan of faults; see actors.faults
