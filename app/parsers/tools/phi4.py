"""Tool calls as Phi-4-mini writes them: a list of JSON,

<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>

or after the word ``functools``.
"""

from __future__ import annotations

from app.parsers.base import StreamingParser
from app.parsers.text_reader import Reading

__all__ = ["Phi4Parser"]


class Phi4Parser(StreamingParser):
    OPEN = ("<|tool_call|>", "functools[")
    MARKS = ("<|/tool_call|>",)
    SECTION = ("<|tool_call|>[", "]<|/tool_call|>")
    BETWEEN = '", "'

    def block(self, mark: str) -> Reading[None]:
        if mark == "functools[":
            self.put_back("[")
        yield from self.json_calls()

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'{{"name": "{name}", "arguments": ', "}"
