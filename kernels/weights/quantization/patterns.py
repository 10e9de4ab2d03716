"""Regular expressions from a checkpoint's settings, with bounded time and memory.

A pattern that names a wrapper's ``language_model`` is compared with the names that modules have inside the wrapper, and
not with those of a language model alone, which modules have here.

They are untrusted: one that backtracks for ever would hang the load. Python's ``re`` cannot be interrupted, so it only
checks the syntax. ``regex``, which transformers needs too, matches the patterns that could backtrack, with a timeout.
It expands counted repeats, which ``re`` does not; hence the limit on these.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

from kernels.contract.errors import ConfigError
from kernels.weights.wrapped import wrapped_names

__all__ = ["NoPattern", "Patterns"]

_SECONDS = 1.0
"""Seconds that one match may take. Most take microseconds."""
_ALL_SECONDS = 30.0
_ALL_REPEATED = 200_000
_WRAPPER = "language_model"
_STRAIGHT = re.compile(r"[^*+?{|]*")
"""Patterns that cannot backtrack."""
_COUNTS = re.compile(r"\{([^{}]*)\}")
_NESTED = re.compile(r"\)\s*\{|#")
"""Found in every pattern in which one counted repeat may contain another: a count after a group or its comment."""


class NoPattern(ConfigError):
    """The text is not a regular expression."""


class Patterns:
    """The patterns of one checkpoint. Together they may match for 30 seconds and have 200,000 repeated characters."""

    def __init__(self) -> None:
        self._seconds, self._repeated = _ALL_SECONDS, _ALL_REPEATED

    def match(self, text: str, field: str) -> Callable[[str], bool]:
        """A function that matches a module's name from its beginning. ``field``: the setting of quantization_config.

        Raises NoPattern, or ConfigError if the pattern repeats too much. The function raises ConfigError on a timeout.
        """
        return self._compiled(text, field, "match")

    def search(self, text: str, field: str) -> Callable[[str], bool]:
        """Like ``match``, anywhere in the name."""
        return self._compiled(text, field, "search")

    def _compiled(self, text: str, field: str, how: str) -> Callable[[str], bool]:
        compare = self._compared(text, field, how)
        return (lambda name: any(map(compare, wrapped_names(name)))) if _WRAPPER in text else compare

    def _compared(self, text: str, field: str, how: str) -> Callable[[str], bool]:
        try:
            plain = getattr(re.compile(text), how)
        except (re.error, OverflowError, RecursionError) as error:
            raise NoPattern(f"quantization_config: {field}: {text!r} is no regular expression: {error}") from error
        if _STRAIGHT.fullmatch(text):
            return lambda name: plain(name) is not None
        self._count_repeats(text, field)
        import regex  # slow to import, and few checkpoints need it

        try:
            compare = getattr(regex.compile(text), how)
        except (regex.error, RecursionError) as error:  # regex parses some braces in another way than re
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
        repeats = math.prod(counts) if _NESTED.search(text) else max(counts, default=1)
        if repeats == 1:
            return
        self._repeated -= repeats * len(text)
        if self._repeated < 0:
            raise ConfigError(
                f"quantization_config: {field}: {text!r} repeats too much; use patterns with smaller counts"
            )


def _number(text: str) -> int:
    """The number on one side of the comma in braces, which may contain spaces."""
    digits = "".join(part for part in text if part.isdecimal())
    return int(digits[:9] or 0)
