"""The error of an invalid argument."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ArgumentError"]


class ArgumentError(ValueError):
    """One or more arguments are unknown, out of bounds, contradictory, or of a feature that is not built.

    ``problems``: one sentence for each problem found; ``str(error)``: these sentences, one per line.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))
