"""Tests of what only A5 has (on_a5.py), on simulated NPUs of that generation whatever those of this process are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]


def test_what_only_a5_has():
    environment = os.environ | {"TROUPE_NPU_SIMULATOR": "A5"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/devices/npu/on_a5.py"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
