"""Tool calls as Kimi K2 writes them: an id that contains the name, and JSON,

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

import re

from app.parsers.base import StreamingParser
from app.parsers.text_reader import ParseError, Reading
from app.parsers.tools.lark import Rules, Schema

__all__ = ["KimiK2Parser"]

_ID = re.compile(r"(?:functions\.)?([\w.-]+?)(?::(\d+))?", re.ASCII)


class KimiK2Parser(StreamingParser):
    OPEN = ("<|tool_call_begin|>",)
    MARKS = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    )
    SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

    def block(self, mark: str) -> Reading[None]:
        written, _ = yield from self.name_until("<|tool_call_argument_begin|>")
        identity = _ID.fullmatch(written.strip())
        if identity is None:
            raise ParseError("its id has no name")
        yield from self.named_call(identity[1], written.strip() if identity[2] else None)

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        begin, end = rules.text(f"<|tool_call_begin|>functions.{name}:"), rules.text("<|tool_call_end|>")
        arguments = rules.json(schema or {"type": "object"})
        return f"{begin} /[0-9]{{1,3}}/ {rules.text('<|tool_call_argument_begin|>')} {arguments} {end}"

    @classmethod
    def new_id(cls, name: str, number: int) -> str:
        return f"functions.{name}:{number}"

    @classmethod
    def history_id(cls, given: str | None, name: str, number: int) -> str:
        if given is not None and (identity := _ID.fullmatch(given)) and identity[2]:
            return given
        return f"functions.{name}:{number}"
