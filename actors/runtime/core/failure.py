"""Failure of a system: a crash that no supervisor could handle."""

from collections.abc import Generator
from typing import Any

import anyio

__all__ = ["Failure"]


class Failure:
    """Set once, with the cause, when a crash escalates past the last supervisor. Awaiting it returns the cause."""

    def __init__(self) -> None:
        self.cause: BaseException | None = None
        self.actor: str | None = None
        self._event = anyio.Event()

    def set(self, actor: str, cause: BaseException) -> None:
        if self.cause is None:
            self.actor, self.cause = actor, cause
            self._event.set()

    def is_set(self) -> bool:
        return self.cause is not None

    async def wait(self) -> BaseException:
        await self._event.wait()
        assert self.cause is not None
        return self.cause

    def __await__(self) -> Generator[Any, None, BaseException]:
        return self.wait().__await__()
