"""gpt-oss writes messages on channels, the format harmony: thoughts on ``analysis``, calls on ``commentary`` with a
recipient, the answer on ``final``.

<|channel|>analysis<|message|>I need the weather.<|end|>
<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>
"""

from __future__ import annotations

import re

from app.parsers.base import Reading, StreamingParser

__all__ = ["ForcedHarmonyParser", "HarmonyParser"]

_HEADER = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
_END = ("<|end|>", "<|return|>", "<|call|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?(\S+)")
_MOST_HEADER = 512


class HarmonyParser(StreamingParser):
    """Reads thoughts, too. Messages to other recipients than functions are thoughts, as for the model's own tools."""

    MARKS = (*_HEADER, *_END)

    def _everything(self, thinking: bool | None) -> Reading[None]:
        yield
        header: list[str] | None = None  # the words and marks of a message's header, None outside of one
        while True:
            parts: list[str] = []
            mark = yield from self.until(self.MARKS, self.add_content if header is None else parts.append)
            if header is not None:
                header += parts
            if mark == "<|message|>" and header is not None:
                yield from self._message("".join(header))
                header = None
            elif mark in _HEADER:
                header = [*(header or ()), mark]
            elif mark:
                header = None
            else:
                return
            if header is not None and sum(map(len, header)) > _MOST_HEADER:
                header = None

    def _message(self, header: str) -> Reading[None]:
        recipient = _RECIPIENT.search(header)
        if recipient is not None and "functions." in header and self._tools is not None:
            yield from self.attempt(self.named_call(recipient[1].partition("<|")[0]))
        elif (recipient is not None and "functions." not in header) or "<|channel|>analysis" in header:
            yield from self._think_here()

    def _think_here(self) -> Reading[None]:
        """A thought up to the message's end, which stays to be read."""
        if self._thoughts is None or not self._separate:
            return  # it is content, as any text
        if self.thought:
            self.add_thought("\n")
        self.thought = True
        mark = yield from self.until(self.MARKS, self._think_aloud)
        self.put_back(mark)
        if not self._stream_thought or not mark:
            self.end_thought()


class ForcedHarmonyParser(HarmonyParser):
    """Calls that a grammar forces are JSON on the channel ``final``."""

    def _message(self, header: str) -> Reading[None]:
        if "<|channel|>final" in header:
            yield from self.attempt(self.json_calls())
        else:
            yield from super()._message(header)
