"""Tool calls as Cohere's Command models (R7B, A and later) write them:

<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}}
]<|END_ACTION|>

Text is between ``<|START_RESPONSE|>`` (or ``<|START_TEXT|>``) and its end mark.
"""

from __future__ import annotations

from app.parsers.base import Reading, StreamingParser

__all__ = ["CohereParser"]


class CohereParser(StreamingParser):
    OPEN = ("<|START_ACTION|>",)
    MARKS = ("<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")

    def block(self, mark: str) -> Reading[None]:
        yield from self.json_calls("tool_name")
