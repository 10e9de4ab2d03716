"""Tool calls as MiniMax-M3 writes them; a mark stands before each tag, which the parameters name, and objects and lists
are elements, too:

]<]minimax[>[<tool_call>
]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Oslo]<]minimax[>[</city>]<]minimax[>[</invoke>
]<]minimax[>[</tool_call>

Items of lists are elements ``item``.
"""

from __future__ import annotations

from typing import Any

from app.parsers.text_reader import IncompleteCall, ParseError, Reading
from app.parsers.tools.lark import Rules, Schema
from app.parsers.tools.parameters import ParameterParser, Value, inner_schema, quoted, types_of

__all__ = ["MiniMaxM3Parser"]

_MARK = "]<]minimax[>["
_INVOKE = 'invoke name="'
_DEPTH = 64


class MiniMaxM3Parser(ParameterParser):
    """Text values are passed on as they arrive; objects and lists when they are complete, for an element that comes a
    second time makes its member a list. They may be JSON, which grammars ask for."""

    OPEN = (f"{_MARK}<tool_call>",)
    MARKS = (f"{_MARK}</tool_call>",)
    TOKENS = (_MARK, "<tool_call>", "</tool_call>")
    SECTION = (f"{OPEN[0]}\n", MARKS[0])
    BETWEEN = ""

    def block(self, mark: str) -> Reading[None]:
        while (tag := (yield from self._tag())) != "/tool_call":
            name = tag.removeprefix(_INVOKE).removesuffix('"')
            if f'{_INVOKE}{name}"' != tag:
                raise ParseError(f"<{tag[:32]}> is no call")
            yield from self.parameters_call(name, self._members_of_call)

    def _tag(self) -> Reading[str]:
        """The inner of the tag that comes next."""
        yield from self.expect(_MARK)
        return (yield from self._tag_after_mark())

    def _tag_after_mark(self) -> Reading[str]:
        yield from self.symbol("<")
        tag, _ = yield from self.name_until(">")
        return tag.strip()

    def _members_of_call(self) -> Reading[None]:
        schema = self.parameters(self._name)
        while (key := (yield from self._tag())) != "/invoke":
            if key.startswith("/"):
                raise ParseError(f"<{key[:32]}> ends nothing")
            if self.member_types(key) == {"string"}:
                yield from self.parameter(key, f"{_MARK}</{key}>", text=True)
            else:
                value = yield from self._value(key, inner_schema(schema, schema, key), 0)
                self.begin_member(key)
                self.add_arguments(value)

    def _value(self, name: str, schema: Any, depth: int) -> Reading[str]:
        """The value of an element after its begin, and its end; as JSON."""
        root = self.parameters(self._name)
        types = types_of(schema, root)
        parts: list[str] = []
        if not (yield from self.until((_MARK,), parts.append)):
            raise IncompleteCall
        text = "".join(parts)
        tag = yield from self._tag_after_mark()
        if tag == f"/{name}":
            kinds = types - {"null"}
            empty = {"array": "[]", "object": "{}"}.get(next(iter(kinds), "")) if len(kinds) == 1 else None
            return empty if empty and not text.strip() else self.value_json(text, types)
        if text.strip() or depth > _DEPTH:
            raise ParseError("text stands beside elements" if text.strip() else "it is nested too deeply")
        is_list = "array" in types or ("object" not in types and tag == "item")
        members: dict[str, list[str]] = {}
        while tag != f"/{name}":
            if tag.startswith("/"):
                raise ParseError(f"expected </{name}>")
            value = yield from self._value(tag, inner_schema(schema, root, None if is_list else tag), depth + 1)
            members.setdefault("" if is_list else tag, []).append(value)
            tag = yield from self._tag()
        if is_list:
            return _list(members.get("", []))
        listed = (f"{quoted(key)}: {_list(found) if len(found) > 1 else found[0]}" for key, found in members.items())
        return f"{{{', '.join(listed)}}}"

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        begin, end = f'{_MARK}<{_INVOKE}{name}">', f"{_MARK}</invoke>\n"
        return f"{rules.text(begin)} {cls.member_rules(schema, rules)} {rules.text(end)}"

    @classmethod
    def member_rule(cls, key: str, value: Value, rules: Rules) -> str:
        return f"{rules.text(f'{_MARK}<{key}>')} {value.rule(rules, f'{_MARK}</{key}>')}"


def _list(values: list[str]) -> str:
    return f"[{', '.join(values)}]"
