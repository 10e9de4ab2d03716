"""Tool calls as Mistral's models write them. Until 2024 a list of JSON, later a name and its arguments for each call:

[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "9Xk2p0QaB"}]
[TOOL_CALLS]get_weather[CALL_ID]9Xk2p0QaB[ARGS]{"city": "Oslo"}
"""

from __future__ import annotations

import hashlib
import re
from secrets import token_hex

from app.parsers.base import StreamingParser
from app.parsers.text_reader import ParseError, Reading

__all__ = ["MistralParser"]

_NAME = re.compile(r"[\w.-]*", re.ASCII)
_ID = re.compile(r"[a-zA-Z0-9]{9}")


class MistralParser(StreamingParser):
    """Ids have nine letters and digits, which the templates check."""

    OPEN = ("[TOOL_CALLS]",)
    MARKS = ("[ARGS]", "[CALL_ID]")
    TAKES_IDS = True

    def block(self, mark: str) -> Reading[None]:
        yield from self.space()
        if (yield from self.peek()) in "[{":
            yield from self.json_calls()
            return
        parts: list[str] = []
        yield from self.run(_NAME, parts.append)
        identity = None
        if (yield from self.skip("[CALL_ID]")):
            identity, _ = yield from self.name_until("[ARGS]")
        else:
            yield from self.skip("[ARGS]")
        if not parts:
            raise ParseError("it has no name")
        yield from self.named_call("".join(parts), identity)

    @classmethod
    def new_id(cls, name: str, number: int) -> str:
        return token_hex(5)[:9]

    @classmethod
    def history_id(cls, given: str | None, name: str, number: int) -> str:
        if given is not None and _ID.fullmatch(given):
            return given
        return hashlib.blake2s((given or f"{name}:{number}").encode()).hexdigest()[:9]

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f"{name}[ARGS]", ""
