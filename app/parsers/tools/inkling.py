"""Inkling writes messages: a thought, text, or a call as JSON,

<|message_model|><|content_thinking|>I need the weather.<|end_message|>
<|message_model|>get_weather<|content_invoke_tool_json|>{"name": "get_weather", "args": {"city": "Oslo"}}<|end_message|>

without the newline. Text stands after ``<|content_text|>``.
"""

from __future__ import annotations

from app.parsers.base import StreamingParser
from app.parsers.text_reader import ParseError, Reading

__all__ = ["InklingParser"]

_MESSAGE, _END = "<|message_model|>", "<|end_message|>"
_THOUGHT, _TEXT, _CALL = "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"


class InklingParser(StreamingParser):
    """Reads thoughts between other messages, too. The prompt may have begun the first message."""

    OPEN = (_MESSAGE, _CALL, _THOUGHT)
    TEXT_MARKS = (_TEXT, _END, _MESSAGE)
    MARKS = (_TEXT, _END, "<|content_model_end_sampling|>")
    BETWEEN = ""
    BARE = True

    def at_start(self) -> Reading[None]:
        if (yield from self.skip(*(f"{name}{_CALL}" for name in self._tools or ()))):
            yield from self.json_call("name", "args")

    def block(self, mark: str) -> Reading[None]:
        header = ""
        if mark == _MESSAGE:
            header, mark = yield from self.name_until(_TEXT, _THOUGHT, _CALL)
        if mark != _CALL and header.strip():
            self.add_content(header)
        if mark == _THOUGHT:
            yield from self._think_more()
        elif mark == _CALL:
            if header.strip() and header.strip() not in (self._tools or {}):
                raise ParseError(f"no tool {header[:64]!r}")
            yield from self.json_call("name", "args")

    def _think_more(self) -> Reading[None]:
        if self._reasoning_format is None or not self._separate:
            return  # it is content, as any text
        if self.thought:
            self.add_thought("\n")
        self.thought = True
        yield from self.until((_END,), self._think_aloud)
        self.end_thought()

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'{name}{_CALL}{{"name": "{name}", "args": ', f"}}{_END}"
