"""Tool calls as Hermes, Qwen2.5, Qwen3 and Granite 4 write them: a block of JSON for each call,

<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

from app.parsers.base import StreamingParser
from app.parsers.text_reader import Reading

__all__ = ["HermesParser"]


class HermesParser(StreamingParser):
    OPEN = ("<tool_call>",)
    MARKS = ("</tool_call>",)

    def block(self, mark: str) -> Reading[None]:
        yield from self.json_calls()

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'\n{{"name": "{name}", "arguments": ', "}\n</tool_call>"
