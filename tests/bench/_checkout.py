"""A child process that runs a benchmark with the code of another checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["Checkout"]


class Checkout:
    """A child that runs ``script`` of this checkout with the modules of the one at ``root``.

    It prints one line at the start, then answers each line of its input with a number.
    """

    def __init__(self, root: Path, script: str, *point: object) -> None:
        command = [sys.executable, "-P", script, "--child", *map(str, point)]
        environment = os.environ | {"PYTHONPATH": str(root), "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.weight_bytes = int(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a measured process died; its error stands above")
        return line

    def ask(self, *question: object) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{' '.join(map(str, question))}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
