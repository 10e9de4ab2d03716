"""Tool calls as DeepSeek-V3.2 and V4 write them, in tags of their language DSML:

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>

V4 has ``tool_calls`` for ``function_calls``, and GigaChat 3.5 ``GCML`` for ``DSML``.
"""

from __future__ import annotations

from typing import ClassVar

from app.parsers.tools.invoke import InvokeParser

__all__ = ["DeepSeekV4Parser", "DeepSeekV32Parser", "GigaChat35Parser"]


class DeepSeekV32Parser(InvokeParser):
    PREFIX = "｜DSML｜"
    OPEN = ("<｜DSML｜function_calls>",)
    CLOSE = "</｜DSML｜function_calls>"
    MARKS: ClassVar[tuple[str, ...]] = (CLOSE,)
    SECTION = ("<｜DSML｜function_calls>\n", CLOSE)
    BETWEEN = ""
    TYPED = True
    TOKENS = (PREFIX,)


class DeepSeekV4Parser(DeepSeekV32Parser):
    OPEN = ("<｜DSML｜tool_calls>",)
    CLOSE = "</｜DSML｜tool_calls>"
    MARKS = (CLOSE,)
    SECTION = ("<｜DSML｜tool_calls>\n", CLOSE)


class GigaChat35Parser(DeepSeekV32Parser):
    PREFIX = "｜GCML｜"
    OPEN = ("<｜GCML｜tool_calls>",)
    CLOSE = "</｜GCML｜tool_calls>"
    MARKS = (CLOSE, "<|message_sep|>")
    SECTION = ("<｜GCML｜tool_calls>\n", CLOSE)
    TOKENS = (PREFIX,)
