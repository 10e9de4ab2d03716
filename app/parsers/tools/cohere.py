"""Tool calls as Cohere's Command models (R7B, A and later) write them:

<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}}
]<|END_ACTION|>

Text is between ``<|START_RESPONSE|>`` (or ``<|START_TEXT|>``) and its end mark.
"""

from __future__ import annotations

from app.parsers.base import StreamingParser
from app.parsers.text_reader import Reading
from app.parsers.tools.lark import Rules, Schema

__all__ = ["CohereParser"]


class CohereParser(StreamingParser):
    OPEN = ("<|START_ACTION|>",)
    TEXT_MARKS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    MARKS = ("<|END_ACTION|>", *TEXT_MARKS)
    SECTION = ("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>")
    BETWEEN = '",\\n    "'

    def block(self, mark: str) -> Reading[None]:
        yield from self.json_calls("tool_name")

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        arguments = rules.json(schema or {"type": "object"})
        named = rules.text(f'", "tool_name": "{name}", "parameters": ')
        return f'"{{\\"tool_call_id\\": \\"" /[0-9]{{1,3}}/ {named} {arguments} "}}"'
