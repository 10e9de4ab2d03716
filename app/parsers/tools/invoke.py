"""Tool calls in ``invoke`` tags, as MiniMax-M2, DeepSeek-V3.2 and V4, and Step-3 write them. The families differ in the
tags around them and in a prefix of the tags:

<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Oslo</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from typing import ClassVar

from app.parsers.text_reader import ParseError, Reading
from app.parsers.tools.lark import Rules, Schema
from app.parsers.tools.parameters import ParameterParser, Value

__all__ = ["InvokeParser"]


class InvokeParser(ParameterParser):
    """``PREFIX``: of the names of tags. ``OPEN`` and ``CLOSE`` are the tags
    around all calls."""

    PREFIX: ClassVar[str] = ""
    CLOSE: ClassVar[str] = ""

    def block(self, mark: str) -> Reading[None]:
        invoke = f'<{self.PREFIX}invoke name="'
        while (yield from self.expect(invoke, self.CLOSE)) == invoke:
            name, _ = yield from self.name_until('">')
            yield from self.parameters_call(name, self._members_of_call)

    def _members_of_call(self) -> Reading[None]:
        parameter, end = f'<{self.PREFIX}parameter name="', f"</{self.PREFIX}parameter>"
        while (yield from self.expect(parameter, f"</{self.PREFIX}invoke>")) == parameter:
            key, mark = yield from self.name_until('" string="', '">')
            text: bool | None = None
            if mark != '">':  # DeepSeek says in the tag whether a value is text or JSON
                is_string, _ = yield from self.name_until('">')
                if is_string not in ("true", "false"):
                    raise ParseError(f"string is {is_string[:16]!r}")
                text = is_string == "true"
            yield from self.parameter(key, end, text=text)

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        begin, end = f'<{cls.PREFIX}invoke name="{name}">\n', f"</{cls.PREFIX}invoke>\n"
        return f"{rules.text(begin)} {cls.member_rules(schema, rules)} {rules.text(end)}"

    @classmethod
    def member_rule(cls, key: str, value: Value, rules: Rules) -> str:
        attribute = f' string="{str(value.text).lower()}"' if cls.TYPED else ""
        begin = rules.text(f'<{cls.PREFIX}parameter name="{key}"{attribute}>')
        return f"{begin} {value.rule(rules, f'</{cls.PREFIX}parameter>')} {rules.text(chr(10))}"
