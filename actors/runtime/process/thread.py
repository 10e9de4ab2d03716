"""The thread of an actor in a child process: see ``handles_in_thread``."""

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Union

import msgspec

from actors.runtime.core.actor import EarlyReply, Later
from actors.runtime.core.errors import MessageTooLarge, RequestError
from actors.runtime.core.message import Message, current_actor, current_traceparent
from actors.runtime.process.frames import Frames, Kind, frame
from actors.runtime.process.wire import pack_error, unpack_header

__all__ = ["ActorThread"]


class ActorThread:
    """Reads, handles and answers messages from ``sock`` until :meth:`end` or the end of the stream.

    ``handlers``: by message type, called with the message and its send time. ``crash``: called with any exception but a
    RequestError, from this thread or from the one that completes a Later; then the thread ends. ``limit``: bytes of a
    frame.
    """

    def __init__(
        self,
        name: str,
        sock: socket.socket,
        handlers: Mapping[type[Message[Any, Any]], Callable[[Any, float], Any]],
        crash: Callable[[BaseException], None],
        limit: int,
    ) -> None:
        self._name = name
        self._sock = sock
        self._handlers = handlers
        self._crash = crash
        self._limit = limit
        self._decode = msgspec.msgpack.Decoder(Union[tuple(handlers)]).decode  # noqa: UP007 - made at run time
        self._encode = msgspec.msgpack.Encoder().encode
        self._trace: str | None = None
        self._sending = threading.Lock()
        self._over = False
        sock.setblocking(True)
        # A daemon: the process does not wait for one that hangs.
        self._thread = threading.Thread(target=self._run, name=f"troupe-{name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop reading messages; returns when the current one is done."""
        self._over = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)
        self._thread.join()

    def _run(self) -> None:
        current_actor.set(self._name)
        frames = Frames(self._limit)
        try:
            while not self._over and self._receive(frames):
                frames.take(self._handle)
        except BaseException as error:  # a library's panic is a crash of this actor too
            self._crash(error)

    def _receive(self, frames: Frames) -> bool:
        try:
            return frames.receive(self._sock)
        except ConnectionError:
            return False  # the parent has ended; the link of the loop reports it

    def _handle(self, kind: int, correlation: int, body: memoryview) -> bool:
        if kind != Kind.MESSAGE:
            raise ValueError(f"the parent sent a frame of kind {kind} to the actor's thread")
        sent, trace, rest = unpack_header(body)
        message = self._decode(rest)
        if trace != self._trace:
            self._trace = trace
            current_traceparent.set(trace)
        try:
            result = self._handlers[message.__class__](message, sent or 0.0)
        except RequestError as error:
            self._send(Kind.ERROR, correlation, pack_error(error))
        else:
            if isinstance(result, Later):
                result.add_done_callback(partial(self._reply_later, correlation))
            elif isinstance(result, EarlyReply):
                self._reply(correlation, result.answer)
                result.then()
            else:
                self._reply(correlation, result)
        return not self._over

    def _reply_later(self, correlation: int, later: Later[Any]) -> None:
        """Send a deferred reply, from any thread."""
        if later.cancelled():
            return
        error = later.exception()
        try:
            if error is None:
                self._reply(correlation, later.result())
            elif isinstance(error, RequestError):
                self._send(Kind.ERROR, correlation, pack_error(error))
            else:
                self._crash(error)
        except Exception as unsent:
            self._crash(unsent)

    def _reply(self, correlation: int, result: Any) -> None:
        body = self._encode(result)
        if len(body) > self._limit - 64:
            error = MessageTooLarge(f"a reply of {len(body)} bytes is over the limit of {self._limit}")
            self._send(Kind.ERROR, correlation, pack_error(error))
        else:
            self._send(Kind.REPLY, correlation, body)

    def _send(self, kind: Kind, correlation: int, body: bytes) -> None:
        # Without a parent the reply is lost. OSErrors of the handlers themselves are crashes.
        with self._sending, contextlib.suppress(ConnectionError):
            self._sock.sendall(frame(kind, correlation, body))
