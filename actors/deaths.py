"""What the deaths of actors mean for an engine, and how they are told."""

from __future__ import annotations

import logging
from collections.abc import Callable

from actors.journal import Journal
from actors.life import Life
from actors.runtime import ChildCrash, Event, EventKind
from actors.vitals import Vitals
from kernels.step import ModelInfo
from telemetry.log_lines import Event as LogEvent
from telemetry.traffic import Traffic

__all__ = ["Deaths"]

_log = logging.getLogger("troupe.engine")


class Deaths:
    """What the deaths of an engine's actors mean for its life, and how they are told.

    ``device``: that of the arguments; ``model_info`` and ``journal``: of now, None while there is none.
    """

    def __init__(
        self,
        device: str,
        life: Life,
        vitals: Vitals,
        traffic: Traffic,
        *,
        model_info: Callable[[], ModelInfo | None],
        journal: Callable[[], Journal | None],
    ) -> None:
        self._device = device
        self._life = life
        self._vitals = vitals
        self._traffic = traffic
        self._model_info = model_info
        self._journal = journal

    def on_event(self, event: Event) -> None:
        life = self._life
        if event.kind is EventKind.DIED:
            self._traffic.died(event.actor, event.cause, event.at)
        if event.kind is EventKind.DIED and event.actor.startswith("worker-"):
            self._vitals.worker_lost(event.at)
            life.progress("restarting the worker", 0.0)
            if self._model_info() is None:
                # What cannot be loaded once will not load the next time either: say why and give up.
                life.give_up(_reason(event.cause))
        elif event.kind is EventKind.ESCALATED:
            life.give_up(f"Actor {event.actor} failed too often: {_reason(event.cause)}")
        elif event.kind is EventKind.STOPPED and life.phase in ("starting", "ready", "draining"):
            # Nobody asked it to: without it the others would wait for ever.
            life.give_up(f"Actor {event.actor} has ended for good: {_reason(event.cause)}")

    def tell(self, event: Event) -> None:
        """Log a death; a worker's with the requests in its batch. Ranks stop one after the other: one that waits for
        another in a last step has nothing to tell."""
        if not event.actor.startswith("worker-"):
            _log_death(event)
            return
        if self._life.phase == "stopped" and _alone(event.cause):
            _log.debug("%s had a step in hand when the other ranks stopped: %s", event.actor, _reason(event.cause))
            return
        journal, info = self._journal() or Journal(), self._model_info()
        batch = self._vitals.read_batch(event.at) if self._vitals.read_batch is not None else ()
        entries = [entry for sequence in batch if (entry := journal.get(sequence)) is not None]
        _log_death(
            event,
            device=info.device if info is not None else self._device,
            batch=tuple(dict.fromkeys(entry.stream.request_id for entry in entries)),
        )


def _alone(cause: BaseException | None) -> bool:
    """Whether it is the want of its peers that a rank died of."""
    return isinstance(cause, ChildCrash) and cause.reason.startswith("GroupError:")


def _reason(cause: BaseException | None) -> str:
    """What an actor died of, without the traceback of its process: that is in the log."""
    if cause is None:
        return "the log says why"
    return cause.reason if isinstance(cause, ChildCrash) else f"{type(cause).__name__}: {cause}"


def _log_death(event: Event, **details: object) -> None:
    """An actor's death in the log, once, with what it takes to find its reason."""
    cause = event.cause
    told = isinstance(cause, ChildCrash) and not cause.detail  # then the reason is all there is
    fields = {"actor": event.actor, "incarnation": event.incarnation, **details}
    line = LogEvent(f"Actor {event.actor} died: {_reason(cause)}", fields)
    _log.error(line, exc_info=None if told else cause, extra={"actor": event.actor})
