"""Tool calls as Qwen3-Coder, Qwen3.5, Step-3.5, MiMo and Nemotron 3 write them: a tag for each parameter,

<tool_call>
<function=get_weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from app.parsers.text_reader import Reading
from app.parsers.tools.lark import Rules, Schema
from app.parsers.tools.parameters import ParameterParser, Value

__all__ = ["Qwen3CoderParser"]


class Qwen3CoderParser(ParameterParser):
    """Models at times leave out the outer tag."""

    OPEN = ("<tool_call>", "<function=")
    MARKS = ("</tool_call>", "</function>")
    NEWLINES = True

    def block(self, mark: str) -> Reading[None]:
        if mark != "<function=":
            yield from self.expect("<function=")
        name, _ = yield from self.name_until(">")
        yield from self.parameters_call(name, self._members_of_call)

    def _members_of_call(self) -> Reading[None]:
        while (yield from self.expect("<parameter=", *self.MARKS)) == "<parameter=":
            key, _ = yield from self.name_until(">")
            yield from self.parameter(key, "</parameter>")

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        begin, end = f"\n<function={name}>\n", "</function>\n</tool_call>"
        return f"{rules.text(begin)} {cls.member_rules(schema, rules)} {rules.text(end)}"

    @classmethod
    def member_rule(cls, key: str, value: Value, rules: Rules) -> str:
        begin = rules.text(f"<parameter={key}>\n")
        return f"{begin} {value.rule(rules, '</parameter>', before=chr(10))} {rules.text(chr(10))}"
