from __future__ import annotations

import asyncio

import pytest

from actors.turnstile import Turnstile


async def test_a_few_go_on_in_each_turn_in_their_order() -> None:
    turnstile, loop = Turnstile(3), asyncio.get_running_loop()
    went: list[tuple[int, int]] = []
    turn = 0

    def count() -> None:
        nonlocal turn
        turn += 1
        if turn < 20:
            loop.call_soon(count)

    async def enter(number: int) -> None:
        await turnstile.enter()
        went.append((turn, number))

    loop.call_soon(count)
    await asyncio.gather(*(enter(number) for number in range(10)))
    assert [number for _, number in went] == list(range(10))
    turns = [turn for turn, _ in went]
    assert max(turns.count(turn) for turn in turns) == 3
    assert len(turnstile) == 0


async def test_who_was_cancelled_takes_nobodys_turn() -> None:
    turnstile = Turnstile(1)
    tasks = [asyncio.create_task(turnstile.enter()) for _ in range(5)]
    await asyncio.sleep(0)
    for task in tasks[1:4]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not tasks[4].cancelled()
    assert len(turnstile) == 0


async def test_after_a_crowd_one_alone_does_not_wait() -> None:
    turnstile, loop = Turnstile(2), asyncio.get_running_loop()
    await asyncio.gather(*(turnstile.enter() for _ in range(7)))
    await asyncio.sleep(0)
    future = loop.create_future()
    turnstile.release(future)
    assert future.done()


def test_a_turnstile_that_lets_nobody_pass_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Turnstile(0)
