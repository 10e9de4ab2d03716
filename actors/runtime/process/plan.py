"""ProcessPlan: the settings of all incarnations of an actor in a child process, and their launch."""

import logging
from collections.abc import Mapping
from typing import Any, Union

import msgspec

from actors.runtime.core.cell import Cell
from actors.runtime.core.message import messages_of, reply_type
from actors.runtime.process.child_process import ChildProcess
from actors.runtime.process.frames import FRAME_LIMIT
from actors.runtime.process.launched import Launcher
from actors.runtime.process.wire import ChildSpec, name_of

__all__ = ["ProcessPlan", "launch", "plan_process"]


class ProcessPlan(msgspec.Struct, frozen=True):
    """Settings of all incarnations of one child actor. Times in seconds, sizes in bytes."""

    target: str
    config: bytes
    config_type: str | None
    environment: dict[str, str]
    start_timeout: float
    heartbeat: float
    heartbeat_timeout: float | None
    window: int
    limit: int
    events: Any  # msgspec decoder of the child's events, or None
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
    """Validate the settings before a child is started. Raises ValueError or TypeError."""
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


async def launch(cell: Cell, plan: ProcessPlan, launcher: Launcher) -> ChildProcess:
    """Start a child that prepares to become the actor of ``cell``. Raises OSError when no process can be started."""
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
    return ChildProcess(cell.loop, spec, await launcher(plan.environment))
