"""Workers and renderers of engines that start at once: forks of processes that have imported what they need.

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
from typing import Any

import pytest

from actors.options import Arguments
from actors.runtime import ActorSystem
from actors.runtime.process import blank_process
from actors.runtime.process.blank_process import BlankProcess
from actors.workers.placement import place
from kernels.contract.runner import RUNNER_MODULE

__all__ = ["warm"]

_LOOP_MODULES = ("anyio._backends._asyncio", "uvloop")  # which each process imports when its loop starts
_RENDERER = "actors.text.renderer:Renderer"
_RENDERER_MODULES = ("actors.runtime.child", "actors.text.renderer", *_LOOP_MODULES)
_WORKER_MODULES = (
    "actors.runtime.child",
    "actors.workers.worker",
    RUNNER_MODULE,
    "kernels.devices.cpu.device",
    "numpy.ma",
    *_LOOP_MODULES,
)

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
    """A process that has imported ``modules`` with ``environment`` added, and forks."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.inherited = _environ()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kits.forking_process", str(theirs.fileno()), str(os.getpid()), *modules],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **self.environment},
            cwd=os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        )
        theirs.close()
        self._ready = False

    def fits(self, environment: Mapping[str, str]) -> bool:
        early = {name: value for name, value in environment.items() if name not in _LATE}
        return early == self.environment and _environ() == self.inherited

    def fork(self, environment: Mapping[str, str], sockets: Sequence[int]) -> _Fork:
        with self._lock:
            if not self._ready:
                assert self._socket.recv(1 << 10), "the process that forks has ended"
                self._ready = True
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


def _warm_process(forks: _Forks) -> type[BlankProcess]:
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

    return WarmProcess


@contextmanager
def warm() -> Iterator[None]:
    """Inside, workers of engines of this process on the CPU are forks, and so are renderers of the default launcher."""
    arguments = Arguments(model_path="any", device="cpu", cpu_threads=1)
    placed = place(arguments, os.environ).environment(arguments, 0, os.environ, 0.0)
    workers, renderers = _Forks(_WORKER_MODULES, placed), _Forks(_RENDERER_MODULES, {})
    renderer, spawn = _warm_process(renderers), ActorSystem.spawn_process

    async def launch(environment: Mapping[str, str]) -> BlankProcess:
        return renderer(environment)

    def spawn_process(self: ActorSystem, *args: Any, **keywords: Any) -> Any:
        if keywords.get("target") == _RENDERER:
            keywords.setdefault("launcher", launch)
        return spawn(self, *args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.workers.launchers.local.BlankProcess", _warm_process(workers))
        patch.setattr(ActorSystem, "spawn_process", spawn_process)
        try:
            yield
        finally:
            workers.close()
            renderers.close()
