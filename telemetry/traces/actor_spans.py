"""An observer of the actor runtime that creates spans of handled messages, in front of the counting observer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telemetry.traces.tracing import Tracing

__all__ = ["ActorSpans"]


class ActorSpans:
    """Has the methods of ``actors.runtime.Observer`` that ``counting`` has, and always ``handled``."""

    def __init__(self, tracing: Tracing, counting: object | None) -> None:
        self._tracing = tracing
        self._count = getattr(counting, "handled", None)
        for name in ("ask_timeout", "dead_letter", "restarted"):
            if hasattr(counting, name):
                setattr(self, name, getattr(counting, name))

    def handled(
        self, actor: str, message: str, *, traceparent: str | None, error: BaseException | None, **measured: Any
    ) -> None:
        if self._count is not None:
            self._count(actor, message, traceparent=traceparent, error=error, **measured)
        if traceparent is not None and self._tracing.level >= 3:
            self._tracing.handled(
                actor,
                message,
                traceparent,
                wait=measured["wait"],
                duration=measured["duration"],
                error=error,
            )
