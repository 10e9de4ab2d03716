"""Tool calls as Solar Open 2 writes them:

<|tool_call:start|>get_weather
<|tool_arg:start|>city<|tool_arg:value|>Oslo<|tool_arg:end|>
<|tool_call:end|>
"""

from __future__ import annotations

from app.parsers.text_reader import Reading
from app.parsers.tools.lark import Rules, Schema
from app.parsers.tools.parameters import ParameterParser, Value

__all__ = ["SolarOpen2Parser"]

_KEY, _VALUE, _END = "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>"


class SolarOpen2Parser(ParameterParser):
    OPEN = ("<|tool_call:start|>",)
    MARKS = ("<|tool_call:end|>", _KEY, _VALUE, _END)

    def block(self, mark: str) -> Reading[None]:
        yield from self.space()
        name, end = yield from self.name_until("\n", _KEY, self.MARKS[0])
        self.put_back(end)
        yield from self.parameters_call(name, self._members_of_call)

    def _members_of_call(self) -> Reading[None]:
        while (yield from self.expect(_KEY, self.MARKS[0])) == _KEY:
            key, _ = yield from self.name_until(_VALUE)
            yield from self.parameter(key, _END)

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        members = cls.member_rules(schema, rules)
        return f"{rules.text(name + chr(10))} {members} {rules.text(cls.MARKS[0])}"

    @classmethod
    def member_rule(cls, key: str, value: Value, rules: Rules) -> str:
        return f"{rules.text(f'{_KEY}{key}{_VALUE}')} {value.rule(rules, _END)} {rules.text(chr(10))}"
