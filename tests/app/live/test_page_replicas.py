"""The live page of several replicas, in a real Chromium: a box of the stage stands for several actors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kits.browser import browser, needs_browser, open_page
from tests.kits.real_server import RealServer, running

__all__ = ["browser", "open_page"]

pytestmark = needs_browser

BOXES = """() => Object.fromEntries([...document.querySelectorAll('#graph .box')].map((box) => {
  const [title, words, depth, face] = ['title', 'words', 'depth', 'face'].map((name) => box.querySelector(`.${name}`));
  const end = (part) => part.getBBox().x + part.getBBox().width;
  const fits = end(title) + 8 < end(face) && end(words) + 4 < depth.getBBox().x;
  return [title.textContent, [depth.textContent, fits]];
}))"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with running(tmp_path_factory.mktemp("page") / "log", "--cpu-threads", "1", "--dp-size", "2") as started:
        yield started


def test_a_box_of_several_actors_has_room_for_their_number(server, open_page):
    page = open_page(server.url)
    page.wait_for_selector("#graph .depth:text-is('×2')")
    boxes = page.evaluate(BOXES)
    several = {title: found for title, found in boxes.items() if found[0]}
    assert several == {title: ["×2", True] for title in ("Scheduler", "Cache", "Worker", "Detokenizer")}
