"""Tool calls as MiniMax-M2 writes them: see :mod:`app.parsers.tools.invoke`."""

from __future__ import annotations

from app.parsers.tools.invoke import InvokeParser

__all__ = ["MiniMaxM2Parser"]


class MiniMaxM2Parser(InvokeParser):
    OPEN = ("<minimax:tool_call>",)
    CLOSE = "</minimax:tool_call>"
    MARKS = (CLOSE,)
    SECTION = ("<minimax:tool_call>\n", CLOSE)
    BETWEEN = ""
