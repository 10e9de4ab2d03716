"""The state that all handlers share: engine, arguments, model names and live exchanges."""

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

from actors.engine.status import EngineStatus
from actors.options import Arguments
from actors.protocol.requests import LIMITS, Chat, InvalidRequest, QueueFull, SamplingParams
from actors.requests.admission import AdmissionControl, max_per_tenant
from actors.requests.intake import GENERATE
from actors.requests.streams import RequestStream
from app.parsers.registry import OutputFormat, output_format
from app.server.auth import Keyring, may_access, sees_all
from app.server.decoding import decode, shallow_objects
from app.server.errors import ApiError, invalid, shutting_down, to_api_error
from app.server.exchange import Exchange, is_label
from app.server.field_screen import FieldScreen, ignored_fields
from app.server.ids import Ids
from app.server.routes import Route, RouteTable
from app.server.upload_budget import UploadBudget
from kernels.contract.tasks import Task

if TYPE_CHECKING:
    from actors.engine.engine import Engine
    from app.apis.batches.runner import BatchRunner
    from app.apis.responses.handlers import Responses
    from app.apis.sessions import Sessions
    from app.live.feed.frames import Feed

__all__ = ["Service", "json_response", "renamed"]

Body = TypeVar("Body", bound=msgspec.Struct)

SEND_DEADLINE = 120.0
"""Seconds after which a client that reads nothing is disconnected."""


_SHOWN_NAMES = 16

_LAST = 1 << 20
"""The priority of requests for which no client waits."""


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
        self.uploads = UploadBudget()
        self.feed: Feed  # set by the application
        self.created = int(time.time())
        self.send_deadline = SEND_DEADLINE
        self.responses: Responses  # set by the application
        self.sessions: Sessions  # set by the application
        self.batches: BatchRunner | None = None  # with --file-storage-path
        self._text_admission = AdmissionControl(
            max_sequences=LIMITS.text_requests, max_tokens=None, tenants=max(1, len(arguments.api_keys))
        )
        self._screen = FieldScreen(table.routes, engine.metrics.count_unknown_field)
        self._mark_tokens: dict[str, int | None] = {}
        self._opening: tuple[int, ...] | None = None
        self._special_marks: dict[str, bool] = {}
        self.warm = arguments.skip_server_warmup  # whether the warm-up requests are done

    # -- model names ---------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The first of the model's names, used in logs and metrics."""
        return self.engine.model_name

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.engine.model_names

    @property
    def all_names(self) -> list[str]:
        """The names of the model, then those of its adapters."""
        return [*self.model_names, *(each.name for each in self.engine.adapters)]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with the model, its weights' label and its settings: OpenAI's ``system_fingerprint``."""
        settings = (self.model_name, self.arguments.weight_version, self.arguments.dtype, self.arguments.revision)
        return "fp_" + hashlib.blake2s(repr(settings).encode(), digest_size=5).hexdigest()

    def check_model(self, name: str | None, exchange: Exchange | None = None) -> str:
        """The name to answer under: the requested one, which may be the model's path; the first without any, and for
        SGLang's "default". An adapter is asked for as its name or ``model:name``; the exchange then runs with it.

        Raises 404 for a model that is not the served one.
        """
        if not name:
            return self.model_name
        if name in self.model_names or name == self.arguments.model_path:
            return name
        if name == "default":
            return self.model_name
        adapter = self.adapter_of(name)
        if exchange is not None:
            exchange.adapter = adapter
        return name

    def adapter_of(self, name: str, param: str = "model") -> str:
        """The adapter's own name of ``name`` or ``model:name``. Raises 404."""
        adapters = self.engine.adapters
        bases = [f"{base}:" for base in self.model_names if name.startswith(f"{base}:")]
        for known in (name, *(name.removeprefix(base) for base in bases)):
            if adapters.find(known) is not None:
                return known
            if reason := adapters.loss(known):
                raise ApiError(404, reason, param=param, code="model_not_found")
        served = self.all_names
        shown = ", ".join(map(repr, served[:_SHOWN_NAMES])) + " and others" * (len(served) > _SHOWN_NAMES)
        raise ApiError(
            404,
            f"The model {name[:128]!r} does not exist here; this server has {shown}.",
            param=param,
            code="model_not_found",
        )

    @functools.cached_property
    def output_format(self) -> OutputFormat:
        """The formats of the model's tool calls and thoughts; ask when the engine is ready."""
        return output_format(
            self.arguments.tool_call_parser,
            self.arguments.reasoning_parser,
            self.engine.chat_template,
            self.engine.architecture,
        )

    async def mark_token(self, mark: str) -> int | None:
        """The id of the token that a mark is; None if it is several."""
        if mark not in self._mark_tokens:
            ids = await self.engine.tokenize(mark, add_special_tokens=False)
            self._mark_tokens[mark] = ids[0] if len(ids) == 1 else None
        return self._mark_tokens[mark]

    async def opening_tokens(self) -> tuple[int, ...]:
        """The tokens that the tokenizer puts before every text; none without a tokenizer."""
        if self._opening is None:
            self._opening = ()
            if not self.arguments.skip_tokenizer_init:
                ids = await self.engine.tokenize("a")
                bare = await self.engine.tokenize("a", add_special_tokens=False)
                self._opening = tuple(ids[: ids.index(bare[0])]) if bare and bare[0] in ids else ()
        return self._opening

    async def is_special(self, mark: str) -> bool:
        """Whether a mark is a token that ``skip_special_tokens`` leaves out of texts."""
        if mark not in self._special_marks:
            token = await self.mark_token(mark)
            self._special_marks[mark] = token is not None and not await self.engine.detokenize([token])
        return self._special_marks[mark]

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> EngineStatus:
        """The engine's status; it is ready for clients only after the warm-up."""
        status = self.engine.status
        if status.phase == "ready" and not self.warm:
            return EngineStatus(phase="starting", progress=status.progress, stage="warm-up requests")
        return status

    # -- requests ---------------------------------------------------------------------------------------------------

    def require_ready(self) -> None:
        """Raise 503 unless the engine admits requests."""
        status = self.status
        if status.phase == "ready":
            return
        if status.phase == "starting":
            raise ApiError(
                503,
                f"The model is still loading ({status.stage}, {status.progress:.0%}); GET /ready reports the progress.",
                kind="service_unavailable_error",
                code="engine_starting",
                retry_after=5,
            )
        if status.phase == "failed":
            raise ApiError(
                503,
                "The engine has failed and takes no more requests; GET /health has the reason.",
                kind="service_unavailable_error",
                code="engine_failed",
            )
        raise shutting_down()

    def decode(self, data: bytes, kind: type[Body], route: Route, exchange: Exchange) -> Body:
        """Decode the body as ``kind``. Fields without effect are reported to the client; unsupported ones raise 400."""
        body, fields = decode(data, kind)
        compared: set[str] = set()
        taken = [name for name in self._screen.taken(body) if name not in route.effects]
        ignored = [*taken, *self._screen.left(fields, kind, route, "", compared)]
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
        task: Task = GENERATE,
        truncate: int | None = None,
        timeout: float | None = None,
        adapter: str | None = None,
        replica: int | None = None,
    ) -> RequestStream:
        """Submit a request to the engine before anything is awaited; the exchange closes the stream.

        ``label`` is the client's own id of the request. ``rename`` maps parameter names of the engine onto this API's,
        for error messages. ``adapter``: instead of the exchange's.
        """
        if label is not None and exchange.label is None and is_label(label):
            exchange.label = label
        if exchange.background and self.arguments.enable_priority_scheduling:
            priority = _LAST if self.arguments.schedule_low_priority_values_first else -_LAST
        try:
            stream = self.engine.generate(
                prompt,
                params,
                request_id=label if label is not None else exchange.label or exchange.request_id,
                priority=priority or 0,
                cache_salt=cache_salt,
                tenant=exchange.tenant,
                timeline=exchange.take_timeline(label),
                task=task,
                truncate=truncate,
                timeout=timeout,
                adapter=adapter or exchange.adapter,
                replica=replica,
            )
        except InvalidRequest as error:
            raise renamed(error, rename) from None
        if exchange.custom_labels:
            stream.timeline.request |= exchange.custom_labels
        exchange.own(stream)
        exchange.renames = rename or {}
        return stream

    @property
    def room(self) -> int:
        """The sequences that one client may have in the engine while the others have none."""
        bound = self.arguments.max_running_requests + self.arguments.max_queued_requests
        return max_per_tenant(bound, len(self.arguments.api_keys))

    def check_size(self, prompts: int, choices: int, param: str) -> None:
        """Raise 400 for a batch of prompts that could never fit into the queue."""
        room = self.room
        if prompts > 1 and choices <= LIMITS.n and prompts * choices > room:  # the engine refuses the others
            raise invalid(
                f"{param}: {prompts} prompts with {choices} choices each are more than the {room} that this server "
                "takes of a client at a time; split the request.",
                param=param,
            )

    @contextlib.contextmanager
    def text_request(self, exchange: Exchange) -> Iterator[None]:
        """Limit requests that use only the tokenizer, so that they do not delay generation. Each key has a share.

        Raises QueueFull.
        """
        try:
            permit = self._text_admission.admit(1, 0, time.monotonic(), exchange.tenant)
        except QueueFull:
            count = self._text_admission.sequences
            raise QueueFull(f"{count} requests for the tokenizer are running. Try again.", retry_after=1.0) from None
        try:
            yield
        finally:
            self._text_admission.release(permit, time.monotonic())

    async def abort(self, name: str, tenant: str) -> int:
        """Abort the requests with this id, the server's or the client's, and return their number.

        Only requests that the key of ``tenant`` may access: ids are no secret, and clients may choose equal ones.
        """
        ids = [
            stream_id
            for exchange in self.live
            if name in (exchange.request_id, exchange.label) and may_access(tenant, exchange.tenant)
            for stream_id in exchange.stream_ids
        ]
        if not ids:  # of one prompt of a batch
            return await self.engine.abort(name, tenant=None if sees_all(tenant) else tenant)
        return sum([await self.engine.abort(stream_id) for stream_id in ids])

    async def accepted(self, streams: Sequence[RequestStream], rename: Mapping[str, str] | None = None) -> None:
        """Wait until the request of each stream is tokenized, checked and queued: the last moment for a 400."""
        try:
            if len(streams) == 1:
                await streams[0].ready()
                return
            # Together, so that the tokenizer can encode them in one call. All are awaited, so that none is orphaned.
            outcomes = await asyncio.gather(*(stream.ready() for stream in streams), return_exceptions=True)
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome
        except InvalidRequest as error:
            raise renamed(error, rename) from None

    def owner(self, exchange: Exchange) -> str:
        """Whose the stored things of this exchange are: the same after a restart, whatever other keys there are."""
        return self.keyring.owner(exchange.tenant)

    def sees(self, exchange: Exchange, owner: str) -> bool:
        """Whether this exchange may see what ``owner`` has stored."""
        return self.keyring.is_admin(exchange.tenant) or owner == self.owner(exchange)

    def failure(self, exchange: Exchange, error: BaseException) -> ApiError:
        """The answer for an error. An abort by the server has the server's reason."""
        if isinstance(error, InvalidRequest):
            error = renamed(error, exchange.renames)
        answer = to_api_error(error, exchange.request_id)
        if answer.code == "request_aborted" and exchange.interruption is not None:
            answer = exchange.interruption
        exchange.error = answer
        exchange.outcome = answer.code or str(answer.status)
        return answer

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
