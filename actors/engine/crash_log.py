"""Logs and counts the crashes of an engine's actors."""

from __future__ import annotations

import logging
from collections.abc import Callable

from actors.engine.lifecycle import Lifecycle
from actors.engine.replica import Replica
from actors.runtime import ChildCrash, Event, EventKind
from actors.workers.group import PeerDied
from kernels.contract.info import ModelInfo
from telemetry.logs.lines import Event as LogEvent
from telemetry.metrics.actor_messages import ActorMessages

__all__ = ["CrashLog"]

_log = logging.getLogger("troupe.engine")


class CrashLog:
    """Logs the deaths of an engine's actors, and ends the engine after a permanent failure.

    ``device``: as in the arguments. ``model_info``: returns None before the model is loaded. ``find``: returns the
    replica with a worker of this name, None for other actors.
    """

    def __init__(
        self,
        device: str,
        lifecycle: Lifecycle,
        messages: ActorMessages,
        *,
        model_info: Callable[[], ModelInfo | None],
        find: Callable[[str], Replica | None],
    ) -> None:
        self._device = device
        self._lifecycle = lifecycle
        self._messages = messages
        self._model_info = model_info
        self._find = find

    def on_event(self, event: Event) -> None:
        lifecycle = self._lifecycle
        if event.kind is EventKind.DIED:
            self._messages.died(event.actor, event.cause, event.at)
        replica = self._find(event.actor)
        if event.kind is EventKind.DIED and replica is not None:
            replica.board.worker_lost(event.at)
            lifecycle.progress("restarting the worker", 0.0)
            if not replica.board.has_loaded:
                # A permanent refusal recurs at every start: report it and give up.
                lifecycle.give_up(_reason(event.cause))
        elif event.kind is EventKind.ESCALATED:
            lifecycle.give_up(f"Actor {event.actor} failed too often: {_reason(event.cause)}")
        elif event.kind is EventKind.STOPPED and lifecycle.phase in ("starting", "ready", "draining"):
            # It stopped without a request: the others would wait forever.
            lifecycle.give_up(f"Actor {event.actor} has stopped unexpectedly: {_reason(event.cause)}")

    def log(self, event: Event) -> None:
        """Log a death; for a worker with the requests in its batch. A rank that waited for a stopped peer in a last
        step is logged at debug level only, and so are the others, which end with it: ranks stop one after the other."""
        replica = self._find(event.actor)
        if replica is None:
            _log_death(event)
            return
        if self._lifecycle.phase == "stopped" and _alone(event.cause):
            _log.debug("%s was running a step when the other ranks stopped: %s", event.actor, _reason(event.cause))
            return
        info, read_batch = self._model_info(), replica.board.read_batch
        batch = () if read_batch is None else read_batch(event.at)
        entries = [entry for sequence in batch if (entry := replica.journal.get(sequence)) is not None]
        _log_death(
            event,
            device=info.device if info is not None else self._device,
            batch=tuple(dict.fromkeys(entry.stream.request_id for entry in entries)),
        )


def _alone(cause: BaseException | None) -> bool:
    """Whether a rank died because its peers had stopped."""
    return isinstance(cause, PeerDied) or (isinstance(cause, ChildCrash) and cause.reason.startswith("GroupError:"))


def _reason(cause: BaseException | None) -> str:
    """The cause of a death, without the traceback of its process."""
    if cause is None:
        return "see the log"
    return cause.reason if isinstance(cause, ChildCrash) else f"{type(cause).__name__}: {cause}"


def _log_death(event: Event, **details: object) -> None:
    """Log an actor's death with the details of its cause."""
    cause = event.cause
    logged = isinstance(cause, ChildCrash) and not cause.detail  # then there is no traceback to log
    fields = {"actor": event.actor, "incarnation": event.incarnation, **details}
    line = LogEvent(f"Actor {event.actor} died: {_reason(cause)}", fields)
    _log.error(line, exc_info=None if logged else cause, extra={"actor": event.actor})
