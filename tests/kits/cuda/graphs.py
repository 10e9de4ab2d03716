"""Steps that run a second time through a graph."""

from __future__ import annotations

__all__ = [
    "again",
]


def again(sizes, run, *_):
    """As ``capture_each`` where there are no graphs."""
    found = {}
    for size in sizes:
        held = run(size)

        def replay(size=size, held=held):
            new = run(size)
            for name in ("hidden", "logits", "argmax"):
                getattr(held, name).copy_(getattr(new, name))

        found[size] = replay, held
    return found
