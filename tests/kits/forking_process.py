"""A process that imports modules and forks, for ``warm_workers``. Its arguments: a socket, its parent, the modules.

It has one thread: whatever the libraries start, they start in the forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys

from actors.runtime.process import blank_process


def _serve(control: socket.socket) -> None:
    """Fork when asked. Returns in each child, ready to be an actor's."""
    while True:
        message, sockets, _, _ = socket.recv_fds(control, 1 << 10, 2)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if isinstance(request, dict):
            parent = os.getpid()
            if (pid := os.fork()) == 0:
                control.close()
                os.environ.update(request)
                sys.argv = ["-c", *map(str, sockets), str(parent)]
                return
            for number in sockets:
                os.close(number)
            control.send(json.dumps(pid).encode())
            continue
        pid, wait = request
        ended, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
        control.send(json.dumps(os.waitstatus_to_exitcode(status) if ended else None).encode())


def _main() -> None:
    control, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for name in sys.argv[3:]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    _serve(control)
    exec(blank_process._BOOTSTRAP, {"__name__": "__main__"})


if __name__ == "__main__":
    _main()
