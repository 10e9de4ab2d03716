"""How a real server ends: drained, hurried, while it starts, and when its engine gives up; the exit status tells."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest

from tests.kits.real_server import RealServer, running, serving
from tests.kits.waiting import PATIENCE, blocking_until

SMALL = ("--dtype", "float32", "--cpu-threads", "1", "--max-total-tokens", "16384", "--max-running-requests", "4")
LONG = {"prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True, "stream": True}


class Reader:
    """Reads one stream in a thread; ``events`` are its data lines so far."""

    def __init__(self, server: RealServer) -> None:
        self.events: list[str] = []
        self.status = 0
        self._url = f"{server.url}/v1/completions"
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=LONG, timeout=PATIENCE) as response:
            self.status = response.status_code
            self.events += (line[6:] for line in response.iter_lines() if line.startswith("data: "))

    def end(self) -> tuple[str | None, str]:
        """The error's code, if there was one, and the last event."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        answer = [msgspec.json.decode(event) for event in self.events if event != "[DONE]"]
        return next((record["error"]["code"] for record in answer if "error" in record), None), self.events[-1]


@contextmanager
def loaded(
    log: Path, model: Path, *arguments: str, streams: int = 12
) -> Iterator[tuple[RealServer, list[Reader], int]]:
    """A server with more streams than it can run at a time, four of them in its batch; and the pid of its worker, which
    is halted, so that the streams stay, however slow the readers are."""
    with running(log, str(model), *SMALL, *arguments) as server:
        worker = httpx.get(f"{server.url}/server_info", timeout=PATIENCE).json()["workers"][0]["pid"]
        os.kill(worker, signal.SIGSTOP)
        readers = [Reader(server) for _ in range(streams)]

        def live() -> int:
            answer = httpx.get(f"{server.url}/server_info", timeout=PATIENCE).json()
            return int(answer["requests"]["live"]) if answer["scheduler"]["running"] else 0

        blocking_until(lambda: live() == streams, "the streams have not all come")
        yield server, readers, worker


def family(server: RealServer) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> None:
    blocking_until(lambda: not any(p.is_running() and p.status() != "zombie" for p in processes), "a child is left")


def test_sigterm_under_load_ends_streams_at_the_deadline_and_exits_zero(tmp_path: Path, tiny_model: Path) -> None:
    """Also while its worker is halted, which does not hear of the end."""
    with loaded(tmp_path / "log", tiny_model, "--shutdown-timeout", "1") as (server, readers, _):
        children = family(server)
        server.process.send_signal(signal.SIGTERM)
        for reader in readers:
            assert reader.end() == ("engine_draining", "[DONE]")
            assert reader.status == 200
        assert server.process.wait(PATIENCE) == 0
        gone(children)
    assert f"stops before {len(readers)} of its requests have ended" in (tmp_path / "log").read_text()


def test_sigterm_to_the_whole_group_is_an_orderly_stop(tmp_path: Path, tiny_model: Path) -> None:
    """A service manager signals every process of the group: only the server itself acts on it."""
    with running(tmp_path / "log", str(tiny_model), *SMALL) as server:
        reader = Reader(server)
        blocking_until(lambda: len(reader.events) > 3, "the stream does not run")
        children = family(server)
        assert children
        for process in children:
            process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        assert reader.end() == (None, "[DONE]")
        assert server.process.wait(PATIENCE) == 0
        gone(children)
    lines = (tmp_path / "log").read_text().splitlines()
    assert not [line for line in lines if " ERROR " in line or " WARNING " in line]
    assert lines[-1].endswith("troupe: The server has stopped in order.")


def test_a_draining_server_refuses_and_a_second_signal_ends_every_stream(tmp_path: Path, tiny_model: Path) -> None:
    with loaded(tmp_path / "log", tiny_model, "--shutdown-timeout", "3600") as (server, readers, worker):
        children = family(server)
        server.process.send_signal(signal.SIGTERM)
        blocking_until(
            lambda: httpx.get(f"{server.url}/ready", timeout=PATIENCE).status_code == 503, "it is still ready"
        )
        refused = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=PATIENCE)
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        assert refused.json()["error"]["code"] == "engine_draining"
        server.process.send_signal(signal.SIGTERM)
        for reader in readers:
            assert reader.end() == ("engine_draining", "[DONE]")
        os.kill(worker, signal.SIGCONT)
        assert server.process.wait(PATIENCE) == 0
        gone(children)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_starts_ends_it_at_once(tmp_path: Path, number: signal.Signals) -> None:
    server = serving(tmp_path / "log")

    def live() -> bool:
        try:
            return httpx.get(f"{server.url}/live", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    try:
        blocking_until(live, "it does not listen")
        early = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=PATIENCE)
        children = family(server)
        server.process.send_signal(number)
        assert server.process.wait(PATIENCE) == 0
        if early.status_code != 200:  # else it was quicker than we
            assert (early.status_code, early.json()["error"]["code"]) == (503, "engine_starting")
            assert 1 <= int(early.headers["retry-after"]) <= 120
        gone(children)
    finally:
        server.stop()


def test_an_engine_that_gives_up_ends_every_stream_and_exits_with_three(tmp_path: Path, tiny_model: Path) -> None:
    # More than can come to their end, or be quarantined after two deaths, while the worker dies again and again.
    with loaded(tmp_path / "log", tiny_model, "--max-worker-restarts", "3", streams=48) as (server, readers, _):
        children = family(server)
        killed: set[int] = set()

        def exited() -> bool:
            try:
                workers = httpx.get(f"{server.url}/server_info", timeout=PATIENCE).json()["workers"]
            except httpx.TransportError:
                return server.process.poll() is not None
            for worker in workers:
                pid = worker["pid"]
                if pid and pid not in killed:
                    killed.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            return False

        blocking_until(exited, "it goes on without end")
        assert server.process.wait(PATIENCE) == 3
        assert len(killed) > 3
        for reader in readers:
            code, last = reader.end()
            assert last == "[DONE]"
            assert code in ("engine_failed", "internal_error", None)  # quarantined before; or complete in time
        assert any(reader.end()[0] == "engine_failed" for reader in readers)
        gone(children)
    assert "worker-0 failed too often: killed by SIGKILL" in (tmp_path / "log").read_text()
