"""Regular expressions of a checkpoint's settings. They are bytes that nobody vouched for: one that backtracks for ever
would hang the load, so what they take is bounded.

Python's ``re`` cannot be stopped and checks them only; ``regex``, which transformers needs, too, compares those that
could backtrack, in a limited time. It writes counted repeats out where ``re`` keeps the count: hence a limit on these.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

from kernels.models.config import ConfigError

__all__ = ["NoPattern", "Patterns"]

_SECONDS = 1.0
"""Of one comparison, which takes microseconds."""
_ALL_SECONDS = 30.0
_ALL_REPEATED = 200_000
_STRAIGHT = re.compile(r"[^*+?{|]*")
"""Texts without anything that could be tried in two ways."""
_COUNTS = re.compile(r"\{([^{}]*)\}")
_NESTED = re.compile(r"\)\s*\{|#")
"""What all texts have in which one count may repeat another: it stands behind a group, or behind a comment after it."""


class NoPattern(ConfigError):
    """A text that is no regular expression."""


class Patterns:
    """Those of one checkpoint, which share 30 seconds of comparing and 200,000 characters of counted repeats."""

    def __init__(self) -> None:
        self._seconds, self._repeated = _ALL_SECONDS, _ALL_REPEATED

    def match(self, text: str, field: str) -> Callable[[str], bool]:
        """Whether a module's name begins with what ``text`` says. ``field``: where it stands, of quantization_config.

        Raises NoPattern, or ConfigError where it repeats too much; what it gives raises ConfigError where it takes too
        long.
        """
        return self._compiled(text, field, "match")

    def search(self, text: str, field: str) -> Callable[[str], bool]:
        """The same, wherever in the name it is found."""
        return self._compiled(text, field, "search")

    def _compiled(self, text: str, field: str, how: str) -> Callable[[str], bool]:
        try:
            plain = getattr(re.compile(text), how)
        except (re.error, OverflowError, RecursionError) as error:
            raise NoPattern(f"quantization_config: {field}: {text!r} is no regular expression: {error}") from error
        if _STRAIGHT.fullmatch(text):
            return lambda name: plain(name) is not None
        self._count_repeats(text, field)
        import regex  # takes time that most checkpoints need not spend

        try:
            compare = getattr(regex.compile(text), how)
        except (regex.error, RecursionError) as error:  # it reads some braces otherwise
            raise NoPattern(f"quantization_config: {field}: {text!r} is no regular expression: {error}") from error

        def found(name: str) -> bool:
            begun = time.perf_counter()
            try:
                return compare(name, timeout=min(_SECONDS, self._seconds)) is not None
            except TimeoutError as error:
                raise ConfigError(
                    f"quantization_config: {field}: {text!r} takes too long to compare with {name}; use simpler "
                    "patterns, or the modules' names"
                ) from error
            finally:
                self._seconds = max(0.0, self._seconds - (time.perf_counter() - begun))

        return found

    def _count_repeats(self, text: str, field: str) -> None:
        """Raises ConfigError."""
        counts = [max(1, *map(_number, count.split(","))) for count in _COUNTS.findall(text)]
        most = math.prod(counts) if _NESTED.search(text) else max(counts, default=1)
        if most == 1:
            return
        self._repeated -= most * len(text)
        if self._repeated < 0:
            raise ConfigError(
                f"quantization_config: {field}: {text!r} repeats too much; use patterns with smaller counts"
            )


def _number(text: str) -> int:
    """Of what stands beside a comma in braces; spaces may stand between its digits."""
    digits = "".join(part for part in text if part.isdecimal())
    return int(digits[:9] or 0)
