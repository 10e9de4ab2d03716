"""A local child process that waits to learn which actor it runs."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

__all__ = ["BlankProcess", "LocalProcess", "first_bytes", "launch_blank"]

_BOOTSTRAP = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
import contextlib, importlib, json, os, socket, sys
fd, other, parent = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != parent:
    os._exit(1)
sock, thread_sock = socket.socket(fileno=fd), socket.socket(fileno=other)
def read(size):
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            os._exit(1)
        data += part
    return data
boot = json.loads(read(int.from_bytes(read(4), "little")))
sys.argv[1:] = []
sys.path[:] = boot["path"]
entry = importlib.import_module(boot["entry"])
for name in boot["modules"]:
    with contextlib.suppress(Exception):
        importlib.import_module(name)
spec = read(int.from_bytes(read(4), "little"))
entry.main(sock, thread_sock, spec, lambda: int.from_bytes(read(8), "little"))
"""

_ENTRY = "actors.runtime.child"
"""The module whose main is the child's side. Imported by name: it imports the system, which imports this module."""


def first_bytes(modules: Sequence[str] = ()) -> bytes:
    """What a process on this host reads before its spec: where and what to import."""
    path = [os.path.abspath(entry) for entry in sys.path]
    boot = json.dumps({"path": path, "entry": _ENTRY, "modules": list(modules)}).encode()
    return len(boot).to_bytes(4, "little") + boot


async def launch_blank(environment: Mapping[str, str]) -> "BlankProcess":
    """The launcher of this host."""
    return BlankProcess(environment)


class LocalProcess:
    """A process on this host that waits at its ends of two connected sockets to learn which actor it runs.

    It starts at once with ``environment`` added to that of its parent. The caller closes its copies of the sockets.

    It ignores SIGINT and SIGTERM: a terminal or a service manager sends them to the whole process group, but only the
    parent decides when its children stop. It gets SIGKILL when the parent ends.

    Raises OSError when no process can be started.
    """

    def __init__(self, environment: Mapping[str, str], ends: tuple[socket.socket, socket.socket]) -> None:
        self.environment = dict(environment)
        passed = [end.fileno() for end in ends]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, *map(str, passed), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=passed,
            env={**os.environ, **environment},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    def watch_exit(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[], None]) -> None:
        try:
            pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux, or forbidden
            self._poll_exit(loop, on_exit)
            return

        def exited() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            self._poll_exit(loop, on_exit)

        loop.add_reader(pidfd, exited)

    def _poll_exit(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[], None]) -> None:
        if self.process.poll() is None:
            loop.call_later(0.02, self._poll_exit, loop, on_exit)
        else:
            on_exit()

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()


class BlankProcess(LocalProcess):
    """A :class:`LaunchedProcess` on this host, linked by socket pairs.

    It imports ``modules`` and waits. Errors of these imports are dropped: the actor raises them again. Raises OSError
    when no process can be started.
    """

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = ()) -> None:
        self.start_of_stream = first_bytes(modules)
        """Bytes to send before its spec; empty once sent."""
        self.sock, theirs = socket.socketpair()
        try:
            self.thread_sock, thread_theirs = socket.socketpair()
        except OSError:
            self.sock.close()
            theirs.close()
            raise
        try:
            super().__init__(environment, (theirs, thread_theirs))
        except BaseException:
            self.sock.close()
            self.thread_sock.close()
            raise
        finally:
            theirs.close()
            thread_theirs.close()

    def begin(self) -> None:
        """Send the bootstrap data, so that it imports before a link to it exists."""
        self.sock.sendall(self.start_of_stream)  # it reads this at once
        self.start_of_stream = b""

    def close(self) -> None:
        """Kill it and close its sockets."""
        self.kill()
        self.process.wait()
        self.sock.close()
        self.thread_sock.close()
