"""One real server with a tiny model for every test here, asked over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kits.real_server import running
from tests.kits.target import Target


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
    options += ["--file-storage-path", str(log.parent / "store")]
    keys = ["--api-key", "user-key", "--admin-api-key", "admin-key"]
    with running(log, str(tiny_model), *options, *keys, "--served-model-name", "tiny") as server:
        yield Target(server)
