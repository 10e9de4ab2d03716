"""A server in a separate process, started as by users."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.kits.addresses import hold_port, port_of
from tests.kits.waiting import PATIENCE

ROOT = Path(__file__).parents[2]


class RealServer:
    """``command`` returns the command line of a server that listens on a port of 127.0.0.1."""

    def __init__(
        self, command: Callable[[int], list[str]], log: Path, environment: dict[str, str] | None = None
    ) -> None:
        self._held = hold_port()
        self.url = f"http://127.0.0.1:{port_of(self._held)}"
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command(port_of(self._held)),
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
            )

    def wait_ready(self, limit: float = 600.0) -> None:
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/ready", timeout=30).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not ready after {limit} s:\n{self.log.read_text()}")

    def stop(self) -> int:
        self._held.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"did not stop:\n{self.log.read_text()}") from None
        return self.process.returncode


def serving(log: Path, *arguments: str) -> RealServer:
    """``troupe serve`` with these arguments. Without ``--standby-worker`` it has none: it takes a third of a start."""
    alone = () if "--standby-worker" in arguments else ("--no-standby-worker",)
    return RealServer(lambda port: [sys.executable, "-m", "app", "serve", *arguments, *alone, "--port", str(port)], log)


@contextmanager
def running(log: Path, *arguments: str) -> Iterator[RealServer]:
    """``troupe serve`` with these arguments, ready."""
    server = serving(log, *arguments)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
