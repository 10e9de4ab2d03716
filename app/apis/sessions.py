"""Sessions of SGLang's API: requests that continue earlier ones by their ids, so a client sends only what is new.

A session keeps token ids, nothing else: their keys and values are found again in the prefix cache. Sessions live in
this process alone, each for its key, for a time, and at most so many of a key.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from actors.protocol.requests import Chat, Delta, InvalidRequest
from app.server.errors import ApiError, invalid
from app.server.exchange import Exchange
from app.server.service import Service, renamed

__all__ = ["MAX_SECONDS", "SessionParams", "SessionRequest", "Sessions", "begin_session_request"]

_SECONDS = 3600.0
MAX_SECONDS = 86_400.0
_MAX_SESSIONS = 256
_MAX_TOKENS = 4 << 20
_REQUEST_TOKENS = 256
"""What each request counts beside its own tokens: short ones are bounded by their number."""

Prompt = str | list[int] | Chat


class SessionParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The request of a session that this one continues.

    ``rid``: its id; null starts anew. ``offset``: how many of its tokens are kept, all but so many if it is negative;
    0 and null: all. ``drop_previous_output``: keep its prompt only. ``replace``: drop what has continued it, or with a
    null ``rid`` all requests. A streaming session continues its last request that was completed, and takes ``id`` only.
    """

    id: Annotated[str, Meta(max_length=512)]
    rid: Annotated[str, Meta(max_length=256)] | None = None
    offset: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


class _Request:
    """One request of a session. ``exchange``: while it runs."""

    def __init__(self, prompt: array[int], parent: str | None, exchange: Exchange) -> None:
        self.prompt = prompt
        self.output = array("i")
        self.parent = parent
        self.exchange: Exchange | None = exchange

    def __len__(self) -> int:
        return _REQUEST_TOKENS + len(self.prompt) + len(self.output)


class _Session:
    def __init__(self, seconds: float, used: float, *, streaming: bool) -> None:
        self.seconds = seconds
        self.streaming = streaming
        self.used = used
        self.requests: dict[str, _Request] = {}
        self.running: _Request | None = None  # of a streaming session

    def __len__(self) -> int:
        return sum(map(len, self.requests.values()))

    def forget_refused(self) -> None:
        """Remove requests that ended without a token."""
        for rid, request in list(self.requests.items()):
            if request.exchange is not None and not _runs(request):
                request.exchange = None
                if not request.output:
                    del self.requests[rid]

    def remove(self, rid: str) -> list[_Request]:
        """Remove what continues a request, directly or not; what was removed."""
        gone = {rid}
        for name, request in self.requests.items():  # a request stands after the one that it continues
            if request.parent in gone:
                gone.add(name)
        return [self.requests.pop(name) for name in gone - {rid}]


class SessionRequest:
    """One request of a session, on its way. ``prompt``: the whole prompt. ``replaced``: the engine's ids of requests to
    be aborted. ``finish`` is called when it is complete."""

    def __init__(self, request: _Request, replaced: list[str], finish: Callable[[], None]) -> None:
        self._request = request
        self._finish = finish
        self.prompt = list(request.prompt)
        self.replaced = replaced

    async def follow(self, stream: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
        """The same deltas. A streaming session keeps the request when it is complete, others in any case."""
        try:
            async for delta in stream:
                self._request.output.extend(delta.token_ids)
                if delta.finish_reason is not None:
                    self._request.exchange = None
                    self._finish()
                yield delta
        finally:
            self._request.exchange = None


class Sessions:
    """All sessions of a server, by the owner and the session's id."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._sessions: dict[tuple[str, str], _Session] = {}
        self._clock = clock

    def open(self, owner: str, name: str | None, *, streaming: bool, seconds: float | None) -> str:
        """The id of a new session. Raises 400 if it is open already."""
        self._expire()
        name = name or secrets.token_hex(16)
        if (owner, name) in self._sessions:
            raise invalid(f"session_id: the session {name[:64]!r} is open already. Close it first.", param="session_id")
        session = _Session(_SECONDS if seconds is None else seconds, self._clock(), streaming=streaming)
        self._sessions[owner, name] = session
        self._shrink(owner, session)
        return name

    def close(self, owner: str, name: str) -> None:
        """Raises 404 for a session that is not open."""
        self._expire()
        if self._sessions.pop((owner, name), None) is None:
            raise ApiError(404, _gone(name), param="session_id", code="session_not_found")

    def begin(
        self,
        owner: str,
        params: SessionParams,
        ids: list[int],
        *,
        opening: tuple[int, ...],
        rid: str,
        exchange: Exchange,
    ) -> SessionRequest:
        """Add a request with ``ids`` after what it continues. ``opening``: the tokens that begin every text; they are
        taken off what continues another. Raises 400."""
        self._expire()
        session = self._sessions.get((owner, params.id))
        if session is None:
            raise invalid(f"session_params.id: {_gone(params.id)}", param="session_params.id", code="session_not_found")
        session.forget_refused()
        replaced: list[_Request] = []
        if session.streaming:
            parent = _of_stream(session, params)
        else:
            parent = self._of_tree(session, params, replaced)
        history = array("i")
        if parent is not None:
            before = session.requests[parent]
            history = before.prompt[:] if params.drop_previous_output else before.prompt + before.output
            if params.offset:
                history = history[: params.offset]
        if history and opening and tuple(ids[: len(opening)]) == opening:
            ids = ids[len(opening) :]
        request = _Request(history + array("i", ids), parent, exchange)
        session.used = self._clock()
        if session.streaming:
            session.running = request
        else:
            session.requests.pop(rid, None)
            session.requests[rid] = request
        self._shrink(owner, session)
        if len(session) > _MAX_TOKENS:
            session.requests.pop(rid, None)
            raise invalid(
                f"session_params: the requests of this session have more than {_MAX_TOKENS} tokens, counting "
                f"{_REQUEST_TOKENS} more for each request. Replace some, or close it.",
                param="session_params",
            )

        def finish() -> None:
            session.used = self._clock()
            if session.streaming:
                session.requests = {rid: request}

        running = [one.exchange for one in replaced if one.exchange is not None and _runs(one)]
        return SessionRequest(request, [name for other in running for name in other.stream_ids], finish)

    @staticmethod
    def _of_tree(session: _Session, params: SessionParams, replaced: list[_Request]) -> str | None:
        """The id of the request that is continued."""
        if params.rid is None:
            if params.replace:
                replaced += session.requests.values()
                session.requests.clear()
            return None
        request = session.requests.get(params.rid)
        if request is None:
            raise invalid(
                f"session_params.rid: this session has no request {params.rid[:64]!r}. Send the id of an answer of it.",
                param="session_params.rid",
            )
        if params.replace:
            replaced += [request, *session.remove(params.rid)]
        elif _runs(request):
            raise invalid(
                "session_params.rid: this request is still running. Wait for its end, or set replace.",
                param="session_params.rid",
            )
        return params.rid

    def _expire(self) -> None:
        now = self._clock()
        for key, session in list(self._sessions.items()):
            running = [session.running, *session.requests.values()]
            if now - session.used > session.seconds and not any(map(_runs, running)):
                del self._sessions[key]

    def _shrink(self, owner: str, used: _Session) -> None:
        """Close the sessions of an owner that were not used for the longest time, while there are too many."""
        mine = sorted(
            ((key, session) for key, session in self._sessions.items() if key[0] == owner),
            key=lambda item: item[1].used,
        )
        count, tokens = len(mine), sum(len(session) for _, session in mine)
        for key, session in mine:
            if count <= _MAX_SESSIONS and tokens <= _MAX_TOKENS:
                break
            if session is not used:
                del self._sessions[key]
                count, tokens = count - 1, tokens - len(session)


def _of_stream(session: _Session, params: SessionParams) -> str | None:
    for field in ("replace", "offset", "drop_previous_output"):
        if getattr(params, field):
            raise invalid(
                f"session_params.{field}: a streaming session is only continued at its end. Leave it out.",
                param=f"session_params.{field}",
            )
    if session.running is not None and _runs(session.running):
        raise invalid(
            "session_params.id: a request of this streaming session is still running. Wait for its end.",
            param="session_params.id",
        )
    return next(iter(session.requests), None)


def _runs(request: _Request | None) -> bool:
    exchange = None if request is None else request.exchange
    return exchange is not None and exchange.error is None and not exchange.closed.is_set()


def _gone(name: str) -> str:
    return f"the session {name[:64]!r} is not open: it was closed, or not used for too long. Open it."


async def begin_session_request(
    service: Service,
    exchange: Exchange,
    params: SessionParams,
    prompts: Sequence[Prompt],
    *,
    choices: int,
    rid: str,
    names: dict[str, str],
) -> SessionRequest:
    """The turn of a session that continues with the only prompt. ``rid``: the id in the answer. Raises 400."""
    if len(prompts) * choices != 1:
        raise invalid("session_params: takes one prompt and one choice. Send several requests.", param="session_params")
    [prompt] = prompts
    if isinstance(prompt, list):
        ids = prompt
    else:
        with service.text_request(exchange):
            try:
                ids = await service.engine.tokenize(
                    prompt, add_special_tokens=isinstance(prompt, str), tenant=exchange.tenant
                )
            except InvalidRequest as error:
                raise renamed(error, names) from None
    opening = await service.opening_tokens()
    session_request = service.sessions.begin(
        service.owner(exchange), params, ids, opening=opening, rid=rid, exchange=exchange
    )
    for name in session_request.replaced:
        await service.engine.abort(name)
    return session_request
