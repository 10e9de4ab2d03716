"""Tool calls as Kimi K3 writes them, in elements of three tokens for a tag:

<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Oslo
<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>

without the newline. The arguments may be one element ``json``. Text stands in an element ``response``.
"""

from __future__ import annotations

import re
from html import unescape

from app.parsers.text_reader import ParseError, Reading
from app.parsers.tools.lark import Rules, Schema, Unenforceable
from app.parsers.tools.parameters import ParameterParser, Value

__all__ = ["KimiK3Parser"]

_SEP = "<|sep|>"
_CALL, _ARGUMENT, _JSON = "<|open|>call ", "<|open|>argument ", "<|open|>json "
_CALL_END, _ARGUMENT_END, _JSON_END = (f"<|close|>{name}{_SEP}" for name in ("call", "argument", "json"))
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_TYPES = {"integer": "number"}


class KimiK3Parser(ParameterParser):
    OPEN = (f"<|open|>tools{_SEP}",)
    TEXT_MARKS = (f"<|open|>response{_SEP}", f"<|close|>response{_SEP}", f"<|close|>message{_SEP}")
    MARKS = (f"<|close|>tools{_SEP}", *TEXT_MARKS)
    TOKENS = ("<|open|>", "<|close|>", _SEP)
    SECTION = (OPEN[0], MARKS[0])
    BETWEEN = ""
    TYPED = True

    def block(self, mark: str) -> Reading[None]:
        while (yield from self.expect(_CALL, self.MARKS[0])) == _CALL:
            name = (yield from self._attributes()).get("tool", "")
            begin = yield from self.expect(_ARGUMENT, _JSON, _CALL_END)
            if begin == _JSON:
                yield from self._attributes()
                yield from self.named_call(name)
                yield from self.expect(_JSON_END)
                yield from self.expect(_CALL_END)
            else:
                self.put_back(begin)
                yield from self.parameters_call(name, self._members_of_call)

    def _members_of_call(self) -> Reading[None]:
        while (yield from self.expect(_ARGUMENT, _CALL_END)) == _ARGUMENT:
            attributes = yield from self._attributes()
            if "key" not in attributes:
                raise ParseError("an argument has no key")
            kind = attributes.get("type")
            yield from self.parameter(attributes["key"], _ARGUMENT_END, text=kind == "string" if kind else None)

    def _attributes(self) -> Reading[dict[str, str]]:
        written, _ = yield from self.name_until(_SEP)
        return {name: unescape(value) for name, value in _ATTRIBUTE.findall(written)}

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        begin = rules.text(f'{_CALL}tool="{name}" index="')
        members = cls.member_rules(schema, rules)
        return f"{begin} /[0-9]{{1,3}}/ {rules.text(chr(34) + _SEP)} {members} {rules.text(_CALL_END)}"

    @classmethod
    def member_rule(cls, key: str, value: Value, rules: Rules) -> str:
        if {'"', "&"} & set(key):
            raise Unenforceable(f"the name {key[:32]!r}")
        kinds = {_TYPES.get(kind, kind) for kind in value.kinds} or {"null", "boolean", "number", "object", "array"}
        types = ["string"] if value.text else sorted(kinds - {"string"}) or ["object"]
        listed = " | ".join(rules.text(f'{_ARGUMENT}key="{key}" type="{kind}"{_SEP}') for kind in types)
        return f"({listed}) {value.rule(rules, _ARGUMENT_END)}"
