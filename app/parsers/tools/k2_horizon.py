"""Tool calls as K2 Horizon writes them; a key may have a type, and a call may be JSON,

<ifm|tool_calls>
<ifm|tool_call>get_weather
<ifm|arg_key>city</ifm|arg_key>
<ifm|arg_value>Oslo</ifm|arg_value>
</ifm|tool_call>
</ifm|tool_calls>
"""

from __future__ import annotations

from app.parsers.text_reader import Reading
from app.parsers.tools.glm45 import Glm45Parser
from app.parsers.tools.lark import Rules, Schema
from app.parsers.tools.parameters import AlsoJson

__all__ = ["K2HorizonParser"]

_NAMES = ("/tool_call", "tool_calls", "/tool_calls", "arg_key", "/arg_key", "arg_type", "/arg_type", "arg_value",
          "/arg_value")  # fmt: skip


class K2HorizonParser(AlsoJson, Glm45Parser):
    PREFIX = "ifm|"
    OPEN = ("<ifm|tool_call>",)
    MARKS = tuple(f"</ifm|{name[1:]}>" if name[0] == "/" else f"<ifm|{name}>" for name in _NAMES)
    SECTION = ("<ifm|tool_calls>\n", "</ifm|tool_calls>")
    BETWEEN = ""

    def value_begin(self, key: str) -> Reading[bool | None]:
        if (yield from self.expect(self.tag("arg_type"), self.tag("arg_value"))) == self.tag("arg_value"):
            return None
        kind, _ = yield from self.name_until(self.tag("/arg_type"))
        yield from self.expect(self.tag("arg_value"))
        return True if kind.strip() == "string" and not self.member_types(key) else None

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        return f"{rules.text('<ifm|tool_call>')} {super().call_rule(name, schema, rules)} {rules.text(chr(10))}"
