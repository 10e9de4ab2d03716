"""What every handler works with: the engine, the arguments, the names the model answers to, and the live exchanges."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
from quart import Response

from actors.arguments import Arguments
from actors.requests import LIMITS, Chat, InvalidRequest, SamplingParams
from app.auth import Keyring
from app.decoding import UnknownFields, decode
from app.errors import ApiError, invalid, shutting_down, to_api_error
from app.exchange import Exchange
from app.routes import Route, RouteTable
from app.serving import ServingEngine, ServingStream

__all__ = ["Service", "json_response"]

Body = TypeVar("Body", bound=msgspec.Struct)

SEND_DEADLINE = 120.0
"""Seconds that a client may leave a piece of its response unread before it loses the rest."""


def json_response(value: object, status: int = 200) -> Response:
    """A JSON answer of msgspec-encodable data."""
    return Response(msgspec.json.encode(value), status=status, content_type="application/json")


class Service:
    """One engine as one HTTP service."""

    def __init__(self, engine: ServingEngine, arguments: Arguments, table: RouteTable) -> None:
        self.engine = engine
        self.arguments = arguments
        self.table = table
        self.keyring = Keyring(
            user=(arguments.api_key,) if arguments.api_key else (),
            admin=(arguments.admin_api_key,) if arguments.admin_api_key else (),
        )
        self.live: set[Exchange] = set()
        self.created = int(time.time())
        self.send_deadline = SEND_DEADLINE
        self.unknown = UnknownFields(lambda name: engine.metrics.unknown_fields.labels(name).inc())
        self.aborting: ApiError | None = None  # set when the server ends what still runs

    # -- what the model is called ---------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        return self.engine.model_name

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with the model, its weights' label and its settings: OpenAI's ``system_fingerprint``."""
        told = (self.model_name, self.arguments.weight_version, self.arguments.dtype, self.arguments.revision)
        return "fp_" + hashlib.blake2s(repr(told).encode(), digest_size=5).hexdigest()

    def check_model(self, name: str | None) -> None:
        """404 for a model that is not the served one. No name, or the model's path, means the served one."""
        if not name or name in (self.model_name, self.arguments.model_path):
            return
        raise ApiError(
            404,
            f"The model {name[:128]!r} does not exist here; this server has {self.model_name!r}.",
            param="model",
            code="model_not_found",
        )

    # -- requests ---------------------------------------------------------------------------------------------------

    def require_ready(self) -> None:
        """503 unless the engine takes requests."""
        status = self.engine.status
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

    def decode(self, data: bytes, kind: type[Body], route: Route) -> Body:
        """The body as ``kind``; fields that would change the answer but are not built yet are refused."""
        from app.openai.refusals import refuse

        body, fields = decode(data, kind)
        known = known_fields(kind)
        for name in fields.keys() - known:
            if name in route.refused:
                refuse(name, fields[name])
            elif name not in route.ignored:
                self.unknown(name)
        return body

    def count_unknown(self, fields: Mapping[str, object], kind: type[msgspec.Struct], prefix: str) -> None:
        for name in fields.keys() - known_fields(kind):
            self.unknown(f"{prefix}{name}")

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
        suffix: str = "",
    ) -> ServingStream:
        """Take a place in the engine's queue, before anything is awaited; the exchange closes the stream.

        ``rename`` maps parameter names of the engine onto this API's, for error messages.
        """
        if priority is not None and not self.arguments.enable_priority_scheduling:
            if self.arguments.abort_on_priority_when_disabled:
                raise invalid(
                    "priority: priority scheduling is off here; leave the field out, "
                    "or start the server with --enable-priority-scheduling.",
                    param="priority",
                )
            priority = None
        if cache_salt is not None and len(cache_salt) > LIMITS.cache_salt_chars:
            raise invalid(
                f"cache_salt: at most {LIMITS.cache_salt_chars} characters, not {len(cache_salt)}.", param="cache_salt"
            )
        if label is not None and len(label) > LIMITS.request_id_chars:
            raise invalid(f"rid: at most {LIMITS.request_id_chars} characters, not {len(label)}.", param="rid")
        if label is not None and exchange.label is None and label.isprintable() and label.isascii():
            exchange.label = label
        try:
            stream = self.engine.generate(
                prompt,
                params,
                request_id=exchange.request_id + suffix,
                priority=priority or 0,
                timeout=self.arguments.request_timeout,
                cache_salt=cache_salt,
                label=label if label is not None else exchange.label,
                traceparent=exchange.traceparent,
            )
        except InvalidRequest as error:
            raise renamed(error, rename) from None
        exchange.own(stream)
        return stream

    async def accepted(self, streams: Sequence[ServingStream], rename: Mapping[str, str] | None = None) -> None:
        """Wait until every stream's request was tokenized, checked and queued: the last moment for a 400."""
        for stream in streams:
            try:
                await stream.ready()
            except InvalidRequest as error:
                raise renamed(error, rename) from None

    def failure(self, exchange: Exchange, error: BaseException) -> ApiError:
        """What a client is told of an error. An abort of the server's own making tells its reason."""
        told = to_api_error(error, exchange.request_id)
        if told.code == "request_aborted" and exchange.interruption is not None:
            told = exchange.interruption
        exchange.outcome = told.code or str(told.status)
        return told

    def count_http(self, endpoint: str, status: int) -> None:
        self.engine.metrics.http_requests.labels(endpoint, str(status)).inc()


@functools.cache
def known_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Field names as a body spells them."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


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
