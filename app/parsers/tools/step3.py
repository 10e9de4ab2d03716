"""Tool calls as Step-3 writes them:

<｜tool_calls_begin｜>
<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">
<steptml:parameter name="city">Oslo</steptml:parameter>
</steptml:invoke><｜tool_call_end｜>
<｜tool_calls_end｜>
"""

from __future__ import annotations

from app.parsers.text_reader import Reading
from app.parsers.tools.invoke import InvokeParser
from app.parsers.tools.lark import Rules, Schema

__all__ = ["Step3Parser"]


class Step3Parser(InvokeParser):
    PREFIX = "steptml:"
    OPEN = ("<｜tool_call_begin｜>",)
    CLOSE = "<｜tool_call_end｜>"
    MARKS = (CLOSE, "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_sep｜>")

    SECTION = ("<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>")
    BETWEEN = ""

    def block(self, mark: str) -> Reading[None]:
        yield from self.name_until("<｜tool_sep｜>")
        yield from super().block(mark)

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        begin = f'<｜tool_call_begin｜>function<｜tool_sep｜><{cls.PREFIX}invoke name="{name}">\n'
        end = f"</{cls.PREFIX}invoke>{cls.CLOSE}\n"
        return f"{rules.text(begin)} {cls.member_rules(schema, rules)} {rules.text(end)}"
