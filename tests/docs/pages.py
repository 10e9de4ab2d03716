"""Generated parts of pages: where they stand and what they contain.

A generated part stands between two comments, ``<!-- NAME: python -m tests.docs -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.docs.matrix import architectures, code, matrix, proofs
from tests.docs.options import options

__all__ = ["PAGES", "ROOT", "generated", "stale_pages", "write_pages"]

ROOT = Path(__file__).parents[2]
PAGES: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    ROOT / "README.md": {"matrix": matrix},
    ROOT / ".github/docs/models.md": {"architectures": architectures, "code": code, "proofs": proofs},
    ROOT / ".github/docs/arguments.md": {"options": options},
}
"""Each page and its generated parts: name -> Markdown."""


def generated(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """``text`` with each of ``parts`` written anew. Raises ValueError for a part whose comments are missing."""
    for name, make in parts.items():
        begin, end = f"<!-- {name}: python -m tests.docs -->", f"<!-- end of {name} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"the page needs the comments {begin} and {end}")
        part = f"{begin}\n{make().strip()}\n{end}"
        text = pattern.sub(lambda _, part=part: part, text)
    return text


def stale_pages() -> list[Path]:
    """The pages that differ from what would be written."""
    return [
        path for path, parts in PAGES.items() if path.read_text(encoding="utf-8") != generated(path.read_text(), parts)
    ]


def write_pages() -> None:
    for path, parts in PAGES.items():
        path.write_text(generated(path.read_text(encoding="utf-8"), parts), encoding="utf-8")
