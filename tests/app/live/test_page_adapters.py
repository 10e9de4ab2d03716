"""Adapters on the live page, in a real Chromium: the page's choice, and what the stage shows of them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from app.understudy import MODEL_DIR
from tests.kits.adapters import adapted_modules, save_adapter
from tests.kits.browser import answered, browser, has_no_horizontal_scroll, needs_browser, open_page, wait_frames
from tests.kits.real_server import RealServer, running
from tests.kits.waiting import PATIENCE

__all__ = ["browser", "open_page"]

pytestmark = needs_browser

CHIP = "#adapters li:has(b:text-is('{}'))"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("page")
    modules = {name: shape for name, shape in adapted_modules(MODEL_DIR).items() if ".0.self_attn.q_proj" in name}
    paths = [f"{name}={save_adapter(folder / name, modules, seed)}" for seed, name in enumerate(("first", "other"))]
    options = ("--cpu-threads", "1", "--max-loras-per-batch", "1", "--admin-api-key", "root", "--lora-paths", *paths)
    with running(folder / "log", *options) as started:
        yield started


def test_the_chosen_adapter_answers_and_the_stage_shows_it(server, open_page):
    page = open_page(server.url)
    page.wait_for_selector(CHIP.format("other"))
    assert page.locator("#adapters [data-resident=true]").count() == 0
    assert set(page.locator("#model-choice option").all_inner_texts()) == {"understudy", "first", "other"}
    page.select_option("#model-choice", "other")
    page.fill("#prompt", "Hello")
    page.keyboard.press("Enter")
    answer = answered(page)
    assert answer.locator(".who").inner_text().lower() == "other"
    page.wait_for_selector(CHIP.format("other") + "[data-resident=true]")
    assert "1 in all" in page.locator(CHIP.format("other")).inner_text()
    assert page.locator(CHIP.format("first")).get_attribute("data-resident") == "false"
    answer.get_by_role("button", name="Its hops").click()
    page.wait_for_selector(".waterfall .facts dt:text-is('troupe.adapter') + dd:text-is('other')")


def test_an_adapter_that_is_loaded_later_appears_and_leaves(server, open_page):
    page = open_page(server.url)
    page.wait_for_selector(CHIP.format("first"))
    chip = page.locator(CHIP.format("first"))
    headers = {"Authorization": "Bearer root"}
    wait_frames(page)
    for path in ("unload", "load"):
        body = {"lora_name": "first"} | ({"lora_path": str(server.log.parent / "first")} if path == "load" else {})
        found = httpx.post(f"{server.url}/{path}_lora_adapter", json=body, headers=headers, timeout=PATIENCE)
        assert found.status_code == 200, found.text
        chip.wait_for(state="detached" if path == "unload" else "attached")
        page.wait_for_function(
            "n => document.querySelectorAll('#model-choice option').length === n", arg=2 if path == "unload" else 3
        )


def test_a_phone_has_room_for_adapters(server, open_page):
    page = open_page(server.url, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    page.wait_for_selector("#model-choice", state="visible")
    assert has_no_horizontal_scroll(page)
    page.tap("[data-show=stage]")
    page.wait_for_selector(CHIP.format("other"), state="visible")
    assert has_no_horizontal_scroll(page)
