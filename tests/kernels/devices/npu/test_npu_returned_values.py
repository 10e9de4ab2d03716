"""Hidden states and experts that requests return, on a simulated NPU: those of the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.kits.returned_values import make_sparse_model, returned


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_states_and_experts_are_those_of_the_cpu(graphs: bool, tmp_path: Path) -> None:
    path = make_sparse_model(tmp_path)
    tokens, states, experts = returned(path)
    found = returned(path, device="npu", page_size=128, disable_graphs=not graphs, disable_prompt_graphs=not graphs)
    assert found[0] == tokens
    for one, other in zip(found[1], states, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(found[2], experts, strict=True):
        assert (np.sort(ours, -1) == np.sort(theirs, -1)).all()
