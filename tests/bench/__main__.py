"""`python -m tests.bench NAME [arguments]` runs the benchmark tests/bench/NAME.py."""

import importlib
import os
import re
import sys
from pathlib import Path

from kernels.contract.cpu_isa import isa_environment
from kernels.contract.environment import NO_AUTOLOAD
from tests.bench._record import write

__all__ = ["names"]


def names() -> list[str]:
    """The names of the benchmarks: the files here with a ``main``. Other files are parts of one."""
    found = Path(__file__).parent.glob("[!_]*.py")
    has_main = re.compile(r"^(def main\(|from .* import main$)", re.MULTILINE)
    return sorted(path.stem for path in found if has_main.search(path.read_text(encoding="utf-8")))


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in names():
        sys.exit(f"usage: python -m tests.bench NAME [arguments], where NAME is one of: {', '.join(names())}")
    os.environ.update(NO_AUTOLOAD | isa_environment(os.environ))  # before torch, which reads both once
    name, words = sys.argv[1], sys.argv[2:]
    importlib.import_module(f"tests.bench.{name}").main(words)
    if "--record" in words:
        print(f"{write(name, words)} rows appended to tests/bench/results/{name}.jsonl")


if __name__ == "__main__":
    main()
