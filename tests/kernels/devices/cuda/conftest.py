"""Where the Triton kernels are tested: on a GPU, or with TRITON_INTERPRET=1 on the CPU."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]  # nothing here can be imported without it


@pytest.fixture
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU; TRITON_INTERPRET=1 runs the kernels on the CPU")
    return torch.device("cpu")
