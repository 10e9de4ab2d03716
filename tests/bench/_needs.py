"""What a benchmark needs of its machine: it says so and ends, instead of a traceback from deep inside."""

from __future__ import annotations

import importlib.util
import shutil
import sys

__all__ = ["need_gpu", "need_native_operators", "need_npu"]


def need_gpu() -> None:
    """An NVIDIA GPU that torch can use."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("an NVIDIA GPU and a PyTorch built for CUDA are needed here; there is none")


def need_npu(simulated: bool) -> None:
    """torch_npu; for simulated NPUs what the simulator is compiled by, too."""
    if importlib.util.find_spec("torch_npu") is None:
        sys.exit("torch_npu is needed here: pip install 'troupe-llm[npu-sim]'")
    if simulated and not (shutil.which("gcc") and shutil.which("nm")):
        sys.exit("the NPU simulator is needed here, and so are gcc and nm (binutils)")


def need_native_operators() -> None:
    """The native operators of the CPU."""
    from kernels.cpu.isa import chosen_isa
    from kernels.cpu.native.library import NEEDED_ISA, BuildError, build

    if chosen_isa() < NEEDED_ISA:
        sys.exit(f"native operators are needed here, which need the instruction set {NEEDED_ISA}; see --cpu-isa")
    try:
        build()
    except BuildError as error:
        sys.exit(f"native operators are needed here: {error}")
