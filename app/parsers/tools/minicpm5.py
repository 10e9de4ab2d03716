"""Tool calls as MiniCPM5 writes them; a value may be a CDATA section:

<function name="get_weather"><param name="city">Oslo</param></function>
"""

from __future__ import annotations

from app.parsers.text_reader import Reading
from app.parsers.tools.lark import Rules, Schema
from app.parsers.tools.parameters import ParameterParser, Value

__all__ = ["MiniCpm5Parser"]

_PARAM = '<param name="'


class MiniCpm5Parser(ParameterParser):
    OPEN = ('<function name="',)
    MARKS = ("</function>",)
    TOKENS = ("<function", "<param", "</param>")
    AROUND = ("<![CDATA[", "]]>")

    def block(self, mark: str) -> Reading[None]:
        name, _ = yield from self.name_until('">')
        yield from self.parameters_call(name, self._members_of_call)

    def _members_of_call(self) -> Reading[None]:
        while (yield from self.expect(_PARAM, self.MARKS[0])) == _PARAM:
            key, _ = yield from self.name_until('">')
            yield from self.parameter(key, "</param>")

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        return f"{rules.text(name + chr(34) + '>')} {cls.member_rules(schema, rules)} {rules.text('</function>')}"

    @classmethod
    def member_rule(cls, key: str, value: Value, rules: Rules) -> str:
        return f"{rules.text(f'{_PARAM}{key}{chr(34)}>')} {value.rule(rules, '</param>')}"
