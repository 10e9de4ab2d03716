"""Tool calls as MiniMax M1 writes them: one object of JSON a line,

<tool_calls>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_calls>

Hunyuan-A13B and Jamba write one list of JSON between these tags.
"""

from __future__ import annotations

from app.parsers.base import StreamingParser
from app.parsers.text_reader import Reading

__all__ = ["HunyuanA13bParser", "MiniMaxM1Parser"]


class MiniMaxM1Parser(StreamingParser):
    OPEN = ("<tool_calls>",)
    MARKS = ("</tool_calls>",)
    SECTION = ("<tool_calls>\n", "\n</tool_calls>")
    BETWEEN = '"\\n"'

    def block(self, mark: str) -> Reading[None]:
        (end,) = self.MARKS
        yield from self.space()
        while not (yield from self.skip(end)):
            yield from self.json_calls()
            yield from self.space()

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'{{"name": "{name}", "arguments": ', "}"


class HunyuanA13bParser(MiniMaxM1Parser):
    SECTION = ("<tool_calls>[", "]</tool_calls>")
    BETWEEN = '", "'
