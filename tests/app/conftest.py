"""A fake engine that keeps the engine's contract with scripted answers, and the application around it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from actors.options import Arguments
from app.application import Troupe, create_app
from tests.kits import waiting
from tests.kits.fake_engine import FakeEngine, Server


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def application(engine: FakeEngine) -> Troupe:
    return create_app(engine.arguments, engine)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Wait for a condition, or fail after a long while."""
    return waiting.until


@pytest.fixture
def make_application() -> Callable[..., Troupe]:
    """An application by its arguments; its engine is ``application.engine``."""

    def make(**keywords: Any) -> Troupe:
        arguments = Arguments(
            **{"model_path": "/models/fake", "served_model_name": ("fake",), "skip_server_warmup": True, **keywords}
        )
        return create_app(arguments, FakeEngine(arguments))

    return make


@pytest.fixture
async def serve() -> AsyncIterator[Server]:
    server = Server()
    yield server
    await server.aclose()
