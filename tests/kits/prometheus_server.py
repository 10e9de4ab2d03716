"""Debian's Prometheus in a separate process, with the shipped configuration at a short scrape interval."""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from telemetry.dashboards import FOLDER
from tests.kits.addresses import hold_port, port_of
from tests.kits.waiting import PATIENCE

MISSING = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
WHY = f"{' and '.join(MISSING)} not installed (Debian: apt install prometheus)"


def promtool(*arguments: str, stdin: bytes | None = None) -> str:
    """The output of promtool; raises AssertionError if it finds a problem."""
    done = subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, timeout=PATIENCE, check=False)
    output = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, output
    return output


class Prometheus:
    def __init__(self, folder: Path, targets: Sequence[str], key: str) -> None:
        for name in ("recording.yml", "alerts.yml"):
            shutil.copy(FOLDER / "prometheus" / name, folder)
        shipped = (FOLDER / "prometheus" / "prometheus.yml").read_text()
        with_key = shipped.replace("# authorization:", "authorization:").replace(
            "#   credentials_file: /etc/prometheus/troupe-key", f"  credentials_file: {folder / 'troupe-key'}"
        )
        (folder / "troupe-key").write_text(f"{key}\n")
        settings = yaml.safe_load(with_key)
        settings["global"] |= {"scrape_interval": "1s", "evaluation_interval": "500ms"}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        (folder / "targets.yml").write_text(yaml.safe_dump([{"targets": list(targets)}]))
        self._held = hold_port()
        port = port_of(self._held)
        self.log = folder / "log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=out,
                stderr=out,
            )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE)

    def wait_until(self, expr: str, limit: float = PATIENCE) -> None:
        """Wait until ``expr`` returns at least one series."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if self.query(expr):
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"{expr} gives nothing after {limit} s:\n{self.log.read_text()}")

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The instant vector of ``expr`` without NaNs, as ``{"metric": labels, "value": float}``."""
        vector = self._get("/api/v1/query", query=expr)["result"]
        found = [{"metric": one["metric"], "value": float(one["value"][1])} for one in vector]
        return [one for one in found if not math.isnan(one["value"])]

    def query_range(self, expr: str, seconds: float) -> list[dict[str, Any]]:
        """The series of ``expr`` over the last seconds that have at least one number."""
        now = time.time()
        series = self._get("/api/v1/query_range", query=expr, start=now - seconds, end=now, step="500ms")["result"]
        return [one for one in series if any(not math.isnan(float(value)) for _, value in one["values"])]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("/api/v1/rules")["groups"] for rule in group["rules"]]

    def label_values(self, metric: str, label: str) -> list[str]:
        return list(self._get(f"/api/v1/label/{label}/values", **{"match[]": metric}))

    def _get(self, path: str, **parameters: Any) -> Any:
        answer = self._http.get(path, params=parameters)
        if answer.status_code == 503:  # it is starting
            raise httpx.ConnectError(answer.text)
        reported = answer.json()
        assert reported["status"] == "success", f"{parameters}: {reported}"
        return reported["data"]

    def stop(self) -> None:
        self._http.close()
        self.process.terminate()
        self.process.wait(PATIENCE)
        self._held.close()


@contextmanager
def prometheus(folder: Path, *targets: str, key: str) -> Iterator[Prometheus]:
    """Prometheus, scraping ``targets`` (``host:port``), which want the API key ``key``, every second."""
    folder.mkdir(parents=True, exist_ok=True)
    server = Prometheus(folder, targets, key)
    try:
        yield server
    finally:
        server.stop()
