"""gpt-oss writes messages on channels, the format harmony: thoughts on ``analysis``, calls on ``commentary`` with a
recipient, the answer on ``final``.

<|channel|>analysis<|message|>I need the weather.<|end|>
<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>
"""

from __future__ import annotations

import logging
import re

from app.parsers.base import StreamingParser
from app.parsers.text_reader import ParseError, Reading
from app.parsers.tools.lark import ANY, Rules, Schema, Unenforceable

__all__ = ["ForcedHarmonyParser", "HarmonyParser"]

_log = logging.getLogger("troupe.parsers")

_HEADER = ("<|start|>", "<|channel|>", "<|constrain|>")
_MESSAGE = "<|message|>"
_END = ("<|end|>", "<|return|>", "<|call|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?(\S+)")
_WORDS = ("assistant", "analysis", "commentary", "final", "json", "code", "to=")
_MAX_HEADER = 512


class HarmonyParser(StreamingParser):
    """Reads thoughts, too. Messages to other recipients than functions are thoughts, as for the model's own tools."""

    MARKS = (*_HEADER, _MESSAGE, *_END)

    def _everything(self, thinking: bool | None) -> Reading[None]:
        yield
        if begun := (yield from self.skip(" to=", "to=")):
            yield from self._headed(_HEADER[0], begun)  # the prompt ends in the header
        while mark := (yield from self.until(self.MARKS, self.add_content)):
            if mark in _HEADER:
                yield from self._headed(mark)

    def _headed(self, mark: str, begun: str = "") -> Reading[None]:
        """A header, which ``mark`` and ``begun`` begin, and its message. What is no header is content."""
        header: list[str] = []

        def sink(text: str) -> None:
            header.append(text)
            if sum(map(len, header)) > _MAX_HEADER:
                raise ParseError("the header of a message has no end")

        self._read = [begun]
        try:
            while mark in _HEADER:
                header += (mark, begun)
                begun = ""
                mark = yield from self.until(self.MARKS, sink)
            if mark != _MESSAGE and not _is_header("".join(header)):
                raise ParseError("the header has no message")
        except ParseError as error:
            _log.warning("The model wrote a message that cannot be read: %s. It stays text.", error)
            self.give_up()
            return
        self._read = None
        if mark == _MESSAGE:
            yield from self._message("".join(header))

    def _message(self, header: str) -> Reading[None]:
        recipient = _RECIPIENT.search(header)
        if recipient is not None and "functions." in header and self._tools is not None:
            yield from self.attempt(self.named_call(recipient[1].partition("<|")[0]))
        elif (recipient is not None and "functions." not in header) or "<|channel|>analysis" in header:
            yield from self._think_here()

    def _think_here(self) -> Reading[None]:
        """A thought up to the message's end, which stays to be read."""
        if self._reasoning_format is None or not self._separate:
            return  # it is content, as any text
        if self.thought:
            self.add_thought("\n")
        self.thought = True
        mark = yield from self.until(self.MARKS, self._think_aloud)
        self.put_back(mark)
        if not self._stream_thought or not mark:
            self.end_thought()

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        """From after the role on. The recipient stands before the channel or after it."""
        channel, json = rules.text("<|channel|>commentary"), rules.text(" <|constrain|>json")
        to = rules.text(f" to=functions.{name}")
        header = f'({to} {channel} | {channel} {to}) (" json" | {json})?'
        return f"{header} {rules.text(_MESSAGE)} {rules.json(schema or {'type': 'object'})}"

    @classmethod
    def answer_rule(cls, calls: list[str], rules: Rules, *, forced: bool, other: str | None) -> str | None:
        if not all(map(rules.is_token, (*_HEADER, _MESSAGE, _END[0]))):
            raise Unenforceable("the marks of this format are not in the model's vocabulary")
        text, message = rules.excluding(ANY), rules.text(_MESSAGE)
        begun = rules.text("<|end|><|start|>assistant")
        final = f"{rules.text('<|channel|>final')} {message} {other or text}"
        kinds = '("analysis" | "commentary")'
        block = f"{rules.text('<|channel|>')} {kinds} {message} {text} {begun}"
        last = " | ".join(calls if forced else [*calls, final, f"{rules.text('<|channel|>')} {kinds} {message} {text}"])
        return f"({block})* ({last})"


class ForcedHarmonyParser(HarmonyParser):
    """Calls that a grammar forces are JSON on the channel ``final``."""

    def _message(self, header: str) -> Reading[None]:
        if "<|channel|>final" in header:
            yield from self.attempt(self.json_calls())
        else:
            yield from super()._message(header)


def _is_header(header: str) -> bool:
    """Whether the words of a header may be one's, as far as it goes."""
    return all(
        any(word.startswith(known) if known == "to=" else known.startswith(word) for known in _WORDS)
        for word in re.split(r"<\|\w+\|>|\s+", header)
    )
