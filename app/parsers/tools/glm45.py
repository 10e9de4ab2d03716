"""Tool calls as GLM-4.5, 4.6 and 4.7, Laguna and Spark 2.5 write them: the name, then pairs of keys and values,

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Oslo</arg_value>
</tool_call>

GLM-4.7 writes no newlines. Other families write the same with other names of tags.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from app.parsers.text_reader import Reading
from app.parsers.tools.lark import Rules, Schema
from app.parsers.tools.parameters import ParameterParser, Value

__all__ = ["Glm45Parser"]


class Glm45Parser(ParameterParser):
    """``PREFIX``: of the names of tags. ``SUFFIXES``: after them, one for all tags of a vocabulary."""

    PREFIX: ClassVar[str] = ""
    SUFFIXES: ClassVar[tuple[str, ...]] = ("",)
    OPEN: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    MARKS: ClassVar[tuple[str, ...]] = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    suffix = ""

    def block(self, mark: str) -> Reading[None]:
        yield from self.space()
        separator, *ends = map(self.tag, ("tool_sep", "arg_key", "/tool_call"))
        name, end = yield from self.name_until("\n", separator, *ends)
        if end != separator:
            self.put_back(end)
        yield from self.parameters_call(name, self._members_of_call)

    def _members_of_call(self) -> Reading[None]:
        begin = self.tag("arg_key")
        while (yield from self.expect(begin, self.tag("/tool_call"))) == begin:
            key, _ = yield from self.name_until(self.tag("/arg_key"))
            text = yield from self.value_begin(key)
            yield from self.parameter(key, self.tag("/arg_value"), text=text)

    def value_begin(self, key: str) -> Reading[bool | None]:
        """Read what stands between a key and its value; returns whether the value is text, None if it does not say."""
        yield from self.expect(self.tag("arg_value"))
        return None

    def tag(self, name: str) -> str:
        return self.suffixed(name, self.suffix)

    @classmethod
    def suffixed(cls, name: str, suffix: str) -> str:
        """The tag of a name, which begins with ``/`` in an end tag."""
        slash, name = ("/", name[1:]) if name.startswith("/") else ("", name)
        return f"<{slash}{cls.PREFIX}{name}{suffix}>"

    @classmethod
    def tags_of(cls, rules: Rules) -> Callable[[str], str]:
        """The tags by their names, with the suffix that the vocabulary has."""
        known = (suffix for suffix in cls.SUFFIXES if rules.is_token(cls.suffixed("arg_key", suffix)))
        suffix = next(known, cls.SUFFIXES[0])
        return lambda name: cls.suffixed(name, suffix)

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        members = cls.member_rules(schema, rules)
        return f"{rules.text(name + chr(10))} {members} {rules.text(cls.tags_of(rules)('/tool_call'))}"

    @classmethod
    def member_rule(cls, key: str, value: Value, rules: Rules) -> str:
        tag = cls.tags_of(rules)
        begin = rules.text(f"{tag('arg_key')}{key}{tag('/arg_key')}\n{tag('arg_value')}")
        return f"{begin} {value.rule(rules, tag('/arg_value'))} {rules.text(chr(10))}"
