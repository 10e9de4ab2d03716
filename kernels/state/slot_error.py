"""The error of one request's step."""

from __future__ import annotations

__all__ = ["SlotError"]


class SlotError(ValueError):
    """One request of a step cannot run; the others can."""
