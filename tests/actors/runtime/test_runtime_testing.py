"""The test kit itself."""

import asyncio

import pytest

from actors.runtime import ActorDied, Message, RequestError
from actors.runtime.testing import TestKit, VirtualClock


class LogProtocol: ...


class Say(Message[LogProtocol, None], frozen=True):
    text: str


class Ask(Message[LogProtocol, int], frozen=True):
    value: int


async def interleaving(seed: int) -> list[str]:
    order: list[str] = []
    async with TestKit(seed) as kit:
        refs = []
        for name in "abcd":
            ref, probe = await kit.probe(Say, name=name)
            probe.answer(Say, lambda message, name=name: order.append(name + message.text))
            refs.append(ref)
        for text in "123":
            for ref in refs:
                ref.offer(Say(text))
        await kit.run_until_idle()
        kit.assert_quiet()
    return order


async def test_a_seed_decides_the_interleaving() -> None:
    orders = [await interleaving(seed) for seed in range(10)]
    assert orders == [await interleaving(seed) for seed in range(10)]
    assert len({tuple(order) for order in orders}) > 5
    for order in orders:
        for name in "abcd":
            assert [entry[1] for entry in order if entry[0] == name] == ["1", "2", "3"], "each mailbox keeps its order"


async def test_a_probe_records_and_answers_as_configured() -> None:
    async with TestKit() as kit:
        ref, probe = await kit.probe(Ask, Say)
        probe.answer(Ask, lambda message: message.value + 1)
        assert await ref.ask(Ask(1), timeout=1) == 2
        probe.answer(Ask, 7)
        assert await ref.ask(Ask(2), timeout=1) == 7
        probe.answer(Ask, RequestError("no"))
        with pytest.raises(RequestError, match="no"):
            await ref.ask(Ask(3), timeout=1)
        await ref.tell(Say("x"))
        await kit.run_until_idle()
        assert probe.received == [Ask(1), Ask(2), Ask(3), Say("x")]


async def test_assert_quiet_fails_on_waiting_lost_and_crashed_messages() -> None:
    async with TestKit() as kit:
        ref, probe = await kit.probe(Ask, Say)
        kit.assert_quiet()
        held = asyncio.Event()

        async def wait(message: Say) -> None:
            await held.wait()

        probe.answer(Say, wait)
        await ref.tell(Say("held"))
        await kit.run_until_idle()
        with pytest.raises(AssertionError, match="still handles Say"):
            kit.assert_quiet()
        await ref.tell(Say("queued"))
        with pytest.raises(AssertionError, match="messages wait"):
            kit.assert_quiet()
        held.set()
        await kit.run_until_idle()
        kit.assert_quiet()
        probe.answer(Ask, ValueError("crash"))
        with pytest.raises(ActorDied):
            await ref.ask(Ask(1), timeout=1)
        with pytest.raises(AssertionError, match="not quiet"):
            kit.assert_quiet()


async def test_virtual_time_moves_only_when_requested_and_in_order() -> None:
    clock = VirtualClock(start=10.0)
    fired: list[tuple[str, float]] = []
    for name, delay in (("late", 2.0), ("early", 1.0), ("early too", 1.0), ("never", 1.5)):
        timer = clock.call_later(delay, lambda name=name: fired.append((name, clock.monotonic())))
    timer.cancel()
    clock.call_later(1.0, lambda: clock.call_later(0.5, lambda: fired.append(("chained", clock.monotonic()))))
    assert clock.next_timer() == 11.0
    clock.advance_to(11.75)
    assert fired == [("early", 11.0), ("early too", 11.0), ("chained", 11.5)]
    assert clock.monotonic() == 11.75
    sleeper = asyncio.create_task(clock.sleep(5.0))
    await asyncio.sleep(0.01)
    assert not sleeper.done()
    clock.advance_to(16.75)
    await sleeper
