"""Hidden states and experts that requests return, on the GPU platform, by Triton's interpreter: those of the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.devices.cuda.interpreted import install
from tests.kits.returned_values import make_sparse_model, returned


def test_states_and_experts_are_those_of_the_cpu(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_sparse_model(tmp_path)
    tokens, states, experts = returned(path)
    if device.type == "cpu":
        install(monkeypatch)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    found = returned(path, device="cuda", graph_rows=(4,))
    assert found[0] == tokens
    for one, other in zip(found[1], states, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(found[2], experts, strict=True):
        assert (np.sort(ours, -1) == np.sort(theirs, -1)).all()
