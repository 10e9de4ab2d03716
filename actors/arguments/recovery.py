"""The arguments of what happens when something hangs or dies."""

from __future__ import annotations

from actors.arguments.argument import Argument

__all__ = ["RECOVERY_ARGUMENTS"]

RECOVERY_ARGUMENTS: tuple[Argument, ...] = (
    Argument(
        name="watchdog-timeout",
        kind="float",
        default=300.0,
        minimum=0.0,
        maximum=86400.0,
        above=True,
        group="Runtime",
        metavar="SECONDS",
        help="An actor that works on one message for so long hangs: it is killed and replaced, and the requests go on. "
        "For a worker a message is a step.",
    ),
    Argument(
        name="soft-watchdog-timeout",
        kind="float",
        default=None,
        default_text="60, or a fifth of --watchdog-timeout if that is less",
        minimum=0.0,
        maximum=86400.0,
        above=True,
        group="Runtime",
        metavar="SECONDS",
        help="An actor that works on one message for so long is reported in the log, with where it stands. Nothing "
        "else happens to it. Less than --watchdog-timeout.",
    ),
    Argument(
        name="standby-worker",
        kind="flag",
        default=True,
        opposites=("disable-standby-worker",),
        group="Runtime",
        help="Keep a prepared process beside each worker, so that a dead one is replaced without waiting for imports. "
        "It holds about 200 MB of memory and no device.",
    ),
)
