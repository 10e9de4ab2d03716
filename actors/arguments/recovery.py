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
        name="model-load-timeout",
        kind="float",
        default=1800.0,
        minimum=0.0,
        maximum=86400.0,
        above=True,
        group="Runtime",
        metavar="SECONDS",
        help="A worker that has not loaded the model by then ends: the first start fails, a later one is repeated.",
    ),
    Argument(
        name="max-worker-restarts",
        kind="int",
        default=6,
        minimum=0,
        maximum=10_000,
        group="Runtime",
        help="How often within 300 s the workers are replaced; the next death ends the engine. A death that narrows "
        "down which request caused an earlier one does not count.",
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
