"""Tool calls as Hunyuan 3 and 4 write them; the names of all tags have a suffix in most vocabularies,

<tool_calls:opensource>
<tool_call:opensource>get_weather<tool_sep:opensource>
<arg_key:opensource>city</arg_key:opensource>
<arg_value:opensource>Oslo</arg_value:opensource>
</tool_call:opensource>
</tool_calls:opensource>

Hunyuan 4 writes no ``tool_sep``.
"""

from __future__ import annotations

from app.parsers.text_reader import Reading
from app.parsers.tools.glm45 import Glm45Parser
from app.parsers.tools.lark import Rules, Schema

__all__ = ["HyV3Parser"]

_SUFFIXES = ("", ":opensource", ":6124c78e")
_NAMES = ("/tool_calls", "tool_call", "/tool_call", "tool_sep", "arg_key", "/arg_key", "arg_value", "/arg_value")


def _tags(*names: str) -> tuple[str, ...]:
    return tuple(Glm45Parser.suffixed(name, suffix) for name in names for suffix in _SUFFIXES)


class HyV3Parser(Glm45Parser):
    SUFFIXES = _SUFFIXES
    OPEN = _tags("tool_calls")
    MARKS = _tags(*_NAMES)
    BETWEEN = ""

    def block(self, mark: str) -> Reading[None]:
        self.suffix = next(suffix for suffix in reversed(self.SUFFIXES) if suffix in mark)
        call, end = self.tag("tool_call"), self.tag("/tool_calls")
        while (yield from self.expect(call, end)) == call:
            yield from super().block(mark)

    @classmethod
    def section(cls, rules: Rules) -> tuple[str, str]:
        tag = cls.tags_of(rules)
        return f"{tag('tool_calls')}\n", tag("/tool_calls")

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        tag = cls.tags_of(rules)
        separated = rules.is_token(tag("tool_sep")) or not rules.is_token(tag("arg_key"))
        begin = f"{tag('tool_call')}{name}{tag('tool_sep') if separated else ''}\n"
        return f"{rules.text(begin)} {cls.member_rules(schema, rules)} {rules.text(tag('/tool_call') + chr(10))}"
