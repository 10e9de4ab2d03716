"""Who sends what to whom: the edges of the live graph, and how many messages went over each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from actors.protocol import StepDone, StepFailed, WorkerReady
from app.stage.answers import EdgeView

if TYPE_CHECKING:
    from telemetry.traffic import Flow

__all__ = ["edges", "role_of"]

_SENDERS = {
    "renderer": "http",
    "tokenizer": "http",  # of conversations the text that a renderer made: see below
    "scheduler": "tokenizer",  # the intake submits what a tokenizer encoded; it is no actor, and not drawn
    "cache": "scheduler",
    "detokenizer": "scheduler",
}
"""Who sends to a role, by the protocol; the worker's words to the scheduler are told apart by name."""

_WORKERS = frozenset(kind.__name__ for kind in (StepDone, StepFailed, WorkerReady))


def role_of(name: str) -> str:
    """An actor's name without its number: ``worker-0`` is a worker."""
    head, _, number = name.rpartition("-")
    return head if head and number.isdigit() else name


def edges(flows: Mapping[tuple[str, str], Flow], *, steps: int, tokens: int) -> list[EdgeView]:
    """Messages over each edge so far, from what each actor handled; towards the streams a message is a token."""
    counts: Counter[tuple[str, str]] = Counter()
    for (actor, message), flow in flows.items():
        target = role_of(actor)
        source = "worker" if target == "scheduler" and message in _WORKERS else _SENDERS.get(target)
        if source is not None:
            counts[source, target] += flow.count
    rendered = counts["renderer", "tokenizer"] = min(counts["http", "renderer"], counts["http", "tokenizer"])
    counts["http", "tokenizer"] -= rendered
    counts["scheduler", "worker"] = steps
    counts["detokenizer", "streams"] = counts["streams", "http"] = tokens
    return [EdgeView(source=source, target=target, count=count) for (source, target), count in counts.items()]
