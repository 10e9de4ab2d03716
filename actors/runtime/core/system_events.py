"""Events and counters of a system, for its owner, its log and its observer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from actors.runtime.core.events import Event, EventKind, Observer
from actors.runtime.core.message import Envelope, Message

if TYPE_CHECKING:
    from actors.runtime.core.cell import Cell

__all__ = ["SystemEvents"]


class SystemEvents:
    """Publishes events. ``log_death`` replaces the log record of an actor's death; ``observer`` has any methods of
    :class:`Observer`; ``monotonic``: the system's clock, in seconds.

    ``handled`` is called for each handled message with the cell, the envelope, seconds in the mailbox and in the
    handler, and the exception of the handler; it is None without an observer.
    """

    def __init__(
        self,
        logger: logging.Logger,
        log_death: Callable[[Event], None] | None,
        observer: Observer | object | None,
        monotonic: Callable[[], float],
    ) -> None:
        self.dead_letters = 0
        self.ask_timeouts = 0
        self._logger = logger
        self._log_death = log_death
        self._monotonic = monotonic
        self._callbacks: list[Callable[[Event], None]] = []
        self._logged: set[tuple[str, str, str]] = set()
        observed = getattr(observer, "handled", None)
        self.handled = None if observed is None else _measure(observed)
        self._observe_timeout = getattr(observer, "ask_timeout", None)
        self._observe_dead_letter = getattr(observer, "dead_letter", None)
        self._observe_restarted = getattr(observer, "restarted", None)

    def listen(self, callback: Callable[[Event], None]) -> None:
        """Call ``callback`` for each event; one that raises is logged."""
        self._callbacks.append(callback)

    def emit(
        self,
        kind: EventKind,
        actor: str,
        incarnation: int | None,
        cause: BaseException | None = None,
        at: float | None = None,
    ) -> None:
        """Log an event of an actor and pass it to the listeners. ``at``: its time; None for now."""
        event = Event(kind, actor, self._monotonic() if at is None else at, incarnation, cause)
        if kind is EventKind.DIED and self._log_death is not None:
            self._log_death(event)
        elif kind is EventKind.DIED:
            self._logger.error("actor %s died", actor, exc_info=cause)
        elif kind is EventKind.RESTARTED:
            self._logger.warning("actor %s restarted (incarnation %s)", actor, incarnation)
            if self._observe_restarted is not None:
                self._observe_restarted(actor)
        self._publish(event)

    def _publish(self, event: Event) -> None:
        for callback in self._callbacks:
            try:
                callback(event)
            except Exception:
                self._logger.exception("an event callback failed")

    def dead_letter(self, actor: str, envelope: Envelope, reason: str, cause: BaseException | None = None) -> None:
        """Count a message that will not be handled; log the first of its kind."""
        self.dead_letters += 1
        message = type(envelope.message).__name__
        kind = (actor, message, reason)
        if kind not in self._logged:
            self._logged.add(kind)
            self._logger.warning(
                "dead letter: %s to actor %s (%s), traceparent %s: later ones are only counted",
                message,
                actor,
                reason if cause is None else f"{reason}: {cause!r}",
                envelope.traceparent,
            )
        if self._observe_dead_letter is not None:
            self._observe_dead_letter(actor, message, reason)
        now = self._monotonic()
        self._publish(Event(EventKind.DEAD_LETTER, actor, now, None, cause, message, reason, envelope.traceparent))

    def ask_timeout(self, actor: str, message: Message[Any, Any]) -> None:
        """Count an ask that timed out."""
        self.ask_timeouts += 1
        if self._observe_timeout is not None:
            self._observe_timeout(actor, type(message).__name__)


def _measure(observed: Callable[..., None]) -> Callable[..., None]:
    def handled(cell: Cell, envelope: Envelope, wait: float, duration: float, failure: BaseException | None) -> None:
        observed(
            cell.name,
            type(envelope.message).__name__,
            wait=wait,
            duration=duration,
            depth=len(cell.mailbox),
            traceparent=envelope.traceparent,
            error=failure,
        )

    return handled
