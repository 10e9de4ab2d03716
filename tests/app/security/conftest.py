"""One real server with a tiny model for every test here, asked over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.app.real_server import RealServer, running
from tests.waiting import PATIENCE, blocking_until

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
ADMIN = {"x-api-key": "admin-key"}
USER = {"x-api-key": "user-key"}


class Target:
    """A server, and what must not change on it whatever it is sent."""

    def __init__(self, server: RealServer) -> None:
        self.server = server
        self.url = server.url
        self.client = httpx.Client(base_url=server.url, headers=USER, timeout=PATIENCE)
        self.info: dict[str, Any] = self.client.get("/server_info").json()
        self.vocab: int = self.info["model_info"]["vocab_size"]
        self.context: int = self.info["model_info"]["context_length"]

    def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        options.setdefault("headers", {"Content-Type": "application/json"})
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return self.client.post(path, content=content, **options)

    def refuses(self, path: str, body: object, param: str) -> None:
        """It answers that this field is wrong."""
        answer = self.post(path, body)
        assert answer.status_code == 400, answer.text[:300]
        assert (answer.json()["error"]["param"] or "").startswith(param), answer.text[:300]

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
        now: dict[str, Any] = {}

        def rests() -> bool:
            now.update(self.client.get("/server_info").json())
            cache = now["cache"]
            return bool(now["requests"]["sequences"] == cache["used"] == cache["sequences"] == 0)

        blocking_until(rests, "it does not come to rest")
        first = {a["name"]: (a["pid"], a["incarnation"]) for a in self.info["actors"]}
        assert {a["name"]: (a["pid"], a["incarnation"]) for a in now["actors"]} == first
        cache = now["cache"]
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
