"""Tool calls as InternLM 2 and Intern-S1 write them:

<|action_start|><|plugin|>
{"name": "get_weather", "parameters": {"city": "Oslo"}}<|action_end|>
"""

from __future__ import annotations

from app.parsers.base import StreamingParser
from app.parsers.text_reader import Reading

__all__ = ["InternLMParser"]


class InternLMParser(StreamingParser):
    OPEN = ("<|action_start|>",)
    MARKS = ("<|plugin|>", "<|action_end|>")

    def block(self, mark: str) -> Reading[None]:
        yield from self.space()
        yield from self.skip("<|plugin|>")
        yield from self.json_calls()

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'<|plugin|>\n{{"name": "{name}", "parameters": ', "}<|action_end|>"
