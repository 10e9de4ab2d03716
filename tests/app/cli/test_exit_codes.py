"""How the server's process ends tells its manager what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.options import Arguments
from actors.text.model_files import ModelDownloadError
from actors.workers.nodes.handshake import SECRET_VARIABLE
from app.cli.command import main
from tests.kits.real_server import serving
from tests.kits.waiting import PATIENCE, blocking_until


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["/no/such/model"], "--model-path /no/such/model does not exist"),
        (["--dtype", "float16"], "dtype 'float16' is not supported on cpu"),  # a worker says so
        (["--tp-size", "2", "--dtype", "float16"], "dtype 'float16' is not supported on cpu"),  # and so do several
        (["--tp-size", "3"], "cannot be divided by --tensor-parallel-size 3"),  # before any worker starts
    ],
)
def test_what_no_restart_heals_exits_with_two_and_no_traceback(
    tmp_path: Path, arguments: list[str], reason: str
) -> None:
    server = serving(tmp_path / "log", *arguments, "--device", "cpu")
    try:
        assert server.process.wait(PATIENCE) == 2
    finally:
        server.stop()
    lines = server.log.read_text().splitlines()
    assert lines[-2].startswith("troupe: ")
    assert reason in lines[-2]
    assert not any("Traceback" in line or " died: " in line for line in lines)


NODES = ("--device", "cpu", "--tp", "2", "--nnodes", "2", "--dist-init-addr", "127.0.0.1:1")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_node_without_the_secret_exits_with_two(tmp_path: Path, rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    server = serving(tmp_path / "log", *NODES, "--node-rank", rank)
    try:
        assert server.process.wait(PATIENCE) == 2
    finally:
        server.stop()
    assert f"troupe: --nnodes: set {SECRET_VARIABLE}" in server.log.read_text()


@pytest.mark.parametrize(("ends", "status"), [("is stopped", 0), ("gives up", 3)])
def test_a_node_without_a_node_0_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, status: int
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "a secret that is long enough")
    patience = "1" if ends == "gives up" else "600"
    server = serving(tmp_path / "log", *NODES, "--node-rank", "1", "--dist-timeout", patience)
    try:
        if ends == "is stopped":
            blocking_until(lambda: "Retrying" in server.log.read_text(), "it does not look for node 0")
        else:
            server.process.wait(PATIENCE)
    finally:
        assert server.stop() == status
    assert ("gave up after 1 s" in server.log.read_text()) is (ends == "gives up")


def test_a_node_whose_hub_does_not_answer_may_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_model(arguments: Arguments) -> None:
        raise ModelDownloadError("no network")

    monkeypatch.setenv(SECRET_VARIABLE, "a secret that is long enough")
    monkeypatch.setattr("actors.engine.nodes.open_model", open_model)
    assert main(["serve", *NODES, "--node-rank", "1"]) == 3
