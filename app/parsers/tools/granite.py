"""Tool calls as Granite 3 writes them: a mark and a list of JSON,

<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]
"""

from __future__ import annotations

from typing import ClassVar

from app.parsers.base import StreamingParser
from app.parsers.text_reader import Reading

__all__ = ["Granite20bParser", "GraniteParser"]


class GraniteParser(StreamingParser):
    """Granite 3.0 writes ``<|tool_call|>``, later ones ``<tool_call>``."""

    OPEN: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<tool_call>")
    MARKS: ClassVar[tuple[str, ...]] = ("</tool_call>",)
    SECTION = ("<|tool_call|>[", "]")
    BETWEEN = '", "'

    def block(self, mark: str) -> Reading[None]:
        yield from self.json_calls()

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'{{"name": "{name}", "arguments": ', "}"


class Granite20bParser(GraniteParser):
    """Granite-20B-FunctionCalling writes a mark before each call."""

    OPEN = ("<function_call>",)
    MARKS = ()
    SECTION = ("", "")
    BETWEEN = '"\\n"?'

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f' {{"name": "{name}", "arguments": ', "}"
