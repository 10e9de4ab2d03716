"""Label values that clients choose, limited in number."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["LabelLimiter"]

T = TypeVar("T", bound=Hashable)


class LabelLimiter(Generic[T]):
    """The first ``max_labels`` values are kept; later ones become ``other``."""

    def __init__(self, other: T, max_labels: int = 100) -> None:
        self._other = other
        self._max_labels = max_labels
        self._known: set[T] = set()

    def __call__(self, value: T) -> T:
        if value in self._known:
            return value
        if len(self._known) >= self._max_labels:
            return self._other
        self._known.add(value)
        return value
