"""Actors in child processes, for the tests of these."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from runtime_child_actors import ChildProtocol, Settings

from actors.runtime import ActorRef, ActorSystem, Backoff, Supervision
from tests.kits.waiting import until

QUICK = Supervision(max_restarts=5, within=60.0, backoff=Backoff(first=0.01, jitter=0.0))
TARGET = "runtime_child_actors:ChildActor"


async def spawn(system: ActorSystem, settings: Settings | None = None, **options: Any) -> ActorRef[ChildProtocol]:
    options = {"name": "worker", "target": TARGET, "supervision": QUICK, **options}
    return await system.spawn_process(ChildProtocol, config=settings or Settings(), **options)


async def in_hand(system: ActorSystem, message: str, waiting: int = 0) -> None:
    """Wait until the first actor's child has a message of this type, and so many of its data wait behind it here."""

    def has() -> bool:
        status = system.describe()[0]
        return status.message == message and status.mailbox["data"] == waiting

    await until(has, f"{message} is not in hand")
