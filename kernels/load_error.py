"""The error of weights that cannot be loaded."""

from __future__ import annotations

__all__ = ["LoadError"]


class LoadError(RuntimeError):
    """The weights cannot be loaded; the message says what to do."""
