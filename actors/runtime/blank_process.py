"""A child process that waits to be told which actor it is to be."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

__all__ = ["BlankProcess"]

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

_ENTRY = __name__.rpartition(".")[0] + ".child"


class BlankProcess:
    """Started at once, with ``environment`` added to its own; it imports ``modules`` and waits. An error of an import
    is dropped: the actor meets it again, and there it can be told.

    It ignores SIGINT and SIGTERM: a terminal or a service manager sends them to the whole process group, and only the
    parent decides when its children stop. SIGKILL follows the parent's own end.

    ``sock`` and ``thread_sock``: the parent's ends of its links. Raises OSError when no process can be started.
    """

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = ()) -> None:
        self.environment = dict(environment)
        path = [os.path.abspath(entry) for entry in sys.path]
        boot = json.dumps({"path": path, "entry": _ENTRY, "modules": list(modules)}).encode()
        self.sock, theirs = socket.socketpair()
        try:
            self.thread_sock, thread_theirs = socket.socketpair()
        except OSError:
            self.sock.close()
            theirs.close()
            raise
        passed = (theirs.fileno(), thread_theirs.fileno())
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, *map(str, passed), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=passed,
                env={**os.environ, **environment},
            )
        except BaseException:
            self.sock.close()
            self.thread_sock.close()
            raise
        finally:
            theirs.close()
            thread_theirs.close()
        self.start_of_stream = len(boot).to_bytes(4, "little") + boot
        """What it must be sent before its spec; empty when it was."""

    def begin(self) -> None:
        """Let it import, before anybody has a link to it."""
        self.sock.sendall(self.start_of_stream)  # it reads this at once
        self.start_of_stream = b""

    def kill(self) -> None:
        """Begin to end it."""
        self.process.kill()

    def close(self) -> None:
        """End it; for whoever has it and no use for it."""
        self.kill()
        self.process.wait()
        self.sock.close()
        self.thread_sock.close()
