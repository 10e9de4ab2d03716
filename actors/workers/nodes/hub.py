"""Hub: admits the agents of other nodes to node 0, and launches workers on their nodes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from actors.options import Arguments
from actors.runtime import LaunchedProcess, Link
from actors.workers.launchers.launcher import WorkerLauncher
from actors.workers.nodes.handshake import HandshakeError, Purpose, admit, resolve
from actors.workers.nodes.messages import (
    BEAT_SECONDS,
    CONTROL_LIMIT,
    SILENT_BEATS,
    Beat,
    End,
    Exited,
    FromHub,
    Hello,
    Kill,
    Launch,
    Launched,
    NotLaunched,
    Refused,
    pack,
    unpack_agent,
)
from kernels.contract.topology import WorkerId

__all__ = ["Hub", "RemoteProcess"]

_log = logging.getLogger("troupe.nodes")

_LAUNCH_SECONDS = 60.0
"""Until a launched process must have connected."""

_LAST_FRAMES_SECONDS = 0.05
"""Time for the last frames of a worker, which travel on other connections than the report of its exit."""

_SPARE_HANDSHAKES = 64
"""Handshakes at a time beside those of workers; further connections are closed."""

_LINKS = 4
"""Connections of a worker and its standby. All of them may come at once."""


class RemoteProcess:
    """A :class:`~actors.runtime.LaunchedProcess` on another node. Valid once all of its parts have arrived."""

    def __init__(self, first_bytes: bytes, kill: Callable[[], None]) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.start_of_stream = first_bytes
        self.kill = kill
        self.links: dict[str, socket.socket] = {}
        self._on_exit: Callable[[], None] | None = None

    @property
    def sock(self) -> socket.socket:
        return self.links["mailbox"]

    @property
    def thread_sock(self) -> socket.socket:
        return self.links["thread"]

    @property
    def is_complete(self) -> bool:
        return bool(self.pid) and len(self.links) == 2

    def watch_exit(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[], None]) -> None:
        self._on_exit = on_exit
        if self.returncode is not None:
            loop.call_soon(on_exit)

    def exited(self, returncode: int) -> None:
        """Record its end."""
        if self.returncode is None:
            self.returncode = returncode
            if self._on_exit is not None:
                asyncio.get_running_loop().call_later(_LAST_FRAMES_SECONDS, self._on_exit)

    def discard(self) -> None:
        """Kill it and close its links, where nothing else will."""
        self.kill()
        for sock in self.links.values():
            sock.close()


class _Node:
    """The connection of an agent. ``silent``: beats since its last frame."""

    def __init__(self, hub: Hub, number: int, sock: socket.socket, peer: str) -> None:
        self.number = number
        self.peer = peer
        self.silent = 0
        self.hello: Hello | None = None
        self.processes: dict[int, RemoteProcess] = {}  # by launch
        self.starting: dict[int, asyncio.Future[None]] = {}  # of those that are not complete
        self._hub = hub
        self.link = Link(asyncio.get_running_loop(), sock, self._on_frame, self._on_lost, CONTROL_LIMIT)

    def send(self, message: FromHub) -> None:
        self.link.send(0, 0, pack(message))

    def _on_frame(self, kind: int, correlation: int, body: memoryview) -> None:
        self.silent = 0
        message = unpack_agent(body)
        if isinstance(message, Hello):
            if self.hello is not None:
                raise ValueError("a second greeting")
            self.hello = message
            self._hub.greeted(self)
        elif not isinstance(message, Beat) and (process := self.processes.get(message.launch)) is not None:
            self._on_report(message, process)

    def _on_report(self, message: Launched | NotLaunched | Exited, process: RemoteProcess) -> None:
        if isinstance(message, Launched):
            process.pid = message.pid
            self.advance(message.launch)
        elif isinstance(message, NotLaunched):
            self._fail(message.launch, OSError(f"node {self.number}: {message.reason}"))
        else:
            del self.processes[message.launch]
            process.exited(message.returncode)
            self._fail(message.launch, OSError(f"node {self.number}: the process ended while it started"))

    def advance(self, launch: int) -> None:
        """A part of a starting process has arrived."""
        waiting = self.starting[launch]
        if self.processes[launch].is_complete and not waiting.done():
            waiting.set_result(None)

    def _fail(self, launch: int, error: OSError) -> None:
        waiting = self.starting.pop(launch, None)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    def _on_lost(self, error: BaseException | None) -> None:
        self.lose("" if error is None else f": {error}")

    def lose(self, reason: str) -> None:
        """Close the connection. All of its processes count as dead: the agent kills them when it loses it."""
        self.link.close()
        self._hub.lost(self, reason)
        for launch in list(self.starting):
            self._fail(launch, ConnectionError(f"node {self.number} was lost"))
        for process in self.processes.values():
            process.exited(-signal.SIGKILL)
        self.processes.clear()


class Hub:
    """A :class:`~actors.workers.launchers.launcher.WorkerLauncher` that starts workers of other nodes there, and those
    of node 0 by ``local``.

    ``version``: of this program. ``device``: what the workers run on. Use it as an asynchronous context: inside, it
    listens at --dist-init-addr; at the end it stops the nodes. Raises OSError if it cannot listen.
    """

    def __init__(
        self, arguments: Arguments, *, version: str, device: str, secret: bytes, local: WorkerLauncher
    ) -> None:
        self.failed = False  # whether node 0 ends because of an error
        self._arguments = arguments
        self._version = version
        self._device = device
        self._secret = secret
        self._local = local
        self._connected: set[_Node] = set()
        self._nodes: dict[int, _Node] = {}  # those that joined
        self._model: Mapping[str, str] | None = None
        self._joined = asyncio.Event()
        self._launches = 0
        self._handshakes = 0
        self._max_handshakes = _SPARE_HANDSHAKES + _LINKS * arguments.workers
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def missing(self) -> list[int]:
        """The nodes that are not connected."""
        return [number for number in range(1, self._arguments.nnodes) if number not in self._nodes]

    async def __aenter__(self) -> Hub:
        address = self._arguments.dist_init_addr or ""
        family, place = await resolve(address)
        self._listener = listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(place)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
        self._start(self._accept(listener))
        self._start(self._beat())
        _log.info("Waiting for %d more nodes at %s (%s).", self._arguments.nnodes - 1, address, place[0])
        return self

    async def __aexit__(self, *error: object) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        nodes = list(self._connected)
        self._nodes.clear()  # none of them counts as lost
        for node in nodes:
            node.send(End(self.failed))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEAT_SECONDS):
                await asyncio.gather(*(node.link.flush() for node in nodes))
        for node in nodes:
            node.lose("")

    # -- launching

    async def launch(self, worker: WorkerId, environment: Mapping[str, str]) -> LaunchedProcess:
        """Start a process for a worker; waits for its node. ``environment`` is that of node 0: an agent makes its own.
        Raises OSError."""
        number = self._arguments.node_of(worker.number)
        if number == 0:
            return await self._local.launch(worker, environment)
        while True:
            while number not in self._nodes:
                self._joined.clear()
                await self._joined.wait()
            with contextlib.suppress(ConnectionError):  # it was lost: wait for its return
                return await self._launch(self._nodes[number], worker.number)

    def host(self, worker: WorkerId) -> str | None:
        node = self._nodes.get(self._arguments.node_of(worker.number))
        return None if node is None else node.peer

    async def _launch(self, node: _Node, worker: int) -> RemoteProcess:
        assert node.hello is not None
        self._launches += 1
        launch = self._launches
        process = node.processes[launch] = RemoteProcess(node.hello.first_bytes, partial(node.send, Kill(launch)))
        done = node.starting[launch] = asyncio.get_running_loop().create_future()
        node.send(Launch(launch, worker))
        try:
            async with asyncio.timeout(_LAUNCH_SECONDS):
                await done
        except BaseException as error:
            node.processes.pop(launch, None)
            process.discard()
            if isinstance(error, TimeoutError):
                raise OSError(f"node {node.number} started no process within {_LAUNCH_SECONDS:g} s") from error
            raise
        finally:
            node.starting.pop(launch, None)
        return process

    # -- nodes

    def greeted(self, node: _Node) -> None:
        """Let a node join, or refuse it."""
        hello, arguments = node.hello, self._arguments
        assert hello is not None
        wrong = _difference(hello.model, self._model or hello.model)
        for name, theirs, ours in (
            ("layout", hello.layout, arguments.layout),
            ("--nnodes", hello.nnodes, arguments.nnodes),
            ("version", hello.version, self._version),
            ("device", hello.device, self._device),
        ):
            if theirs != ours:
                wrong = f"its {name} is {theirs}, that of node 0 is {ours}"
        if not 0 < node.number < arguments.nnodes:
            wrong = f"--node-rank {node.number} must be from 1 to {arguments.nnodes - 1}"
        if not wrong and node.number not in self._nodes:
            self._nodes[node.number] = node
            self._joined.set()
            _log.info("Node %d at %s joined.", node.number, node.peer)
            node.send(Beat())  # it has joined
            return
        reason = wrong or f"node {node.number} is already connected, from {self._nodes[node.number].peer}"
        self._refuse(node, reason, permanent=bool(wrong))

    def _refuse(self, node: _Node, reason: str, *, permanent: bool) -> None:
        _log.warning("Node %d at %s was refused: %s", node.number, node.peer, reason)
        node.send(Refused(reason, permanent=permanent))

    def compare(self, model: Mapping[str, str]) -> None:
        """Set the model's fingerprint, and refuse nodes with another one, including those that have joined. Call it
        before workers are launched."""
        self._model = model
        for node in list(self._nodes.values()):
            assert node.hello is not None
            if wrong := _difference(node.hello.model, model):
                del self._nodes[node.number]
                self._refuse(node, wrong, permanent=True)

    def lost(self, node: _Node, reason: str) -> None:
        """Forget a node whose connection has ended."""
        self._connected.discard(node)
        if self._nodes.get(node.number) is node:
            del self._nodes[node.number]
            _log.error(
                "Node %d at %s was lost%s. Its workers restart when it reconnects.", node.number, node.peer, reason
            )

    # -- connections

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(listener)
            except OSError:  # such as no file descriptors left
                await asyncio.sleep(0.1)
                continue
            if self._handshakes >= self._max_handshakes:
                sock.close()
            else:
                self._handshakes += 1
                self._start(self._admit(sock, str(peer[0])))

    async def _admit(self, sock: socket.socket, peer: str) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            purpose = await admit(sock, self._secret)
        except (HandshakeError, OSError, TimeoutError) as error:
            sock.close()
            _log.warning("A connection from %s was refused: %s", peer, str(error) or "no answer")
        except BaseException:
            sock.close()
            raise
        else:
            self._attach(purpose, sock, peer)
        finally:
            self._handshakes -= 1

    def _attach(self, purpose: Purpose, sock: socket.socket, peer: str) -> None:
        """Put an authenticated connection to its use."""
        if purpose.kind == "control":
            self._connected.add(_Node(self, purpose.node, sock, peer))
            return
        node = self._nodes.get(purpose.node)
        if node is None or purpose.launch not in node.starting:  # given up meanwhile
            sock.close()
            return
        links = node.processes[purpose.launch].links
        if purpose.kind in links:
            sock.close()
            return
        links[purpose.kind] = sock
        node.advance(purpose.launch)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            for node in list(self._connected):
                node.send(Beat())
                node.silent += 1
                if node.silent > SILENT_BEATS:
                    node.lose(f": no heartbeat for {node.silent} s")


def _difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """An error that names the first part of the model that differs between two nodes; empty: none differs."""
    for name in {**ours, **theirs}:
        if theirs.get(name) != ours.get(name):
            found, expected = (each.get(name, "missing") for each in (theirs, ours))
            differs = f"its model differs from node 0 in {name}: {found}, not {expected}"
            return f"{differs}; give all nodes the same model at the same path"
    return ""
