"""`python -m tests.bench NAME [arguments]` runs the benchmark tests/bench/NAME.py."""

import importlib
import sys
from pathlib import Path


def main() -> None:
    folder = Path(__file__).parent
    names = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        sys.exit(f"usage: python -m tests.bench NAME [arguments], where NAME is one of: {', '.join(names)}")
    importlib.import_module(f"tests.bench.{sys.argv[1]}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
