"""Tool calls as GLM-4.5, 4.6 and 4.7 write them: the name, then pairs of keys and values,

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Oslo</arg_value>
</tool_call>

GLM-4.7 writes no newlines.
"""

from __future__ import annotations

from app.parsers.text_reader import Reading
from app.parsers.tools.lark import Rules, Schema
from app.parsers.tools.parameters import ParameterParser, Value

__all__ = ["Glm45Parser"]


class Glm45Parser(ParameterParser):
    OPEN = ("<tool_call>",)
    MARKS = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def block(self, mark: str) -> Reading[None]:
        yield from self.space()
        name, end = yield from self.name_until("\n", "<arg_key>", "</tool_call>")
        self.put_back(end)
        yield from self.parameters_call(name, self._members_of_call)

    def _members_of_call(self) -> Reading[None]:
        while (yield from self.expect("<arg_key>", "</tool_call>")) == "<arg_key>":
            key, _ = yield from self.name_until("</arg_key>")
            yield from self.expect("<arg_value>")
            yield from self.parameter(key, "</arg_value>")

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        members = cls.member_rules(schema, rules)
        return f"{rules.text(name + chr(10))} {members} {rules.text('</tool_call>')}"

    @classmethod
    def member_rule(cls, key: str, value: Value, rules: Rules) -> str:
        begin = rules.text(f"<arg_key>{key}</arg_key>\n<arg_value>")
        return f"{begin} {value.rule(rules, '</arg_value>')} {rules.text(chr(10))}"
