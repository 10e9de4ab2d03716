"""The documentation is current, and its links lead somewhere."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.options import options
from tests.docs.pages import ROOT, generated, stale_pages

WRITTEN = [ROOT / "README.md", *sorted((ROOT / ".github").rglob("*.md"))]
MAX_README_LINES = 145  # without the generated matrix, which grows with the families


def body(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", body(page), flags=re.MULTILINE):
        text = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).strip()
        anchor, count = text.replace(" ", "-"), 0
        while (name := f"{anchor}-{count}" if count else anchor) in found:
            count += 1
        found.add(name)
    return found


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", body(page))
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", link)]


def broken(page: Path) -> list[str]:
    found = []
    for link in links(page):
        name, _, anchor = unquote(link).partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in anchors(target))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_and_anchors_exist(page: Path) -> None:
    assert broken(page) == []


def test_imports_in_examples_work() -> None:
    """Those of the project's own packages."""
    blocks = [
        block for page in WRITTEN for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)
    ]
    found = [
        (line[1], name.strip())
        for block in blocks
        for line in re.finditer(r"^from ((?:app|actors|kernels|telemetry)[\w.]*) import (.+)$", block, re.MULTILINE)
        for name in line[2].split(",")
    ]
    assert found
    assert [(module, name) for module, name in found if not hasattr(import_module(module), name)] == []


def test_paths_of_the_repository_exist() -> None:
    """Those in backticks, but in decisions, which are not edited later."""
    pages = [page for page in WRITTEN if page.parent.name != "decisions"]
    found = {
        (page.name, path)
        for page in pages
        for path in re.findall(r"`((?:app|actors|kernels|telemetry|tests)/[\w./-]*)`", page.read_text(encoding="utf-8"))
    }
    assert len(found) > 20
    assert [(page, path) for page, path in sorted(found) if not (ROOT / path).exists()] == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` title\n\n[a](page.md#a-b-title) [b](#other) [c](gone.md) [d](https://example.org/gone)\n")
    assert broken(page) == ["#other", "gone.md"]


def test_generated_parts_are_current() -> None:
    assert stale_pages() == [], "run: python -m tests.docs"


def test_a_stale_part_is_found_and_a_missing_one_refused() -> None:
    text = "<!-- x: python -m tests.docs -->\nold\n<!-- end of x -->"
    assert generated(text, {"x": lambda: "new"}) == text.replace("old", "new")
    with pytest.raises(ValueError, match="needs the comments"):
        generated("nothing", {"x": lambda: "new"})


def test_the_readme_is_short() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    written = re.sub(r"^<!-- matrix: .*?^<!-- end of matrix -->$", "", page, flags=re.DOTALL | re.MULTILINE)
    assert written != page
    assert len(written.splitlines()) <= MAX_README_LINES


def test_every_option_is_on_the_page() -> None:
    from actors.options import ARGUMENTS

    page = (ROOT / ".github/docs/arguments.md").read_text(encoding="utf-8")
    assert [argument.name for argument in ARGUMENTS if f"`--{argument.name}`" not in page] == []


def test_a_name_that_sets_a_flag_to_false_is_marked_as_the_reverse() -> None:
    assert "| `--disable-radix-cache`; reverse: `--enable-prefix-caching` | off |" in options()


def test_every_decision_is_listed() -> None:
    folder = ROOT / ".github/decisions"
    listed = links(folder / "README.md")
    assert [path.name for path in sorted(folder.glob("0*.md")) if path.name not in listed] == []


@pytest.mark.parametrize("path", sorted((ROOT / ".github/decisions").glob("0*.md")), ids=lambda path: path.name)
def test_a_decision_has_the_sections_of_the_template(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.match(r"# 0\d{3}: \S", text)
    assert path.name[:4] == text[2:6]
    sections = ("**Context.**", "**Tried.**", "**Kept.**", "**Why.**")
    assert [section for section in sections if section not in text] == []
