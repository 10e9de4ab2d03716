"""Tool calls as GLM-4.5, 4.6 and 4.7 write them: the name, then pairs of keys and values,

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Oslo</arg_value>
</tool_call>

GLM-4.7 writes no newlines.
"""

from __future__ import annotations

from app.parsers.base import Reading
from app.parsers.tools.parameters import ParameterParser

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
