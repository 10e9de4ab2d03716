"""What the intake does where workers cannot compile a request's grammar."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.protocol import CompileGrammar, GrammarCompiled
from actors.protocol.requests import EngineNotReady, Grammar, InvalidRequest, RequestFailed
from actors.requests.intake import Intake
from actors.runtime import ActorDied
from actors.workers.worker import Worker

GRAMMAR = Grammar("regex", "ab")


class Asked:
    """A route whose worker gives these answers."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.asked = list(answers), 0
        self.workers, self.board = [self], SimpleNamespace(worker=(None, 1))
        self.intake = cast(Any, SimpleNamespace(_compiled=OrderedDict(), _deadly=OrderedDict()))

    async def ask(self, message: CompileGrammar, timeout: float) -> object:
        self.asked += 1
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def compile(self) -> None:
        await Intake._compile(self.intake, GRAMMAR, cast(Any, self))


def death() -> ActorDied:
    return ActorDied("worker", RuntimeError("out of memory"))


@pytest.mark.asyncio
async def test_a_grammar_at_whose_compilation_a_worker_died_gets_one_more() -> None:
    route = Asked(death(), GrammarCompiled())
    await route.compile()
    await route.compile()  # it is known now
    assert route.asked == 2


@pytest.mark.asyncio
async def test_a_grammar_at_whose_compilation_two_workers_died_gets_no_third() -> None:
    route = Asked(death(), death(), GrammarCompiled())
    for _ in range(2):
        with pytest.raises(RequestFailed, match="died twice"):
            await route.compile()
    assert route.asked == 2


@pytest.mark.asyncio
async def test_a_grammar_that_was_not_begun_is_to_be_sent_again() -> None:
    with pytest.raises(EngineNotReady, match="again soon"):
        await Asked(GrammarCompiled(busy=True)).compile()
    with pytest.raises(InvalidRequest, match="unclosed"):
        await Asked(GrammarCompiled("unclosed group")).compile()


def test_a_worker_tells_an_endless_compilation_from_one_that_waits() -> None:
    threads, release = ThreadPoolExecutor(1), threading.Event()
    runner = SimpleNamespace(compile_grammar=lambda grammar: threads.submit(release.wait))
    worker = cast(Any, SimpleNamespace(_runner=runner, _epoch=1))
    message = CompileGrammar(grammar=GRAMMAR, timeout=0.05)
    running, waiting = (cast("Future[Any]", Worker.compile_grammar(worker, message, 0.0)) for _ in range(2))
    assert "simplify" in running.result(10).error
    assert waiting.result(10) == GrammarCompiled(busy=True)
    release.set()
    threads.shutdown()
