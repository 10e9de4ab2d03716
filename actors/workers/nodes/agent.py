"""NodeAgent: starts and kills the workers of a node other than 0."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from actors.options import ArgumentError, Arguments
from actors.runtime import Link, LocalProcess, first_bytes
from actors.workers.nodes.handshake import HandshakeError, Purpose, introduce, resolve
from actors.workers.nodes.messages import (
    BEAT_SECONDS,
    CONTROL_LIMIT,
    SILENT_BEATS,
    Beat,
    End,
    Exited,
    FromAgent,
    Hello,
    Kill,
    Launch,
    Launched,
    NotLaunched,
    Refused,
    pack,
    unpack_hub,
)
from actors.workers.placement import Placement

__all__ = ["NodeAgent", "NodeError"]

_log = logging.getLogger("troupe.nodes")

_CONNECT_SECONDS = 10.0
_RETRY_SECONDS = 0.5
_PATIENCE_SECONDS = 300.0
"""Seconds without node 0, by default."""


class NodeError(Exception):
    """The node cannot serve. ``permanent``: the same command will never be able to."""

    def __init__(self, reason: str, *, permanent: bool) -> None:
        super().__init__(reason)
        self.permanent = permanent


class NodeAgent:
    """Serves node 0 until that ends.

    Its workers live as long as the connection to node 0: when that is lost they are killed, and the agent connects
    again. It decides by its own arguments what a worker process is: node 0 only says which worker to start.

    ``model``: the model's fingerprint (``actors.text.fingerprint``), which node 0 compares with its own.
    """

    def __init__(
        self, arguments: Arguments, placement: Placement, *, version: str, secret: bytes, model: Mapping[str, str]
    ) -> None:
        self._arguments = arguments
        self._placement = placement
        self._version = version
        self._secret = secret
        self._model = dict(model)

    async def run(self) -> bool:
        """Serve; returns whether node 0 ended in order. Raises NodeError."""
        patience = float(self._arguments.dist_timeout or _PATIENCE_SECONDS)
        deadline, reported = time.monotonic() + patience, ""
        while True:
            try:
                sock = await self.connect(Purpose("control", self._arguments.node_rank))
                session = _Session(self, sock)
                try:
                    end = await session.serve()
                finally:
                    await session.close()
                if isinstance(end, End):
                    return not end.failed
                if end is None or not end.permanent:
                    reason = "the connection to node 0 was lost" if end is None else end.reason
                else:
                    raise NodeError(f"node 0 refused this node: {end.reason}", permanent=True)
                if session.joined:
                    deadline = time.monotonic() + patience
            except (HandshakeError, OSError, TimeoutError) as error:
                what = str(error) or "no answer"
                reason = f"node 0 at {self._arguments.dist_init_addr} cannot be joined: {what}"
            if time.monotonic() > deadline:
                raise NodeError(f"gave up after {patience:g} s: {reason}", permanent=False)
            if reason != reported:
                reported = reason
                _log.warning("%s. Retrying.", reason)
            await asyncio.sleep(_RETRY_SECONDS)

    async def connect(self, purpose: Purpose) -> socket.socket:
        """An authenticated connection to node 0. Raises HandshakeError, OSError or TimeoutError."""
        family, place = await resolve(self._arguments.dist_init_addr or "")
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(_CONNECT_SECONDS):
                await asyncio.get_running_loop().sock_connect(sock, place)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await introduce(sock, self._secret, purpose)
        except BaseException:
            sock.close()
            raise
        return sock

    def hello(self) -> Hello:
        arguments = self._arguments
        device = self._placement.label
        return Hello(self._version, arguments.nnodes, arguments.layout, device, first_bytes(), self._model)

    async def start(self, launch: int, worker: int) -> LocalProcess:
        """A worker process whose links are connections to node 0. Raises OSError, HandshakeError, ArgumentError or
        TimeoutError."""
        arguments = self._arguments
        if not 0 <= worker < arguments.workers or arguments.node_of(worker) != arguments.node_rank:
            raise OSError(f"worker {worker} is not one of node {arguments.node_rank}")
        environment = self._placement.environment(
            arguments, worker % arguments.node_workers, os.environ, arguments.watchdog_timeout
        )
        with contextlib.ExitStack() as ends:
            mailbox = ends.enter_context(await self.connect(Purpose("mailbox", arguments.node_rank, launch)))
            thread = ends.enter_context(await self.connect(Purpose("thread", arguments.node_rank, launch)))
            for sock in (mailbox, thread):
                sock.setblocking(True)  # shared with the process, which waits for bytes
            return LocalProcess(environment, (mailbox, thread))


class _Session:
    """One connection to node 0, and the workers that live as long as it. ``joined``: whether node 0 admitted it."""

    def __init__(self, agent: NodeAgent, sock: socket.socket) -> None:
        self.joined = False
        self._agent = agent
        self._silent = 0
        self._processes: dict[int, LocalProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[End | Refused | None] = self._loop.create_future()
        self._changed = asyncio.Event()
        self._link = Link(self._loop, sock, self._on_frame, self._on_lost, CONTROL_LIMIT)

    async def serve(self) -> End | Refused | None:
        """Serve until node 0 ends or refuses; None: the connection was lost."""
        self._send(self._agent.hello())
        self._start(self._beat())
        return await self._end

    async def close(self) -> None:
        """Kill the workers and wait for their ends, so that their devices are free."""
        self._link.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._processes.values():
            process.kill()
        while self._processes:
            self._changed.clear()
            await self._changed.wait()

    def _send(self, message: FromAgent) -> None:
        self._link.send(0, 0, pack(message))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_frame(self, kind: int, correlation: int, body: memoryview) -> None:
        self._silent = 0
        message = unpack_hub(body)
        if not (self.joined or isinstance(message, Refused)):
            self.joined = True
            _log.info("Joined node 0.")
        if isinstance(message, Launch):
            self._start(self._launch(message))
        elif isinstance(message, Kill):
            if (process := self._processes.get(message.launch)) is not None:
                process.kill()
        elif isinstance(message, End | Refused):
            self._finish(message)

    def _on_lost(self, error: BaseException | None) -> None:
        if error is not None:
            _log.error("Node 0 sent an invalid frame: %s", error)
        self._finish(None)

    def _finish(self, end: End | Refused | None) -> None:
        if not self._end.done():
            self._end.set_result(end)

    async def _launch(self, message: Launch) -> None:
        launch = message.launch
        try:
            process = await self._agent.start(launch, message.worker)
        except (OSError, HandshakeError, ArgumentError, TimeoutError) as error:
            self._send(NotLaunched(launch, str(error) or type(error).__name__))
            return
        self._processes[launch] = process

        def exited() -> None:
            del self._processes[launch]
            self._changed.set()
            self._send(Exited(launch, process.returncode or 0))

        process.watch_exit(self._loop, exited)
        self._send(Launched(launch, process.pid))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._send(Beat())
            self._silent += 1
            if self._silent > SILENT_BEATS:
                self._finish(None)
