"""Workers of engines that start at once: forks of a process that has imported PyTorch.

Everything else of them is as in a process of its own: their sockets, how they die, and what they leave.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from actors.options import Arguments
from actors.runtime.process import blank_process
from actors.runtime.process.blank_process import BlankProcess
from actors.workers.placement import place

__all__ = ["warm"]

_LATE = frozenset({"GLOO_SOCKET_IFNAME"})
"""Variables that nothing reads while it is imported."""

_OURS = frozenset({"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"})
"""Variables of this process that change with its tests. PyTorch sets the second, to its default, when a model of
transformers is made."""


class _Fork:
    """As ``subprocess.Popen``, of a child of the forking process."""

    def __init__(self, forks: _Forks, pid: int) -> None:
        self._forks = forks
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.status(self.pid, wait=False)
        return self.returncode

    def wait(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.status(self.pid, wait=True)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)  # not reaped, so that the number is still its own


class _Forks:
    """The process that forks, with the variables that a worker on the CPU gets."""

    def __init__(self) -> None:
        arguments = Arguments(model_path="any", device="cpu", cpu_threads=1)
        self.environment = place(arguments, os.environ).environment(arguments, 0, os.environ, 0.0)
        self.inherited = _environ()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kits.forking_process", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **self.environment},
            cwd=os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        )
        theirs.close()
        assert self._socket.recv(1 << 10), "the process that forks has ended"

    def fits(self, environment: Mapping[str, str]) -> bool:
        early = {name: value for name, value in environment.items() if name not in _LATE}
        return early == self.environment and _environ() == self.inherited

    def fork(self, environment: Mapping[str, str], sockets: Sequence[int]) -> _Fork:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(dict(environment)).encode()], list(sockets))
            return _Fork(self, int(json.loads(self._socket.recv(1 << 10))))

    def status(self, pid: int, wait: bool) -> int | None:
        with self._lock:
            self._socket.send(json.dumps([pid, wait]).encode())
            found: int | None = json.loads(self._socket.recv(1 << 10))
            return found

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OURS}


@contextmanager
def warm() -> Iterator[None]:
    """Inside, workers of engines of this process on the CPU are forks."""
    forks = _Forks()

    class WarmProcess(BlankProcess):
        """A fork, if its variables are those of the process that forks."""

        def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = ()) -> None:
            if not forks.fits(environment):
                super().__init__(environment, modules)
                return
            self.environment = dict(environment)
            path = [os.path.abspath(entry) for entry in sys.path]
            boot = json.dumps({"path": path, "entry": blank_process._ENTRY, "modules": list(modules)}).encode()
            self.start_of_stream = len(boot).to_bytes(4, "little") + boot
            self.sock, theirs = socket.socketpair()
            self.thread_sock, thread_theirs = socket.socketpair()
            with theirs, thread_theirs:
                self.process = forks.fork(environment, [theirs.fileno(), thread_theirs.fileno()])  # type: ignore[assignment]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.workers.launchers.local.BlankProcess", WarmProcess)
        try:
            yield
        finally:
            forks.close()
