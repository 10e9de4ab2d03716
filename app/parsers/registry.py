"""The formats of tool calls by the names of ``--tool-call-parser``."""

from __future__ import annotations

from collections.abc import Mapping

from app.parsers.base import StreamingParser
from app.parsers.tools.hermes import HermesParser

__all__ = ["OFF", "TOOL_PARSERS", "tool_parser"]

OFF = "off"
TOOL_PARSERS: Mapping[str, type[StreamingParser]] = {"hermes": HermesParser}
_DEFAULT = "hermes"


def tool_parser(name: str | None) -> type[StreamingParser] | None:
    """The parser of this name; the default for None, and None for ``off``."""
    return None if name == OFF else TOOL_PARSERS[name or _DEFAULT]
