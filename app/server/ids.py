"""Unpredictable ids, without a system call for each: a call would release the GIL between two requests."""

from __future__ import annotations

import os

__all__ = ["Ids"]

_BYTES = 16
_POOL = 256 * _BYTES


class Ids:
    """Makes ids of 128 random bits from the operating system's generator."""

    def __init__(self) -> None:
        self._pool = b""
        self._used = 0

    def new(self, prefix: str) -> str:
        """The prefix and 32 hexadecimal digits."""
        if self._used >= len(self._pool):
            self._pool, self._used = os.urandom(_POOL), 0
        start, self._used = self._used, self._used + _BYTES
        return prefix + self._pool[start : self._used].hex()
