"""Members of a pool, lent to tenants in turn."""

from __future__ import annotations

import asyncio

import pytest

from actors.text.fair_pool import FairPool


class Users:
    """Uses of one member; each waits to be released."""

    def __init__(self, turns: FairPool[str]) -> None:
        self.turns = turns
        self.began: list[str] = []
        self.release: dict[str, asyncio.Event] = {}

    def start(self, tenant: str, number: int) -> asyncio.Task[None]:
        return asyncio.create_task(self._use(tenant, f"{tenant}{number}"))

    async def _use(self, tenant: str, name: str) -> None:
        self.release[name] = asyncio.Event()
        async with self.turns.lend(tenant):
            self.began.append(name)
            await self.release[name].wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_tenant_waits_for_one_use_of_another_at_most() -> None:
    users = Users(FairPool(["only"]))
    tasks = [users.start("a", number) for number in range(4)]
    await settle()
    tasks += [users.start("b", number) for number in range(2)]
    for _ in range(6):
        await settle()
        users.release[users.began[-1]].set()
    await asyncio.gather(*tasks)
    assert users.began == ["a0", "b0", "a1", "b1", "a2", "a3"]


async def test_every_member_is_used_before_anybody_waits() -> None:
    users = Users(FairPool(["x", "y"]))
    tasks = [users.start("a", number) for number in range(3)]
    await settle()
    assert users.began == ["a0", "a1"]
    for name in ("a0", "a1", "a2"):
        users.release[name].set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("lent_already", [False, True])
async def test_a_use_cancelled_while_it_waits_blocks_no_other(lent_already: bool) -> None:
    users = Users(FairPool(["only"]))
    first, second, third = [users.start("a", number) for number in range(3)]
    await settle()
    if lent_already:
        users.release["a0"].set()
        await first
    second.cancel()
    await settle()
    for name in ("a0", "a2"):
        users.release[name].set()
    await asyncio.gather(first, third)
    assert "a2" in users.began
