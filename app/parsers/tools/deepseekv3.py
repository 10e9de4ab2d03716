"""Tool calls as DeepSeek-V3 and R1 write them: a type, a name, and a fenced block of JSON for each call,

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Oslo"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

DeepSeek-V3.1 leaves the type and the fence out:

<｜tool▁calls▁begin｜>
<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from app.parsers.base import StreamingParser
from app.parsers.text_reader import Reading

__all__ = ["DeepSeekV3Parser", "DeepSeekV31Parser"]

_SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekV3Parser(StreamingParser):
    OPEN = ("<｜tool▁call▁begin｜>",)
    MARKS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", _SEPARATOR)

    SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

    def block(self, mark: str) -> Reading[None]:
        yield from self.name_until(_SEPARATOR)
        name, _ = yield from self.name_until("\n")
        yield from self.space()
        yield from self.skip("```json")
        yield from self.named_call(name)
        yield from self.space()
        yield from self.skip("```")

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f"<｜tool▁call▁begin｜>function{_SEPARATOR}{name}\n```json\n", "\n```<｜tool▁call▁end｜>"


class DeepSeekV31Parser(DeepSeekV3Parser):
    def block(self, mark: str) -> Reading[None]:
        name, _ = yield from self.name_until(_SEPARATOR)
        yield from self.named_call(name)

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f"<｜tool▁call▁begin｜>{name}{_SEPARATOR}", "<｜tool▁call▁end｜>"
