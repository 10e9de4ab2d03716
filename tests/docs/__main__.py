"""``python -m tests.docs`` writes the generated parts of README.md and .github/docs; ``--check`` only compares them."""

from __future__ import annotations

import argparse

from tests.docs.pages import PAGES, ROOT, stale_pages, write_pages


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.docs", description=(__doc__ or "").replace("``", ""))
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page is not current, and write nothing")
    if parser.parse_args().check:
        stale = stale_pages()
        print("\n".join(f"{path.relative_to(ROOT)} is not current: run python -m tests.docs" for path in stale) or "ok")
        return int(bool(stale))
    write_pages()
    print("\n".join(str(path.relative_to(ROOT)) for path in PAGES))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
