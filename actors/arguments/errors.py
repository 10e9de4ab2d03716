"""The error of a wrong argument."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ArgumentError"]


class ArgumentError(ValueError):
    """One or more arguments are unknown, out of bounds, contradictory, or name a feature that is not built.

    ``problems`` holds one sentence each, all of those found at once; ``str(error)`` is the sentences, one a line.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))
