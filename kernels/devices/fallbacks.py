"""What the log says when a device runs something without a kernel of its own."""

from __future__ import annotations

import logging

__all__ = ["Fallbacks"]

_log = logging.getLogger("troupe.kernels")


class Fallbacks:
    """Logs each fallback of one device once."""

    def __init__(self) -> None:
        self._logged: set[tuple[object, ...]] = set()

    def log(self, message: str, *values: object) -> None:
        """``message`` with its ``values``, as ``logging`` formats them, unless it was logged before."""
        if (message, *values) not in self._logged:
            self._logged.add((message, *values))
            _log.warning(message, *values)
