"""Which devices ranks may have here."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch


@pytest.fixture
def cuda() -> dict[str, Any]:
    """Options of ranks that have a GPU each: two of this machine, or of Triton's interpreter on the CPU."""
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        return {"device": "cuda", "page_size": 16}
    if torch.cuda.device_count() < 2:
        pytest.skip(f"{torch.cuda.device_count()} GPUs, not 2; TRITON_INTERPRET=1 runs the kernels on the CPU")
    return {"device": "cuda", "page_size": 16}
