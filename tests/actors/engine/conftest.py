"""Engines of these tests start their workers at once."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def workers_are_warm(warm_workers: None) -> None:
    pass
