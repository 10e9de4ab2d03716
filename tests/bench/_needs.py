"""Requirements of benchmarks: each exits with a message that names what is missing."""

from __future__ import annotations

import importlib.util
import shutil
import sys

__all__ = ["need_gpu", "need_native_operators", "need_npu"]


def need_gpu() -> None:
    """Exit unless torch can use an NVIDIA GPU."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("an NVIDIA GPU and a PyTorch built for CUDA are needed here; none was found")


def need_npu(simulated: bool) -> None:
    """Exit unless torch_npu is installed, and the simulator's compiler for simulated NPUs."""
    if importlib.util.find_spec("torch_npu") is None:
        sys.exit("torch_npu is needed here: pip install 'troupe-llm[npu-sim]'")
    if simulated and not (shutil.which("gcc") and shutil.which("nm")):
        sys.exit("the NPU simulator is needed here, and so are gcc and nm (binutils)")


def need_native_operators() -> None:
    """Exit unless the CPU's native operators can be built."""
    from kernels.contract.cpu_isa import chosen_isa
    from kernels.devices.cpu.native.library import NEEDED_ISA, BuildError, build

    if chosen_isa() < NEEDED_ISA:
        sys.exit("native operators are needed here, which need AVX2 or NEON; see --cpu-isa")
    try:
        build()
    except BuildError as error:
        sys.exit(f"native operators are needed here: {error}")
