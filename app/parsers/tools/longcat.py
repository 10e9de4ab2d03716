"""Tool calls as LongCat writes them: JSON between tags, or, as later models do, GLM-4.5's format with other tags,

<longcat_tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</longcat_tool_call>
"""

from __future__ import annotations

from app.parsers.tools.glm45 import Glm45Parser
from app.parsers.tools.lark import Rules, Schema
from app.parsers.tools.parameters import AlsoJson

__all__ = ["LongCatParser"]


class LongCatParser(AlsoJson, Glm45Parser):
    PREFIX = "longcat_"
    OPEN = ("<longcat_tool_call>",)
    MARKS = (
        "</longcat_tool_call>",
        "<longcat_arg_key>",
        "</longcat_arg_key>",
        "<longcat_arg_value>",
        "</longcat_arg_value>",
    )

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'\n{{"name": "{name}", "arguments": ', "}\n</longcat_tool_call>"

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        begin, end = cls.frame(name)
        as_json = f"{rules.text(begin)} {rules.json(schema or {'type': 'object'})} {rules.text(end)}"
        return f"{as_json} | {super().call_rule(name, schema, rules)}"
