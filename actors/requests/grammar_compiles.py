"""Workers compile a grammar before its request is submitted, so that no step waits for it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict

from actors.protocol import CompileGrammar
from actors.protocol.requests import LIMITS, CompilerBusy, Grammar, InvalidRequest, RequestFailed
from actors.requests.admission import max_per_tenant
from actors.requests.router import Route
from actors.runtime import ActorDied

__all__ = ["GrammarCompiles"]

_KNOWN = 128
"""Grammars known to be compiled; fewer than a worker keeps."""
_WAITING = 64
"""Different grammars that may wait at a time. A worker compiles two at once, most in milliseconds."""
_TIMEOUT_SECONDS = 60.0
"""Seconds. A worker answers sooner, but it may have to load the model first."""
_RETRY_SECONDS = 5.0

_DEADLY = (
    "The model's worker died twice while it compiled this request's grammar, so it is not compiled again for some "
    "minutes. Change the grammar; report it if a simple one does this."
)
_REFUSED_SECONDS = 600.0
"""Seconds for which a grammar at which two workers died is refused: memory may have been short then."""

Key = tuple[int, int | None, Grammar]
"""By the identity of the route, and the epoch of its worker."""


class GrammarCompiles:
    """The grammars of one engine's requests. ``tenants``: those that share the places of what waits. ``replicas``: each
    has grammars that are known."""

    def __init__(self, tenants: int = 1, replicas: int = 1) -> None:
        self._max_known = _KNOWN * replicas
        self._known: OrderedDict[Key, None] = OrderedDict()
        self._waiting: Counter[tuple[str, Key]] = Counter()
        """Requests that wait, by tenant and grammar."""
        self._share = max_per_tenant(_WAITING, tenants)
        self._deadly: OrderedDict[Grammar, float] = OrderedDict()
        """Those at whose compilation two workers died, and when."""
        self._suspects = asyncio.Lock()
        """Held by the one grammar that is compiled again after a death. No other is compiled meanwhile, so that a
        further crash has one cause."""

    async def compile(self, grammar: Grammar, route: Route, tenant: str = "") -> bool:
        """Let the workers of a route compile; whether this took time.

        Where a worker does not answer, the request goes on: its next incarnation compiles at the admission. Raises
        InvalidRequest for a wrong grammar, CompilerBusy, and RequestFailed for a grammar at whose compilation two
        workers died.
        """
        epoch = None if route.board.worker is None else route.board.worker[1]
        key = (id(route), epoch, grammar)
        if epoch is not None and key in self._known:
            self._known.move_to_end(key)
            return False
        place = (tenant, key)
        of_tenant = sum(owner == tenant for owner, _ in self._waiting)
        if place not in self._waiting and (of_tenant >= self._share or len(self._waiting) >= _WAITING):
            raise CompilerBusy(f"{of_tenant} grammars of yours wait to be compiled.", retry_after=_RETRY_SECONDS)
        self._waiting[place] += 1
        try:
            answered = await self._ask(grammar, route)
        finally:
            self._waiting[place] -= 1
            self._waiting += Counter()  # drops grammars without waiting requests
        if not answered or epoch is None:  # a worker that loads answers at once, and compiles nothing
            return False
        self._known[key] = None
        if len(self._known) > self._max_known:
            self._known.popitem(last=False)
        return True

    async def _ask(self, grammar: Grammar, route: Route) -> bool:
        if time.monotonic() - self._deadly.get(grammar, -_REFUSED_SECONDS) < _REFUSED_SECONDS:
            raise RequestFailed(_DEADLY)
        async with self._suspects:
            pass
        try:
            return await _ask(grammar, route)
        except ActorDied:
            pass  # of this grammar, of one beside it, or of other work
        async with self._suspects:
            try:
                return await _ask(grammar, route)
            except ActorDied:
                self._deadly[grammar] = time.monotonic()
                self._deadly.move_to_end(grammar)
                if len(self._deadly) > _KNOWN:
                    self._deadly.popitem(last=False)
                raise RequestFailed(_DEADLY) from None


async def _ask(grammar: Grammar, route: Route) -> bool:
    """Whether all workers have compiled it. Raises ActorDied where one died at it."""
    message = CompileGrammar(grammar=grammar, timeout=LIMITS.grammar_seconds)
    replies = [worker.ask(message, timeout=_TIMEOUT_SECONDS) for worker in route.workers]
    for answer in await asyncio.gather(*replies, return_exceptions=True):
        if answer == CompileGrammar.BUSY:
            raise CompilerBusy("The worker compiles other grammars.", retry_after=_RETRY_SECONDS)
        if isinstance(answer, str) and answer:
            raise InvalidRequest(f"grammar: {answer.rstrip('.')}.", param="grammar", code="invalid_grammar")
        if isinstance(answer, BaseException):
            if not isinstance(answer, Exception) or (isinstance(answer, ActorDied) and answer.cause is not None):
                raise answer
            return False
    return True
