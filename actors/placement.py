"""Which device each worker gets, and what its process must find in its environment before torch is imported there."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import msgspec

from actors.arguments import ArgumentError, Arguments
from kernels.environment import worker_environment
from kernels.npu.simulator.spec import SpecError
from kernels.npu.simulator.spec import parse as parse_simulation

__all__ = ["SIMULATOR_VARIABLE", "Placement", "place"]

SIMULATOR_VARIABLE = "TROUPE_NPU_SIMULATOR"

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_DEVICE_FILES = Path("/dev")
_PAGE_SIZES = {"cpu": 16, "npu": 128}


class Placement(msgspec.Struct, frozen=True):
    """``device``: cpu or npu. ``simulator``: what NPUs to simulate; empty for real ones."""

    device: str
    simulator: str = ""

    @property
    def page_size(self) -> int:
        """Tokens of a page of the cache when nobody says."""
        return _PAGE_SIZES[self.device]

    def environment(
        self, arguments: Arguments, rank: int, environ: Mapping[str, str], patience: float
    ) -> dict[str, str]:
        """Variables to add to the environment of worker ``rank``; ``environ`` is what it inherits.

        The worker sees one NPU, its own. ``patience``: seconds after which its supervisor takes it for hung; a
        collective gives up earlier, so that its own error is what gets reported.
        Raises ArgumentError for an NPU that the environment hides.
        """
        # Without it, importing torch imports torch_npu wherever that is installed, which fails where CANN is not.
        added: dict[str, str] = worker_environment(environ) | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        if arguments.tensor_parallel_size > 1 and "GLOO_SOCKET_IFNAME" not in environ:
            added["GLOO_SOCKET_IFNAME"] = _LOOPBACK  # else gloo listens where the host's name points to
        if self.device != "npu":
            return added
        index = arguments.base_gpu_id + rank * arguments.gpu_id_step
        visible = [part.strip() for part in environ.get(_VISIBLE, "").split(",") if part.strip()]
        if visible and index >= len(visible):
            raise ArgumentError(
                f"base_gpu_id: {_VISIBLE} shows {len(visible)} NPUs, and number {index} of them, counted from 0, is "
                f"asked for; see also gpu_id_step and tensor_parallel_size"
            )
        added[_VISIBLE] = visible[index] if visible else str(index)
        defaults = {"HCCL_EXEC_TIMEOUT": str(max(30, int(0.8 * patience))), "HCCL_CONNECT_TIMEOUT": "120"}
        if not self.simulator:
            defaults["PYTORCH_NPU_ALLOC_CONF"] = "expandable_segments:True"
        return added | {name: value for name, value in defaults.items() if name not in environ}


def place(arguments: Arguments, environ: Mapping[str, str]) -> Placement:
    """The device that the arguments ask for, or the best that is there. Looks at files only: it must not import torch.

    Raises ArgumentError when the environment's simulator cannot be understood.
    """
    if arguments.device == "cpu":
        return Placement("cpu")
    simulator = arguments.npu_simulator or environ.get(SIMULATOR_VARIABLE, "").strip()
    if simulator:
        try:
            parse_simulation(simulator)
        except SpecError as error:
            raise ArgumentError(f"{SIMULATOR_VARIABLE}: {error}") from None
        return Placement("npu", simulator)
    if arguments.device == "npu" or (find_spec("torch_npu") is not None and _npu_is_there()):
        return Placement("npu")
    return Placement("cpu")


def _npu_is_there() -> bool:
    return any(_DEVICE_FILES.glob("davinci[0-9]*"))
