"""One real server with a tiny model for every test here, asked over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.app.real_server import RealServer, running

ADMIN = {"x-api-key": "admin-key"}
USER = {"x-api-key": "user-key"}


class Target:
    """A server, and what must not change on it whatever it is sent."""

    def __init__(self, server: RealServer) -> None:
        self.server = server
        self.url = server.url
        self.client = httpx.Client(base_url=server.url, headers=USER, timeout=60)
        self.info: dict[str, Any] = self.client.get("/server_info").json()
        self.vocab: int = self.info["model_info"]["vocab_size"]
        self.context: int = self.info["model_info"]["context_length"]

    def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        options.setdefault("headers", {"Content-Type": "application/json"})
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return self.client.post(path, content=content, **options)

    def lives(self) -> dict[str, int]:
        """Which life of each actor this is. Those that requests may end by their templates are left out."""
        actors = self.client.get("/server_info").json()["actors"]
        return {a["name"]: a["incarnation"] for a in actors if not a["name"].startswith("renderer")}

    def dead_letters(self) -> float:
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "troupe_dead_letters_total"
        )

    def assert_unharmed(self) -> None:
        """The same processes and actors as at the start, nothing running, no page lost, nothing undelivered."""
        assert self.server.process.poll() is None, self.server.log.read_text()[-4000:]
        deadline = time.monotonic() + 20
        while (now := self.client.get("/server_info").json())["requests"]["sequences"] and time.monotonic() < deadline:
            time.sleep(0.02)
        assert now["requests"]["sequences"] == 0
        first = {a["name"]: (a["pid"], a["incarnation"]) for a in self.info["actors"]}
        assert {a["name"]: (a["pid"], a["incarnation"]) for a in now["actors"]} == first
        while (cache := self.client.get("/server_info").json()["cache"])["used"] and time.monotonic() < deadline:
            time.sleep(0.02)
        assert cache["used"] == cache["sequences"] == 0
        assert cache["free"] + cache["evictable"] == cache["total"]
        assert self.dead_letters() == 0
        assert "Traceback" not in self.server.log.read_text()


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Target]:
    log = tmp_path_factory.mktemp("target") / "log"
    options = [
        "--dtype",
        "float32",
        "--cpu-threads",
        "1",
        "--max-total-tokens",
        "16384",
        "--max-running-requests",
        "64",
    ]
    keys = ["--api-key", "user-key", "--admin-api-key", "admin-key"]
    with running(log, str(tiny_model), *options, *keys, "--served-model-name", "tiny") as server:
        yield Target(server)
