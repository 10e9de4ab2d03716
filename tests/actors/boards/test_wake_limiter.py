from __future__ import annotations

import asyncio

import pytest

from actors.boards.wake_limiter import WakeLimiter


async def test_a_few_go_on_in_each_turn_in_their_order() -> None:
    wake_limiter, loop = WakeLimiter(3), asyncio.get_running_loop()
    passed: list[tuple[int, int]] = []
    turn = 0

    def count() -> None:
        nonlocal turn
        turn += 1
        if turn < 20:
            loop.call_soon(count)

    async def enter(number: int) -> None:
        await wake_limiter.enter()
        passed.append((turn, number))

    loop.call_soon(count)
    await asyncio.gather(*(enter(number) for number in range(10)))
    assert [number for _, number in passed] == list(range(10))
    turns = [turn for turn, _ in passed]
    assert max(turns.count(turn) for turn in turns) == 3
    assert len(wake_limiter) == 0


async def test_a_cancelled_waiter_takes_no_turn() -> None:
    wake_limiter = WakeLimiter(1)
    tasks = [asyncio.create_task(wake_limiter.enter()) for _ in range(5)]
    await asyncio.sleep(0)
    for task in tasks[1:4]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not tasks[4].cancelled()
    assert len(wake_limiter) == 0


async def test_after_many_waiters_a_single_one_does_not_wait() -> None:
    wake_limiter, loop = WakeLimiter(2), asyncio.get_running_loop()
    await asyncio.gather(*(wake_limiter.enter() for _ in range(7)))
    await asyncio.sleep(0)
    future = loop.create_future()
    wake_limiter.release(future)
    assert future.done()


def test_a_limiter_that_admits_none_is_refused() -> None:
    with pytest.raises(ValueError, match="no waiter"):
        WakeLimiter(0)
