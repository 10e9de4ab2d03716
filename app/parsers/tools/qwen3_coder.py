"""Tool calls as Qwen3-Coder, Qwen3.5, Step-3.5, MiMo and Nemotron 3 write them: a tag for each parameter,

<tool_call>
<function=get_weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>

Seed-OSS writes other outer tags, and no newlines around values.
"""

from __future__ import annotations

from typing import ClassVar

from app.parsers.text_reader import Reading
from app.parsers.tools.lark import Rules, Schema
from app.parsers.tools.parameters import ParameterParser, Value, is_json
from app.parsers.tools.pythonic import literal_json

__all__ = ["Qwen3CoderParser", "SeedOssParser"]


class Qwen3CoderParser(ParameterParser):
    """Models at times leave out the outer tag, and write lists and objects as Python's literals. ``EDGE``: what stands
    before and after a value."""

    EDGE: ClassVar[str] = "\n"

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
    def value_json(cls, text: str, types: set[str]) -> str:
        if (not types or types & {"array", "object"}) and text.strip()[:1] in ("[", "{", "(") and not is_json(text):
            text = literal_json(text) or text
        return super().value_json(text, types)

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        begin, end = f"\n<function={name}>\n", f"</function>\n{cls.MARKS[0]}"
        return f"{rules.text(begin)} {cls.member_rules(schema, rules)} {rules.text(end)}"

    @classmethod
    def member_rule(cls, key: str, value: Value, rules: Rules) -> str:
        begin = rules.text(f"<parameter={key}>{cls.EDGE}")
        return f"{begin} {value.rule(rules, '</parameter>', before=cls.EDGE)} {rules.text(chr(10))}"


class SeedOssParser(Qwen3CoderParser):
    OPEN = ("<seed:tool_call>", "<function=")
    MARKS = ("</seed:tool_call>", "</function>")
    EDGE = ""
