"""What all lives of an actor in a child process have in common, and the launch of one."""

import logging
from collections.abc import Mapping
from typing import Any, Union

import msgspec

from actors.runtime.blank_process import BlankProcess
from actors.runtime.cell import Cell
from actors.runtime.child_process import ChildProcess
from actors.runtime.frames import FRAME_LIMIT
from actors.runtime.message import messages_of, reply_type
from actors.runtime.wire import ChildSpec, name_of

__all__ = ["ProcessPlan", "launch", "plan_process"]


class ProcessPlan(msgspec.Struct, frozen=True):
    """What every incarnation of one child actor has in common. Times in seconds, sizes in bytes."""

    target: str
    config: bytes
    config_type: str | None
    environment: dict[str, str]
    start_timeout: float
    heartbeat: float
    heartbeat_timeout: float | None
    window: int
    limit: int
    events: Any  # msgspec decoder of what the child may tell, or None
    replies: dict[Any, Any]  # message class -> msgspec decoder of its reply


def plan_process(
    protocol: type,
    *,
    target: str,
    config: Any,
    config_type: type | None,
    environment: Mapping[str, str] | None,
    event_types: frozenset[Any],
    start_timeout: float,
    heartbeat: float,
    heartbeat_timeout: float | None,
    window: int,
    limit: int = FRAME_LIMIT,
) -> ProcessPlan:
    """Check what can be checked before a child is started. Raises ValueError or TypeError that says what to change."""
    messages = list(messages_of(protocol))
    if not messages:
        raise ValueError(f"no message of {protocol.__name__} is known here: import the module that defines them")
    if target.count(":") != 1:
        raise ValueError(f"target must be 'package.module:Class', got {target!r}")
    if config is not None and config_type is None:
        config_type = type(config)
    return ProcessPlan(
        target=target,
        config=msgspec.msgpack.encode(config),
        config_type=None if config_type is None else name_of(config_type),
        environment=dict(environment or {}),
        start_timeout=start_timeout,
        heartbeat=heartbeat,
        heartbeat_timeout=heartbeat_timeout,
        window=window,
        limit=limit,
        events=msgspec.msgpack.Decoder(Union[tuple(event_types)]) if event_types else None,  # noqa: UP007
        replies={message: msgspec.msgpack.Decoder(reply_type(message)) for message in messages},
    )


def launch(cell: Cell, plan: ProcessPlan, blank: BlankProcess | None = None) -> ChildProcess:
    """Start a child that gets ready to be the actor of `cell`, or let `blank` be it where that can."""
    if blank is not None and (blank.process.poll() is not None or blank.environment != plan.environment):
        blank.close()
        blank = None
    spec = ChildSpec(
        name=cell.name,
        target=plan.target,
        config_type=plan.config_type,
        config=plan.config,
        window=plan.window,
        limit=plan.limit,
        heartbeat=plan.heartbeat,
        log_level=logging.getLogger("troupe").getEffectiveLevel(),
    )
    return ChildProcess(cell.loop, spec, plan.environment, blank)
