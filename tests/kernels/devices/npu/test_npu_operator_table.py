"""The table of operators in the documentation is what the command prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.npu_operators import USES
from tests.kits.simulated_npu import SPEC

ROOT = Path(__file__).parents[4]


@pytest.mark.long
def test_the_table_is_what_the_engine_calls():
    generation = SPEC.split(":")[0].upper()
    rows = [
        line.strip("| ").split(" | ")
        for line in (ROOT / ".github/docs/ascend.md").read_text().splitlines()
        if "none yet |" in line
    ]
    table = {name.strip("`"): (use, generations.split(", "), checked) for name, use, generations, checked, _ in rows}
    assert {name: use for name, (use, _, _) in table.items()} == USES
    command = [sys.executable, "-m", "tests.bench", "npu_operators", generation]
    environment = os.environ | {"TROUPE_NPU_SIMULATOR": generation, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    called = json.loads(done.stdout.splitlines()[-1])
    assert called == {name: checked for name, (_, on, checked) in table.items() if generation in on}
