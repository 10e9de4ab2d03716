"""Stacks of tasks and threads as text, for reports of stalls."""

import asyncio
import sys
import threading
import traceback
from types import FrameType
from typing import Any

__all__ = ["of_task", "of_threads"]

_DEPTH = 24
"""Innermost frames of each stack that are logged."""


def of_task(task: "asyncio.Task[Any]") -> str:
    """The stack of a task, its innermost await last."""
    lines: list[str] = []
    waiting: Any = task.get_coro()
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if isinstance(frame, FrameType):
            lines += traceback.format_list(
                traceback.StackSummary.extract([(frame, frame.f_lineno)], capture_locals=False)
            )
            waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
        else:
            lines.append(f"  waits for {type(waiting).__name__}\n")
            waiting = None
    return "".join(lines[-_DEPTH:]).rstrip()


def of_threads() -> str:
    """The stacks of all threads of this process but the calling one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = "".join(traceback.format_stack(frame, limit=None)[-_DEPTH:]).rstrip()
            parts.append(f"thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(parts)
