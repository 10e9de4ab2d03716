"""The arguments of watchdogs, timeouts and restarts."""

from __future__ import annotations

from typing import Annotated

from actors.options.declaration import ArgumentSpec
from actors.options.scheduling import SchedulingArguments

__all__ = ["RecoveryArguments"]


class RecoveryArguments(SchedulingArguments, frozen=True, kw_only=True):
    """The arguments of watchdogs, timeouts and restarts."""

    watchdog_timeout: Annotated[
        float,
        ArgumentSpec(
            group="Runtime",
            minimum=0.0,
            maximum=31536000.0,  # a year: recipes turn the watchdog off with a number that is never reached
            above=True,
            metavar="SECONDS",
            help="An actor that handles one message for longer than this is considered hung: it is killed and "
            "replaced, and requests continue. For a worker a message is a step.",
        ),
    ] = 300.0

    soft_watchdog_timeout: Annotated[
        float | None,
        ArgumentSpec(
            group="Runtime",
            default_text="60, or a fifth of --watchdog-timeout if that is less",
            minimum=0.0,
            maximum=86400.0,
            above=True,
            metavar="SECONDS",
            help="An actor that handles one message for longer than this is logged with its stacks, without further "
            "action. Less than --watchdog-timeout.",
        ),
    ] = None

    model_load_timeout: Annotated[
        float,
        ArgumentSpec(
            group="Runtime",
            minimum=0.0,
            maximum=86400.0,
            above=True,
            metavar="SECONDS",
            help="A worker that has not loaded the model within this time ends: the first start fails, a later one "
            "is retried.",
        ),
    ] = 1800.0

    max_worker_restarts: Annotated[
        int,
        ArgumentSpec(
            group="Runtime",
            minimum=0,
            maximum=10_000,
            help="Most replacements of the workers within 300 s; the next crash ends the engine. A crash that "
            "narrows down which request caused an earlier one does not count.",
        ),
    ] = 6

    standby_worker: Annotated[
        bool,
        ArgumentSpec(
            group="Runtime",
            opposites=("disable-standby-worker",),
            help="Keep a prepared process beside each worker, so that a dead one is replaced without waiting for "
            "imports. It uses about 200 MB of memory and no device.",
        ),
    ] = True
