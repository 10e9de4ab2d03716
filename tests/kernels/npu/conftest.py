"""Put the simulated NPU under this test process before anything imports torch.

TROUPE_NPU_SIMULATOR says which (default A2). Without torch_npu, or when torch is already imported without the simulator
(a run that also holds other torch tests), these tests are skipped and say why.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

SPEC = os.environ.get("TROUPE_NPU_SIMULATOR") or "A2"
REASON = ""

if importlib.util.find_spec("torch_npu") is None:
    REASON = "torch_npu is not installed: pip install -e '.[npu-sim]'"
elif shutil.which("gcc") is None or shutil.which("nm") is None:
    REASON = "the simulator needs gcc and nm"
else:
    from kernels.npu.simulator.activate import activate, active

    if active() is None and "torch" in sys.modules:
        REASON = "torch was imported before the simulator: run tests/kernels/npu in a process of its own"
    else:
        activate(SPEC)

HERE = Path(__file__).parent
collect_ignore_glob = ["test_*.py", "*/test_*.py"] if REASON else []


def pytest_report_header() -> str:
    return f"npu: skipped, {REASON}" if REASON else f"npu: simulated {SPEC}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if REASON:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session")
def simulator():
    """The simulated machine of this process."""
    from kernels.npu.simulator.activate import active

    found = active()
    assert found is not None
    return found
