"""A real server with a tiny model, and checks that requests did not harm it."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from tests.kits.real_server import RealServer
from tests.kits.waiting import PATIENCE, blocking_until

__all__ = [
    "ADMIN",
    "CHAT",
    "USER",
    "Target",
]

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}

ADMIN = {"x-api-key": "admin-key"}

USER = {"x-api-key": "user-key"}


class Target:
    """A server, and the state that no request may change."""

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
        """Check that the server reports an error of this field."""
        answer = self.post(path, body)
        assert answer.status_code == 400, answer.text[:300]
        assert (answer.json()["error"]["param"] or "").startswith(param), answer.text[:300]

    def lives(self) -> dict[str, int]:
        """The incarnation of each actor, except those that templates of requests may kill."""
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
        """Check for the same processes and actors as at the start, no running request, no lost page, no undelivered
        message."""
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
