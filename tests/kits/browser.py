"""Common part of tests of the live page: an installed Chromium, driven by the ``playwright`` package, which downloads
no browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kits.waiting import PATIENCE

__all__ = ["answered", "browser", "has_no_horizontal_scroll", "needs_browser", "open_page", "wait_frames"]

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the playwright package: pip install -e .[browser]")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_browser = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, as Debian's package chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Open an address in a new browser context. Errors of the page fail the test."""
    contexts, complaints, hosts = [], [], set()

    def open_(url: str, expected: str = "\0", **keywords: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1360, "height": 860}, **keywords})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(1000 * PATIENCE)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda message: (
                complaints.append(message.text) if message.type == "error" and expected not in message.text else None
            ),
        )
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []
    assert len(hosts) <= 1, hosts


def answered(page: Any, *, times: int = 1) -> Any:
    """Wait for the last answer to complete, and return it."""
    page.wait_for_function(
        "n => document.querySelectorAll('.turn.assistant[aria-busy=false]').length >= n"
        " && document.getElementById('stop').hidden",
        arg=times,
    )
    return page.locator(".turn.assistant").last


def wait_frames(page: Any, more: int = 2) -> None:
    """Wait until the stage has drawn some more frames."""
    page.wait_for_function("() => Number(document.body.dataset.frame) > 0")
    seen = page.evaluate("() => Number(document.body.dataset.frame)")
    page.wait_for_function("n => Number(document.body.dataset.frame) >= n", arg=seen + more)


def has_no_horizontal_scroll(page: Any) -> bool:
    """Whether nothing on the page is wider than its place."""
    return bool(
        page.evaluate(
            "() => [...document.querySelectorAll('html, body, main, .stage, .chat, .transcript')]"
            ".every((part) => part.scrollWidth <= part.clientWidth)"
        )
    )
