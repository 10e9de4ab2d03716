"""Activates the NPU simulator in this test process; import it before torch. No effect without torch_npu.

``REASON``: why there are no NPUs, "" if there are. ``SPEC``: the simulated NPUs, from TROUPE_NPU_SIMULATOR, or A2.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys

from kernels.contract.environment import hide_broken_npu

__all__ = ["REASON", "SPEC"]

SPEC = os.environ.get("TROUPE_NPU_SIMULATOR") or "A2"
REASON = ""

if importlib.util.find_spec("torch_npu") is None:
    REASON = "torch_npu is not installed: pip install -e '.[npu-sim]'"
elif shutil.which("gcc") is None or shutil.which("nm") is None:
    REASON = "the NPU simulator needs gcc and nm (binutils)"
else:
    from kernels.devices.npu_simulator.activate import activate, active

    if active() is None and "torch" in sys.modules:
        REASON = "torch was imported before the simulator: run tests/kernels/devices/npu in a process of its own"
    else:
        activate(SPEC)
if REASON:
    hide_broken_npu()
