"""Tool calls as GigaChat 3 writes them: a message of another role, or a mark in the answer, and JSON,

function call<|role_sep|>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
"""

from __future__ import annotations

from app.parsers.base import StreamingParser
from app.parsers.text_reader import Reading

__all__ = ["GigaChat3Parser"]


class GigaChat3Parser(StreamingParser):
    OPEN = ("function call<|role_sep|>", "<|function_call|>")
    MARKS = ("<|message_sep|>",)
    TOKENS = ("<|role_sep|>",)

    def block(self, mark: str) -> Reading[None]:
        yield from self.json_calls()

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'\n{{"name": "{name}", "arguments": ', "}"
