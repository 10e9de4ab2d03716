"""LaunchedProcess: the interface of a process launched for an actor, on any host."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeAlias

__all__ = ["LaunchedProcess", "Launcher"]


class LaunchedProcess(Protocol):
    """A process that reads its bootstrap and its actor's spec from ``sock`` and then speaks frames over both sockets.

    Each socket is a connected stream: one end of a socket pair for a process on this host, or a TCP connection for one
    on another. The launcher must authenticate a TCP connection before it passes it on: frames contain no secret.
    """

    @property
    def pid(self) -> int:
        """The process id on its own host, for logs and metrics."""

    @property
    def sock(self) -> socket.socket:
        """The link to the actor's mailbox."""

    @property
    def thread_sock(self) -> socket.socket:
        """The link to the actor's thread."""

    @property
    def start_of_stream(self) -> bytes:
        """Bytes to send before its spec; empty once sent."""

    @property
    def returncode(self) -> int | None:
        """None while it runs or is not reaped; then as in ``subprocess.Popen``."""

    def watch_exit(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[], None]) -> None:
        """Call ``on_exit`` from the loop once the process has ended and its ``returncode`` is known."""

    def kill(self) -> None:
        """Kill it without waiting; no effect if it has ended."""


Launcher: TypeAlias = Callable[[Mapping[str, str]], Awaitable[LaunchedProcess]]
"""Starts a process with these variables added to its environment; may wait for a host. It leaves no process when it is
cancelled. Raises OSError when none can be started."""
