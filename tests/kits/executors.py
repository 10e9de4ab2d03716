"""The executors of a runner that a test drives."""

from __future__ import annotations

from typing import Any

__all__ = ["find_executor", "remove_executor"]


def find_executor(runner: Any, kind: str, unobserved: bool = False) -> Any:
    """The executor of a class, or None. ``unobserved``: the one for steps that the draft does not observe."""
    found = [executor for executor in runner._executors if type(executor).__name__ == kind]
    return next((executor for executor in found if getattr(executor, "_unobserved", False) is unobserved), None)


def remove_executor(runner: Any, kind: str) -> None:
    """Leave the steps of a class of executors to those after it."""
    runner._executors = tuple(executor for executor in runner._executors if type(executor).__name__ != kind)
