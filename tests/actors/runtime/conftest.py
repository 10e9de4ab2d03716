from collections.abc import AsyncIterator

import pytest

from actors.runtime import ActorSystem


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem() as system:
        yield system
