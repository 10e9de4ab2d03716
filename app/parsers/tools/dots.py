"""Tool calls as dots.llm writes them: see :mod:`app.parsers.tools.invoke`, or an object of JSON for each call,

<dots_function_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</dots_function_call>
"""

from __future__ import annotations

from app.parsers.tools.invoke import InvokeParser
from app.parsers.tools.parameters import AlsoJson

__all__ = ["DotsParser"]


class DotsParser(AlsoJson, InvokeParser):
    OPEN = ("<dots_function_call>",)
    CLOSE = "</dots_function_call>"
    MARKS = (CLOSE,)
    SECTION = ("<dots_function_call>\n", CLOSE)
    BETWEEN = ""
