"""Put simulated NPUs under this test process; import it before torch. Does nothing where torch_npu is not installed.

``REASON``: why there are none, "" when there are. ``SPEC``: which ones, from TROUPE_NPU_SIMULATOR, else A2.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys

from kernels.environment import hide_broken_npu

__all__ = ["REASON", "SPEC"]

SPEC = os.environ.get("TROUPE_NPU_SIMULATOR") or "A2"
REASON = ""

if importlib.util.find_spec("torch_npu") is None:
    REASON = "torch_npu is not installed: pip install -e '.[npu-sim]'"
elif shutil.which("gcc") is None or shutil.which("nm") is None:
    REASON = "the NPU simulator needs gcc and nm (binutils)"
else:
    from kernels.npu.simulator.activate import activate, active

    if active() is None and "torch" in sys.modules:
        REASON = "torch was imported before the simulator: run tests/kernels/npu in a process of its own"
    else:
        activate(SPEC)
if REASON:
    hide_broken_npu()
