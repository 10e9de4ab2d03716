"""Ranks of a benchmark."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.bench._device_ranks import _gpu
from tests.kits.waiting import PATIENCE

CODE = """
import time
from tests.bench._device_ranks import started_ranks
with started_ranks(2, 1, 1, ["--no-such-option"]):
    time.sleep(3600)
"""


def test_a_rank_that_dies_ends_the_benchmark_at_once() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 1
    assert "rank 1 of 2 exited with code 2" in ended.stderr


@pytest.mark.parametrize(("visible", "own"), [("", "1"), ("6,4", "4")])
def test_a_rank_sees_one_gpu_of_those_that_are_visible(visible: str, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _gpu(1) == own
