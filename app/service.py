"""What every handler works with: the engine, the arguments, the names the model answers to, and the live exchanges."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
from quart import Response

from actors.admission import Door, most_for_one
from actors.arguments import Arguments
from actors.requests import LIMITS, Chat, InvalidRequest, QueueFull, SamplingParams
from actors.status import EngineStatus
from actors.streams import RequestStream
from app.auth import Keyring, may_touch, sees_all
from app.decoding import decode, shallow_objects
from app.errors import ApiError, invalid, shutting_down, to_api_error
from app.exchange import Exchange, is_label
from app.field_screen import FieldScreen, ignored_fields
from app.ids import Ids
from app.routes import Route, RouteTable
from app.stage.frames import Stage

if TYPE_CHECKING:
    from actors.engine import Engine

__all__ = ["Service", "json_response", "renamed"]

Body = TypeVar("Body", bound=msgspec.Struct)

SEND_DEADLINE = 120.0
"""Seconds that a client may leave a piece of its response unread before it loses the rest."""


def json_response(value: object, status: int = 200) -> Response:
    """A JSON answer of msgspec-encodable data."""
    return Response(msgspec.json.encode(value), status=status, content_type="application/json")


class Service:
    """One engine as one HTTP service."""

    def __init__(self, engine: Engine, arguments: Arguments, table: RouteTable) -> None:
        self.engine = engine
        self.arguments = arguments
        self.table = table
        self.keyring = Keyring(
            user=arguments.api_keys,
            admin=(arguments.admin_api_key,) if arguments.admin_api_key else (),
        )
        self.ids = Ids()
        self.live: set[Exchange] = set()
        self.stage = Stage(self)
        self.created = int(time.time())
        self.send_deadline = SEND_DEADLINE
        self._text_door = Door(
            max_sequences=LIMITS.text_requests, max_tokens=None, tenants=max(1, len(arguments.api_keys))
        )
        self._screen = FieldScreen(table.routes, engine.metrics.count_unknown_field)
        self.warm = arguments.skip_server_warmup  # whether the warm-up requests are done

    # -- what the model is called ---------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The first of its names: that of logs and metrics."""
        return self.engine.model_name

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.engine.model_names

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with the model, its weights' label and its settings: OpenAI's ``system_fingerprint``."""
        told = (self.model_name, self.arguments.weight_version, self.arguments.dtype, self.arguments.revision)
        return "fp_" + hashlib.blake2s(repr(told).encode(), digest_size=5).hexdigest()

    def check_model(self, name: str | None) -> str:
        """The name to answer under: the requested one, which may be the model's path; the first without any.

        Raises 404 for a model that is not the served one.
        """
        if not name:
            return self.model_name
        if name in self.model_names or name == self.arguments.model_path:
            return name
        served = " or ".join(map(repr, self.model_names))
        raise ApiError(
            404,
            f"The model {name[:128]!r} does not exist here; this server has {served}.",
            param="model",
            code="model_not_found",
        )

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> EngineStatus:
        """The engine's, which is not ready for clients before the warm-up is done."""
        status = self.engine.status
        if status.phase == "ready" and not self.warm:
            return EngineStatus(phase="starting", progress=status.progress, stage="warm-up requests")
        return status

    # -- requests ---------------------------------------------------------------------------------------------------

    def require_ready(self) -> None:
        """503 unless the engine takes requests."""
        status = self.status
        if status.phase == "ready":
            return
        if status.phase == "starting":
            raise ApiError(
                503,
                f"The model is still loading ({status.stage}, {status.progress:.0%}); GET /ready tells how far it is.",
                kind="service_unavailable_error",
                code="engine_starting",
                retry_after=5,
            )
        if status.phase == "failed":
            raise ApiError(
                503,
                "The engine has failed and takes no more requests; GET /health says why.",
                kind="service_unavailable_error",
                code="engine_failed",
            )
        raise shutting_down()

    def decode(self, data: bytes, kind: type[Body], route: Route, exchange: Exchange) -> Body:
        """The body as ``kind``. Fields without effect are named to the client; others raise 400."""
        body, fields = decode(data, kind)
        compared: set[str] = set()
        ignored = [*self._screen.taken(body), *self._screen.left(fields, kind, route, "", compared)]
        for name, part in route.nested:
            for inner in shallow_objects(fields.get(name), name):
                ignored += self._screen.left(inner, part, route, name, compared)
        if getattr(body, "priority", None) and not self.arguments.enable_priority_scheduling:
            ignored.append("priority")
        exchange.ignored = ignored_fields(set(ignored))
        return body

    def submit(
        self,
        exchange: Exchange,
        prompt: str | Sequence[int] | Chat,
        params: SamplingParams,
        *,
        priority: int | None = None,
        cache_salt: str | None = None,
        label: str | None = None,
        rename: Mapping[str, str] | None = None,
    ) -> RequestStream:
        """Take a place in the engine's queue, before anything is awaited; the exchange closes the stream.

        ``label`` is the client's own id of the request. ``rename`` maps parameter names of the engine onto this API's,
        for error messages.
        """
        if label is not None and exchange.label is None and is_label(label):
            exchange.label = label
        try:
            stream = self.engine.generate(
                prompt,
                params,
                request_id=label if label is not None else exchange.label or exchange.request_id,
                priority=priority or 0,
                cache_salt=cache_salt,
                tenant=exchange.tenant,
                timeline=exchange.take_timeline(label),
            )
        except InvalidRequest as error:
            raise renamed(error, rename) from None
        if exchange.custom_labels:
            stream.timeline.request |= exchange.custom_labels
        exchange.own(stream)
        return stream

    def check_size(self, prompts: int, choices: int, param: str) -> None:
        """400 for several prompts that could never enter the queue, however long their client waits."""
        bound = self.arguments.max_running_requests + self.arguments.max_queued_requests
        room = most_for_one(bound, len(self.arguments.api_keys))
        if prompts > 1 and choices <= LIMITS.n and prompts * choices > room:  # the engine refuses the others
            raise invalid(
                f"{param}: {prompts} prompts with {choices} choices each are more than the {room} that this server "
                "takes of a client at a time; split the request.",
                param=param,
            )

    @contextlib.contextmanager
    def text_request(self, exchange: Exchange) -> Iterator[None]:
        """Work for the tokenizer alone: so many at a time, lest those who generate wait for it, and a share a key.

        Raises QueueFull.
        """
        try:
            ticket = self._text_door.enter(1, 0, time.monotonic(), exchange.tenant)
        except QueueFull:
            count = self._text_door.sequences
            raise QueueFull(f"{count} requests for the tokenizer are under way. Try again.", retry_after=1.0) from None
        try:
            yield
        finally:
            self._text_door.leave(ticket, time.monotonic())

    async def abort(self, name: str, tenant: str) -> int:
        """Abort the requests of this id, given by the server or by the client; how many. Ids match as a whole.

        Only requests that the key of ``tenant`` may touch: an id is no secret, and clients choose the same ones.
        """
        ids = [
            stream_id
            for exchange in self.live
            if name in (exchange.request_id, exchange.label) and may_touch(tenant, exchange.tenant)
            for stream_id in exchange.stream_ids
        ]
        if not ids:  # of one prompt of a batch
            return await self.engine.abort(name, tenant=None if sees_all(tenant) else tenant)
        return sum([await self.engine.abort(stream_id) for stream_id in ids])

    async def accepted(self, streams: Sequence[RequestStream], rename: Mapping[str, str] | None = None) -> None:
        """Wait until every stream's request was tokenized, checked and queued: the last moment for a 400."""
        try:
            if len(streams) == 1:
                await streams[0].ready()
                return
            # Together, so that the tokenizer may encode them in one call; each is waited for, so that none is orphaned.
            outcomes = await asyncio.gather(*(stream.ready() for stream in streams), return_exceptions=True)
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome
        except InvalidRequest as error:
            raise renamed(error, rename) from None

    def failure(self, exchange: Exchange, error: BaseException) -> ApiError:
        """What a client is told of an error. An abort of the server's own making tells its reason."""
        told = to_api_error(error, exchange.request_id)
        if told.code == "request_aborted" and exchange.interruption is not None:
            told = exchange.interruption
        exchange.error = told
        exchange.outcome = told.code or str(told.status)
        return told

    def count_http(self, endpoint: str, status: int) -> None:
        self.engine.metrics.count_http(endpoint, status)


def renamed(error: InvalidRequest, names: Mapping[str, str] | None) -> InvalidRequest:
    """The same error under the field's name in this API."""
    if not names or error.param is None:
        return error
    head = error.param.partition("[")[0]
    name = names.get(head)
    if name is None:
        return error
    message = str(error)
    if message.startswith(head):
        message = name + message[len(head) :]
    return InvalidRequest(message, param=name + error.param[len(head) :], code=error.code)
