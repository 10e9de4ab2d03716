"""What an error tells the client libraries that retry by themselves."""

from __future__ import annotations

import pytest

from actors.protocol.requests import (
    EngineDraining,
    EngineFailed,
    EngineNotReady,
    InvalidRequest,
    QueueFull,
    RequestAborted,
    RequestFailed,
    RequestTimeout,
)
from app.server.errors import to_api_error


@pytest.mark.parametrize(
    ("error", "status", "retry_after", "should_retry"),
    [
        (QueueFull("full", retry_after=7.2), 429, "8", None),
        (QueueFull("full", retry_after=1e6), 429, "120", None),
        (QueueFull("full", retry_after=0.0), 429, "1", None),
        (EngineNotReady("starting"), 503, "5", None),
        (EngineDraining("draining"), 503, "10", None),
        (RequestFailed("the worker died"), 500, None, None),
        # Nothing of these gets better by asking again.
        (EngineFailed("gave up"), 503, None, "false"),
        (RequestTimeout("late"), 504, None, "false"),
        (RuntimeError("a fault of ours"), 500, None, "false"),
        # These, no library retries.
        (InvalidRequest("no", param="n"), 400, None, None),
        (RequestAborted("aborted"), 499, None, None),
    ],
)
def test_which_errors_may_be_retried_and_when(
    error: Exception, status: int, retry_after: str | None, should_retry: str | None
) -> None:
    answer = to_api_error(error, "req-1")
    headers = answer.headers()
    assert answer.status == status
    assert headers.get("Retry-After") == retry_after
    assert headers.get("x-should-retry") == should_retry
    assert headers.get("Connection") == ("close" if isinstance(error, EngineDraining) else None)
