"""The edges of the live graph: senders, receivers and numbers of messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from actors.protocol import StepDone, StepFailed, WorkerReady
from app.live.feed.answers import EdgeView

if TYPE_CHECKING:
    from telemetry.metrics.actor_messages import Flow

__all__ = ["edges", "role_of"]

_SENDERS = {
    "renderer": "http",
    "tokenizer": "http",  # for conversations the text of a renderer: see below
    "scheduler": "tokenizer",  # the intake submits encoded prompts; it is no actor and not drawn
    "cache": "scheduler",
    "detokenizer": "scheduler",
}
"""The senders of each role, by the protocol. A worker's messages to the scheduler are distinguished by name."""

_WORKERS = frozenset(kind.__name__ for kind in (StepDone, StepFailed, WorkerReady))


def role_of(name: str) -> str:
    """An actor's name without its number: ``worker-0`` is a worker."""
    head, _, number = name.rpartition("-")
    return head if head and number.isdigit() else name


def edges(flows: Mapping[tuple[str, str], Flow], *, steps: int, tokens: int) -> list[EdgeView]:
    """Messages over each edge so far, from what each actor handled. Towards the streams a message is a token."""
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
