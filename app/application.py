"""The application: its routes, and the start and stop of its engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quart import Quart, Response, request
from quart.typing import ResponseReturnValue
from werkzeug.exceptions import RequestTimeout

from actors.options import ArgumentError, Arguments
from app.apis.batches.runner import BatchRunner
from app.apis.batches.storage import FileStore
from app.apis.responses.handlers import Responses
from app.apis.responses.store import ResponseStore
from app.apis.sessions import Sessions
from app.live.feed.frames import Feed
from app.route_table import DIALECTS, routes
from app.server.decoding import check_json_content
from app.server.errors import ApiError, shutting_down, too_many_uploads
from app.server.exchange import Exchange
from app.server.middleware import Application, Middleware
from app.server.progress import ProgressReport
from app.server.request_body import MAX_BODY
from app.server.routes import Route, RouteTable
from app.server.service import Service
from app.server.single_process import refuse_sibling_workers
from app.server.startup_lines import first_steps
from app.server.warmup import warm_up

if TYPE_CHECKING:
    from actors.engine.engine import Engine
    from actors.workers.early_workers import EarlyWorkers
    from app.apis.grpc.server import GrpcServer

__all__ = ["Troupe", "create_app"]

log = logging.getLogger("troupe.http")

BODY_TIMEOUT = 60
"""Seconds for a body."""

_WATCH_SECONDS = 0.1
_LAST_CHUNK_SECONDS = 2.0


class Troupe(Quart):
    """A Quart application around one engine.

    ``started`` is set when the model is loaded and warmed up, or its start failed. ``failed`` is set when the engine
    could not start or gave up; the server then ends the process with ``exit_code``: 2 for errors that a restart does
    not solve, such as a wrong model path, and 3 for all others. Under a plain ASGI server the application continues and
    answers 503 with the reason.
    """

    def __init__(self, engine: Engine, arguments: Arguments) -> None:
        super().__init__("app", static_folder=None, template_folder=None)
        self.engine = engine
        self.arguments = arguments
        self.started = asyncio.Event()
        self.failed = asyncio.Event()
        self.exit_code = 0
        self.url: str | None = None  # for clients on this machine, if known
        self.service = Service(engine, arguments, RouteTable(routes(arguments), DIALECTS))
        self.service.feed = Feed(self.service)
        self._open_stores(arguments)
        self.config["MAX_CONTENT_LENGTH"] = MAX_BODY
        self.config["BODY_TIMEOUT"] = BODY_TIMEOUT
        self.config["RESPONSE_TIMEOUT"] = None  # Quart's default of 60 s would cut streams
        self.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
        self._stop = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self.grpc: GrpcServer | None = None  # from its start on, with --grpc-mode
        for route in self.service.table.routes:
            self._serve(route)
        self.register_error_handler(Exception, self._answer_error)
        self.before_serving(self._start)
        self.after_serving(self._finish)
        self._middleware = Middleware(cast(Application, super().asgi_app), self.service)

    def _open_stores(self, arguments: Arguments) -> None:
        """What the service keeps between requests."""
        tenants = max(1, len(arguments.api_keys))
        database = None
        if arguments.file_storage_path is not None:
            folder = Path(arguments.file_storage_path).expanduser()
            limit = int(arguments.file_storage_gib * (1 << 30))
            self.service.batches = BatchRunner(self.service, FileStore(folder, limit, tenants))
            database = folder / "responses.sqlite"
        store = None
        if arguments.response_store_mib:
            seconds = arguments.response_store_hours * 3600
            store = ResponseStore(database, arguments.response_store_mib << 20, seconds, tenants)
        self.service.responses = Responses(store)
        self.service.sessions = Sessions()

    async def asgi_app(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass every connection through the middleware."""
        await self._middleware(scope, receive, send)

    def _serve(self, route: Route) -> None:
        self.add_url_rule(
            re.sub(r"\{(\w+)\}", r"<path:\1>" if route.slashes else r"<\1>", route.path),
            endpoint=f"{' '.join(route.methods)} {route.path}",
            view_func=_view(self.service, route),
            methods=list(route.methods),
            strict_slashes=True,
            merge_slashes=False,
        )

    async def _answer_error(self, error: Exception) -> ResponseReturnValue:
        exchange: Exchange = request.scope["troupe.exchange"]  # type: ignore[typeddict-item]
        answer = self.service.failure(exchange, error)
        return Response(
            exchange.dialect.body(answer, exchange.request_id),
            status=exchange.dialect.status(answer),
            headers=answer.headers(),
            content_type="application/json",
        )

    def open_grpc(self) -> None:
        """Bind the port of --grpc-mode, once; in an event loop. Raises ArgumentError without its packages, or when the
        port is in use."""
        if self.grpc is not None or not self.arguments.grpc_mode:
            return
        try:
            from app.apis.grpc.server import GrpcServer
        except ImportError as error:
            raise ArgumentError([f"grpc_mode needs its packages ({error}): pip install 'troupe-llm[grpc]'"]) from None
        try:
            self.grpc = GrpcServer(self.service)
        except OSError as error:
            raise ArgumentError([f"grpc_mode: {error}"]) from None

    # -- start and stop -----------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Start loading. The server already listens, and /ready reports the progress."""
        refuse_sibling_workers()
        self.open_grpc()
        if self.grpc is not None:
            await self.grpc.start()
        await self.engine.start(wait=False)
        self._watch = asyncio.create_task(self._watch_engine(), name="troupe-watch")
        if self.service.batches is not None:
            self.service.batches.start()

    async def _watch_engine(self) -> None:
        """Report the progress of the start, warm up, and detect an engine that gave up."""
        started = time.monotonic()
        status = self.engine.status
        with ProgressReport() as report:
            while status.phase == "starting":
                report.show(status.progress, status.stage)
                await self.engine.wait_for_start(_WATCH_SECONDS)
                status = self.engine.status
        if status.phase == "ready":
            if not self.service.warm:
                await warm_up(self.engine, self.arguments)
                self.service.warm = True
            log.info("%s is ready after %.1f s", self.service.model_name, time.monotonic() - started)
            self.started.set()
            if self.url is not None:
                for line in first_steps(self.arguments, self.url, chats=self.engine.chats):
                    log.info(line)
        while status.phase not in ("failed", "stopped"):
            await asyncio.sleep(_WATCH_SECONDS * 5)
            status = self.engine.status
        if status.phase == "failed":  # the engine has logged why
            self.exit_code = 2 if status.permanent else 3
            self.failed.set()
            self.started.set()

    async def drain(self, timeout: float | None = None) -> bool:
        """Admit no more requests and let the live ones run for ``timeout`` seconds (default: ``--shutdown-timeout``).

        Requests that still run then end with an error in their API's form. Return True if there were none.
        """
        self.engine.begin_drain()
        if self.service.batches is not None:
            await self.service.batches.stop()
        limit = self.arguments.shutdown_timeout if timeout is None else timeout
        complete = await self.engine.drain(limit)
        await self._end_live(drained=complete)
        return complete

    async def _end_live(self, *, drained: bool = False) -> None:
        """End every live exchange, and wait briefly until the clients have the last bytes.

        ``drained``: the engine has finished the requests, and only the last bytes are left to write.
        """
        ending = list(self.service.live)
        # A client that does not read may still be here at a second signal, and after the server stopped listening.
        cut = sum(not drained and exchange.interruption is None and bool(exchange.stream_ids) for exchange in ending)
        for exchange in ending:
            exchange.interruption = shutting_down()
        if cut:
            log.warning("The server stops before %d of its requests have ended; their clients receive an error.", cut)
        await self.engine.abort(all=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_CHUNK_SECONDS):
                for exchange in ending:
                    if exchange.stream_ids:
                        await exchange.closed.wait()

    async def _finish(self) -> None:
        """After the server stopped listening. A plain ASGI server has not called :meth:`drain` and has cut
        connections."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self.service.batches is not None:
            await self.service.batches.aclose()
        if self.engine.status.phase in ("ready", "draining"):
            self.engine.begin_drain()
            await self._end_live()
        if self.grpc is not None:
            await self.grpc.stop()
        await self.service.responses.aclose()
        await self.engine.aclose()


def _view(service: Service, route: Route) -> Callable[..., Awaitable[Response]]:
    """The view function of a route: read and decode the body, and call the handler."""
    variables = route.variables

    async def view(**parts: str) -> Response:
        exchange: Exchange = request.scope["troupe.exchange"]  # type: ignore[typeddict-item]
        if exchange.route is not route:
            raise ApiError(404, "There is nothing at this path.", code="not_found")
        exchange.parts = parts
        if route.body is None:
            return await route.handler(service, exchange, parts[variables[-1]] if variables else None)
        if route.needs_engine:
            service.require_ready()
        headers = request.headers
        declared = request.content_length
        if not (route.optional_body and not declared and "Transfer-Encoding" not in headers):
            kind = "application/json" if exchange.dialect.any_type else headers.get("Content-Type", "")
            check_json_content(kind, headers.get("Content-Encoding", ""))
        data = await _read_body()
        if exchange.body.refused:
            raise too_many_uploads()
        body = service.decode(data or b"{}" if route.optional_body else data, route.body, route, exchange)
        del data
        return await route.handler(service, exchange, body)

    return view


async def _read_body() -> bytes:
    """The body of the request.

    Quart's ``get_data`` uses ``asyncio.wait_for``, which on Python 3.11 swallows the cancellation when a client
    disconnects right after its request.
    """
    try:
        async with asyncio.timeout(request.body_timeout):
            data: bytes = await request.body
    except TimeoutError:
        raise RequestTimeout() from None
    request.body.clear()
    return data


def create_app(arguments: Arguments, engine: Engine | None = None, early: EarlyWorkers | None = None) -> Troupe:
    """The application for these arguments. Without ``engine`` it creates one, with the ``early`` workers if given. It
    starts and closes the engine in both cases."""
    if engine is None:
        from actors.engine.engine import Engine

        engine = Engine(arguments=arguments, early=early)
    return Troupe(engine, arguments)
