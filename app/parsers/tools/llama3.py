"""Tool calls as Llama 3.1, 3.2 and 3.3 write them: JSON that begins the answer, or follows a mark; ``;`` between calls.

<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}; {"name": "add", "parameters": {}}
"""

from __future__ import annotations

from app.parsers.base import StreamingParser
from app.parsers.text_reader import Reading

__all__ = ["Llama3Parser"]


class Llama3Parser(StreamingParser):
    OPEN = ("<|python_tag|>",)
    SECTION = ("<|python_tag|>", "")
    BETWEEN = '"; "'
    STARTS = "{["
    BARE = True

    def at_start(self) -> Reading[None]:
        while True:
            yield from self.json_calls()
            yield from self.space()
            if not (yield from self.skip(";", ",")):
                return

    def block(self, mark: str) -> Reading[None]:
        yield from self.at_start()

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'{{"name": "{name}", "parameters": ', "}"
