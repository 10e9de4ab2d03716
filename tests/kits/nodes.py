"""Nodes of one model on this machine: processes that find each other at ports of 127.0.0.1."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from actors.workers.nodes.handshake import SECRET_VARIABLE
from tests.kits.addresses import hold_port, hold_two_ports, port_of
from tests.kits.real_server import ROOT
from tests.kits.waiting import PATIENCE

__all__ = ["Cluster", "OtherNode", "cluster"]


class OtherNode:
    """``troupe serve`` of a node other than 0, as a process. ``log``: a new file."""

    def __init__(self, log: Path, words: list[str], secret: str) -> None:
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app", "serve", *words],
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env={**os.environ, SECRET_VARIABLE: secret},
            )

    def wait(self) -> int:
        """Wait for its end; returns its exit status."""
        return self.process.wait(PATIENCE)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Cluster(msgspec.Struct):
    """``options``: keywords that an engine of node 0 needs; ``secret``: of its nodes."""

    options: dict[str, object]
    secret: str
    folder: Path
    nodes: list[OtherNode]

    def start(self, *words: str, secret: str | None = None, rank: int = 1) -> OtherNode:
        """Start another node, with ``words`` added to its command."""
        options = [word for name, value in self.options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        log = self.folder / f"node-{len(self.nodes)}.log"
        given = [*options, "--node-rank", str(rank), "--no-standby-worker", *words]
        node = OtherNode(log, given, secret or self.secret)
        self.nodes.append(node)
        return node


@contextmanager
def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch, nnodes: int = 2) -> Iterator[Cluster]:
    """The options of ``nnodes`` nodes, of at most two replicas. Those that are left are killed at the end."""
    secret = secrets.token_hex(16)
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    with hold_port() as control, hold_two_ports() as ranks:
        address = f"127.0.0.1:{port_of(control)}"
        made = Cluster({"nnodes": nnodes, "dist_init_addr": address, "nccl_port": ranks}, secret, folder, [])
        try:
            yield made
        finally:
            for node in made.nodes:
                node.end()
