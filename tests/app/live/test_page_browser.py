"""The live page in a real Chromium, on a real server with the included model."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.kits.browser import answered, browser, has_no_horizontal_scroll, needs_browser, open_page, wait_frames
from tests.kits.real_server import RealServer, running
from tests.kits.waiting import PATIENCE

__all__ = ["browser", "open_page"]

pytestmark = needs_browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    greedy = ("--preferred-sampling-params", '{"temperature": 0}')
    with running(tmp_path_factory.mktemp("page") / "log", "--cpu-threads", "1", *greedy) as started:
        yield started


@pytest.fixture
def load(server: RealServer) -> Iterator[Any]:
    """``load(streams)`` keeps so many long answers going until the test ends."""
    stop = threading.Event()
    threads = []

    def ask() -> None:
        body = {
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "stream": True,
            "max_tokens": 1500,
            "ignore_eos": True,
        }
        while not stop.is_set():
            with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE) as response:
                for _ in response.iter_lines():
                    if stop.is_set():
                        return

    def start(streams: int) -> None:
        for _ in range(streams):
            threads.append(threading.Thread(target=ask))
            threads[-1].start()

    yield start
    stop.set()
    for thread in threads:
        thread.join()


def make_long(page: Any, tokens: int) -> None:
    """Answers of this page go on for so many tokens: time enough to see them come."""
    page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(
            post_data={**route.request.post_data_json, "ignore_eos": True, "max_tokens": tokens}
        ),
    )


def test_chat_streams_an_answer_and_shows_its_hops(server, open_page):
    page = open_page(server.url)
    page.wait_for_function("() => document.getElementById('model-name').textContent === 'understudy'")
    make_long(page, 1200)
    page.evaluate(
        """() => {
          window.seen = new Set();
          const look = () => {
            window.seen.add(document.querySelector('.turn.assistant .body')?.textContent.length ?? 0);
            requestAnimationFrame(look);
          };
          look();
        }"""
    )
    page.click("text=Three countries")
    answer = answered(page)
    assert len(answer.locator(".body").inner_text()) > 20
    assert page.evaluate("() => window.seen.size") > 3, "the answer came in one piece"
    assert "tokens" in answer.locator("footer").inner_text()
    answer.get_by_role("button", name="Its hops").click()
    page.wait_for_selector(".hops li")
    names = page.locator(".hops .name").all_inner_texts()
    assert {"admission", "tokenize", "queue", "prefill", "decode", "stream"} <= set(names)
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    page.wait_for_selector(".request.own")
    page.hover("#timeline .window")  # which keeps the axis still
    page.locator(".request.own").first.click()
    page.wait_for_selector(".hops li")
    page.keyboard.press("Escape")
    page.reload()
    assert page.locator(".turn").count() == 2, "the conversation is kept for the tab"
    page.click("#new-chat")
    assert page.locator(".turn").count() == 0


def test_without_adapters_nothing_is_offered_or_shown(server, open_page):
    page = open_page(server.url)
    page.wait_for_selector("text=A sum")
    wait_frames(page)
    assert not page.is_visible("#model-choice")
    assert not page.is_visible("#adapters")


def test_a_trace_id_can_be_copied(server, open_page):
    page = open_page(server.url, permissions=["clipboard-read", "clipboard-write"])
    trace = "0af7651916cd43dd8448eb211c80319c"
    posted = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Hello"}], "temperature": 0.5},
        headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"},
        timeout=PATIENCE,
    )
    handle = httpx.get(f"{server.url}/stage/requests/{posted.headers['x-request-id']}", timeout=PATIENCE).json()[
        "handle"
    ]
    wait_frames(page)
    page.hover("#timeline .window")
    page.click(f".request[aria-label^='Request {handle}:']")
    page.click(".trace button")
    page.wait_for_selector(".trace >> text=Copied")
    assert page.evaluate("() => navigator.clipboard.readText()") == trace
    assert "0.5" in page.locator(".waterfall .facts dd").all_inner_texts()


def test_the_stop_button_stops(server, open_page):
    page = open_page(server.url)
    make_long(page, 3000)
    page.fill("#prompt", "Tell me a story.")
    page.click("#send")
    page.wait_for_function("() => document.querySelector('.turn.assistant .body')?.textContent.length > 40")
    page.click("#stop")
    answer = answered(page)
    assert "stopped by you" in answer.locator("footer").inner_text()
    length = len(answer.locator(".body").inner_text())
    wait_frames(page, 3)
    page.wait_for_function("() => document.getElementById('figure-running').textContent === '0'")
    assert len(answer.locator(".body").inner_text()) == length
    assert page.evaluate("() => document.activeElement.id") == "prompt"


def test_thoughts_fold_and_tool_calls_are_cards(server, open_page):
    page = open_page(server.url)
    page.wait_for_selector("text=Use a tool")
    page.click("text=Use a tool")
    answer = answered(page)
    assert "get_weather" in answer.locator(".call").first.inner_text()
    assert "Oslo" in answer.locator(".call dd").first.inner_text()
    answer.locator(".result input").fill('{"temperature": 4, "condition": "rainy"}')
    answer.locator(".result button").click()
    answer = answered(page, times=2)
    assert "4" in answer.locator(".body").inner_text()
    page.click("#new-chat")
    page.click("text=Think first")
    answer = answered(page)
    thought = answer.locator("details.thought")
    assert thought.get_attribute("open") is None
    assert "19" in answer.locator(".body").inner_text()


def test_what_a_model_writes_stays_text(server, open_page):
    page = open_page(server.url)
    evil = (
        "<img src=x onerror=alert(1)> **bold** [a](javascript:alert(1)) [b](https://example.org) `<b>`\n\n"
        "| a | b |\n|---|---|\n| 1 | <i>2</i> |"
    )
    lines = [{"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]} for piece in evil]
    body = "".join(f"data: {httpx.Response(200, json=line).text}\n\n" for line in lines) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, headers={"content-type": "text/event-stream"}, body=body),
    )
    page.fill("#prompt", "<script>alert(1)</script>")
    page.keyboard.press("Enter")
    answer = answered(page)
    assert page.locator(".turn img, .turn script, .turn i").count() == 0
    assert "<script>" in page.locator(".turn.user").inner_text()
    assert "<img src=x onerror=alert(1)>" in answer.inner_text()
    assert answer.locator("strong").inner_text() == "bold"
    assert answer.locator("a").count() == 1
    assert answer.locator("a").get_attribute("rel").startswith("noopener")
    assert answer.locator("td").all_inner_texts() == ["1", "<i>2</i>"]


def test_the_stage_moves_under_load_and_shows_a_killed_worker(server, open_page, load):
    page = open_page(server.url)
    wait_frames(page)
    way = "[data-rate='worker-scheduler']"
    assert page.locator(way).text_content() == ""
    load(3)
    page.wait_for_function("s => parseFloat(document.querySelector(s).textContent) > 1", arg=way)
    page.wait_for_function("() => Number(document.getElementById('figure-running').textContent) >= 3")
    page.wait_for_function("() => parseFloat(document.getElementById('figure-tokens').textContent) > 1")
    page.wait_for_selector(".request.live [data-phase=decode]")
    page.wait_for_function("() => document.querySelector('.pulses circle[visibility=visible]')")
    places = [
        page.evaluate(
            "() => [...document.querySelectorAll('.pulses circle')].map((light) => light.getAttribute('cx')).join()"
        )
        for _ in range(2)
        if wait_frames(page, 1) is None
    ]
    assert places[0] != places[1], "the lights stand still"
    assert page.locator("[data-actor=worker] .badge").text_content() == ""
    os.kill(httpx.get(f"{server.url}/server_info", timeout=PATIENCE).json()["workers"][0]["pid"], signal.SIGKILL)
    page.wait_for_selector("[data-actor=worker][data-state=restarting], [data-actor=worker].struck")
    page.wait_for_function("() => document.querySelector('[data-actor=worker] .badge').textContent === '↻ 1'")
    assert page.locator("#figure-restarts").text_content() == "1"
    page.wait_for_selector("[data-actor=worker][data-state=running]")
    page.wait_for_function("s => parseFloat(document.querySelector(s).textContent) > 1", arg=way)


def test_a_phone_shows_one_at_a_time_without_sideways_scrolling(server, open_page):
    page = open_page(server.url, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    page.wait_for_selector("text=A sum")
    assert has_no_horizontal_scroll(page)
    page.tap("text=A sum")
    answered(page)
    assert has_no_horizontal_scroll(page)
    page.tap("#parameters-button")
    assert has_no_horizontal_scroll(page)
    assert not page.is_visible("#stage")
    page.tap("[data-show=stage]")
    wait_frames(page)
    assert page.is_visible("#stage")
    assert not page.is_visible("#chat")
    assert has_no_horizontal_scroll(page)


def test_dark_and_light(server, open_page):
    def lightness(page: Any) -> int:
        colour = page.evaluate("() => getComputedStyle(document.documentElement).backgroundColor")
        return sum(int(part) for part in colour.removeprefix("rgb(").rstrip(")").split(","))

    page = open_page(server.url, color_scheme="dark")
    assert lightness(page) < 150
    page.click("#theme-button")
    assert lightness(page) > 600
    page.reload()
    assert lightness(page) > 600, "the choice is kept"
    page.emulate_media(color_scheme="light")
    page.click("#theme-button")
    assert lightness(page) < 150


def test_less_motion_when_requested(server, open_page, load):
    page = open_page(server.url, reduced_motion="reduce")
    load(1)
    page.wait_for_function("() => Number(document.getElementById('figure-running').textContent) >= 1")
    wait_frames(page, 3)
    assert page.locator(".pulses circle[visibility=visible]").count() == 0


def test_a_chat_with_the_keyboard_alone(server, open_page):
    page = open_page(server.url)
    page.wait_for_selector("text=A sum")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.type("What is 17 + 25?")
    page.keyboard.press("Enter")
    answer = answered(page)
    assert "42" in answer.inner_text()
    assert page.locator("#chat-status").text_content() == "The answer is complete"
    for _ in range(12):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("() => document.activeElement.textContent") == "Its hops":
            break
    outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus cannot be seen"
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open] .hops li")
    page.keyboard.press("Escape")
    assert page.evaluate("() => document.activeElement.textContent") == "Its hops"


def test_every_control_has_a_name(server, open_page):
    page = open_page(server.url)
    page.wait_for_selector("text=A sum")
    page.click("text=A sum")
    answered(page)
    page.click("#parameters-button")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, textarea, a')]
          .filter((part) => part.checkVisibility())
          .filter((part) => !(part.getAttribute('aria-label') || part.textContent.trim() || part.labels?.length))
          .map((part) => part.outerHTML)"""
    )
    assert nameless == []
    page.fill("#parameter-temperature", "9")
    page.fill("#prompt", "Hello")
    page.keyboard.press("Enter")
    assert "Temperature" in page.locator(".parameters .trouble").inner_text()
    assert page.locator(".turn").count() == 2
