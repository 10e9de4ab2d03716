"""Tool calls as Apertus writes them: a list of objects with one member, whose name is the tool's,

<|tools_prefix|>[{"get_weather": {"city": "Oslo"}}]<|tools_suffix|>
"""

from __future__ import annotations

from app.parsers.base import StreamingParser
from app.parsers.text_reader import Reading

__all__ = ["ApertusParser"]


class ApertusParser(StreamingParser):
    """Calls may stand in a thought, whose end mark then follows them."""

    OPEN = ("<|tools_prefix|>",)
    MARKS = ("<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>")
    SECTION = ("<|tools_prefix|>[", "]<|tools_suffix|>")
    BETWEEN = '", "'

    def block(self, mark: str) -> Reading[None]:
        yield from self.symbol("[")
        while True:
            yield from self.symbol("{")
            name = yield from self.text_string()
            yield from self.symbol(":")
            yield from self.named_call(name)
            yield from self.symbol("}")
            if (yield from self.symbol(",", "]")) == "]":
                return

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'{{"{name}": ', "}"
