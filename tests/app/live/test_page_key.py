"""How the live page asks for a key, where the server wants one, in a real Chromium."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from actors.options import Arguments
from app.application import create_app
from tests.kits.browser import answered, browser, needs_browser, open_page, wait_frames
from tests.kits.fake_engine import FakeEngine, Server
from tests.kits.waiting import PATIENCE

__all__ = ["browser", "open_page"]

pytestmark = needs_browser

KEY = "the-key-of-the-house"


@pytest.fixture
def locked_server() -> Iterator[str]:
    """The address of a server that wants a key. Its engine is a fake: a model need not load for this."""
    address, stop = Future[str](), threading.Event()

    async def serve() -> None:
        arguments = Arguments(
            model_path="/models/fake", served_model_name=("fake",), api_key=KEY, skip_server_warmup=True
        )
        server = Server()
        address.set_result(await server(create_app(arguments, FakeEngine(arguments))))
        await asyncio.to_thread(stop.wait)
        await server.aclose()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    yield address.result(PATIENCE)
    stop.set()
    thread.join()


def test_the_page_asks_for_the_key_and_keeps_it_in_the_tab(locked_server, open_page):
    page = open_page(locked_server, expected="401")
    page.click("#key-dialog >> text=Not now")
    page.wait_for_selector("#stage-notice >> text=key")
    page.fill("#prompt", "Where is Paris?")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key-field", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key-dialog[open] .trouble")
    page.fill("#key-field", KEY)
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('model-name').textContent === 'fake'")
    assert "Paris" in answered(page).inner_text()
    wait_frames(page)
    assert not page.is_visible("#stage-notice")
    kept = page.evaluate("() => [JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]")
    assert [KEY in text for text in kept] == [True, False, False]
    assert KEY not in page.url
    page.click("#key-button")
    page.wait_for_selector("#key-dialog[open]")
    assert KEY not in page.evaluate("() => JSON.stringify(sessionStorage)")


def hold(page: Any, path: str, header: str | None) -> list[Any]:
    """Keep back the first request to ``path`` that has this authorization; it is in the list when it was made."""
    held: list[Any] = []

    def handle(route: Any) -> None:
        if not held and route.request.headers.get("authorization") == header:
            held.append(route)
        else:
            route.continue_()

    page.route(path, handle)
    return held


def wait_for(page: Any, held: list[Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not held:
        assert time.monotonic() < deadline, "the request was not made"
        page.wait_for_timeout(20)
    return held[0]


def test_a_request_refused_after_the_key_was_entered_does_not_ask_again(locked_server, open_page):
    page = open_page(locked_server, expected="401")
    page.click("#key-dialog >> text=Not now")
    page.wait_for_selector("#stage-notice >> text=key")
    held = hold(page, "**/v1/chat/completions", "Bearer wrong")
    page.fill("#prompt", "Where is Paris?")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key-field", "wrong")
    page.keyboard.press("Enter")
    late = wait_for(page, held)
    page.wait_for_selector("#key-dialog[open] .trouble")
    page.fill("#key-field", KEY)
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('model-name').textContent === 'fake'")
    late.continue_()
    assert "Paris" in answered(page).inner_text()
    assert not page.is_visible("#key-dialog")


def test_a_request_refused_after_the_reader_had_no_key_does_not_ask_again(locked_server, open_page):
    page = open_page("about:blank", expected="401")
    held = hold(page, "**/v1/models", None)
    page.goto(locked_server)
    page.click("#key-dialog >> text=Not now")
    page.wait_for_selector("#stage-notice >> text=key")
    wait_for(page, held).continue_()
    page.wait_for_function("() => document.getElementById('chat-status').textContent !== ''")
    assert not page.is_visible("#key-dialog")
