"""Grammars are compiled by the workers of a route before their requests are submitted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from actors.protocol import CompileGrammar
from actors.protocol.requests import CompilerBusy, Grammar, InvalidRequest, RequestFailed
from actors.requests.grammar_compiles import GrammarCompiles
from actors.runtime import ActorDied

RED = Grammar("choice", '["red"]')


class Worker:
    """Answers when its gate is open."""

    def __init__(self, reply: Any = "") -> None:
        self.reply, self.calls, self.gate = reply, 0, asyncio.Event()
        self.gate.set()

    async def ask(self, message: CompileGrammar, *, timeout: float) -> str:
        assert timeout > message.timeout
        self.calls += 1
        await self.gate.wait()
        if isinstance(self.reply, BaseException):
            raise self.reply
        return str(self.reply)


def route(*workers: Worker, epoch: int | None = 1) -> Any:
    worker = None if epoch is None else (None, epoch)
    return SimpleNamespace(board=SimpleNamespace(worker=worker), workers=workers)


async def test_a_known_grammar_is_not_requested_again() -> None:
    grammars, worker = GrammarCompiles(), Worker()
    one, other = route(worker), route(Worker())
    assert await grammars.compile(RED, one)
    assert not await grammars.compile(RED, one)
    assert worker.calls == 1
    assert await grammars.compile(RED, other)
    one.board.worker = (None, 2)  # a new worker knows nothing
    assert await grammars.compile(RED, one)


async def test_a_wrong_grammar_is_the_requests_error() -> None:
    with pytest.raises(InvalidRequest, match="no text matches it") as caught:
        await GrammarCompiles().compile(RED, route(Worker(), Worker("no text matches it")))
    assert (caught.value.param, caught.value.code) == ("grammar", "invalid_grammar")


async def test_a_request_goes_on_where_a_worker_does_not_answer() -> None:
    grammars, worker = GrammarCompiles(), Worker(TimeoutError())
    assert not await grammars.compile(RED, route(worker))
    assert not await grammars.compile(RED, route(worker))
    assert worker.calls == 2


async def test_a_busy_worker_is_not_the_grammars_fault() -> None:
    with pytest.raises(CompilerBusy) as caught:
        await GrammarCompiles().compile(RED, route(Worker(CompileGrammar.BUSY)))
    assert caught.value.retry_after > 0


async def test_too_many_waiting_grammars_are_refused_at_once() -> None:
    grammars, worker = GrammarCompiles(), Worker()
    worker.gate.clear()
    place = route(worker)
    waiting = [asyncio.create_task(grammars.compile(Grammar("regex", f"a{n}"), place)) for n in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(CompilerBusy, match="64 grammars of yours"):
        await grammars.compile(RED, place)
    same = asyncio.create_task(grammars.compile(Grammar("regex", "a0"), place))  # waits for what is under way
    waiting[1].cancel()
    worker.gate.set()
    await asyncio.wait([*waiting, same])
    assert same.result()
    assert await grammars.compile(RED, place)


class Mortal(Worker):
    """Dies at the first questions."""

    def __init__(self, deaths: int) -> None:
        super().__init__()
        self.deaths = deaths

    async def ask(self, message: CompileGrammar, *, timeout: float) -> str:
        answer = await super().ask(message, timeout=timeout)
        if self.calls <= self.deaths:
            raise ActorDied("worker", RuntimeError("out of memory"))
        return answer


async def test_a_grammar_at_whose_compilation_a_worker_died_gets_one_more() -> None:
    grammars, worker = GrammarCompiles(), Mortal(1)
    assert await grammars.compile(RED, route(worker))
    assert worker.calls == 2


async def test_a_grammar_at_whose_compilation_two_workers_died_gets_no_third() -> None:
    grammars, worker = GrammarCompiles(), Mortal(2)
    for _ in range(2):
        with pytest.raises(RequestFailed, match="died twice"):
            await grammars.compile(RED, route(worker))
    assert worker.calls == 2
    assert await grammars.compile(Grammar("regex", "a"), route(worker))


class Killed(Worker):
    """Dies whenever the deadly grammar is among those that it compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.compiling: set[Grammar] = set()
        self.died = asyncio.Event()

    async def ask(self, message: CompileGrammar, *, timeout: float) -> str:
        self.compiling.add(message.grammar)
        died = self.died
        await asyncio.sleep(0)
        if RED in self.compiling:
            self.compiling.clear()
            self.died = asyncio.Event()
            died.set()
        if died.is_set():
            raise ActorDied("worker", RuntimeError("out of memory"))
        self.compiling.discard(message.grammar)
        return ""


async def test_grammars_beside_a_deadly_one_are_compiled() -> None:
    grammars, place = GrammarCompiles(), route(Killed())
    innocent = [Grammar("regex", f"a{n}") for n in range(10)]
    found = await asyncio.gather(
        *(grammars.compile(grammar, place) for grammar in [RED, *innocent]), return_exceptions=True
    )
    assert isinstance(found[0], RequestFailed)
    assert found[1:] == [True] * 10


async def test_a_deadly_grammar_is_tried_again_after_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, worker = GrammarCompiles(), Mortal(2)
    with pytest.raises(RequestFailed):
        await grammars.compile(RED, route(worker))
    monkeypatch.setattr("actors.requests.grammar_compiles._REFUSED_SECONDS", 0.0)
    assert await grammars.compile(RED, route(worker))


async def test_one_tenant_leaves_places_to_others() -> None:
    grammars, worker = GrammarCompiles(tenants=2), Worker()
    worker.gate.clear()
    place = route(worker)
    greedy = [
        asyncio.create_task(grammars.compile(Grammar("regex", f"a{number}"), place, "greedy")) for number in range(64)
    ]
    await asyncio.sleep(0)
    assert isinstance(greedy[-1].exception(), CompilerBusy)
    other = asyncio.create_task(grammars.compile(RED, place, "modest"))
    await asyncio.sleep(0)
    worker.gate.set()
    assert await other
    await asyncio.wait(greedy)
