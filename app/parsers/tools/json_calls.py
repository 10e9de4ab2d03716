"""Tool calls as bare JSON, one call or a list of them, which begin the answer:

[{"name": "get_weather", "arguments": {"city": "Oslo"}}]
"""

from __future__ import annotations

from app.parsers.base import StreamingParser
from app.parsers.text_reader import Reading

__all__ = ["JsonParser"]


class JsonParser(StreamingParser):
    SECTION = ("[", "]")
    BETWEEN = '", "'
    STARTS = "[{"

    def at_start(self) -> Reading[None]:
        yield from self.json_calls()

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'{{"name": "{name}", "arguments": ', "}"
