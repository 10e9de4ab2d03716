"""The tensors that a graph reads are filled from a step's."""

from __future__ import annotations

import pytest
import torch

from kernels.core.batch import ForwardBatch
from kernels.devices.graphs import GraphBuffers


@pytest.mark.parametrize("received", [False, True], ids=["copied", "in place"])
@pytest.mark.parametrize("places", [None, [0, 1, 3]])
def test_states_in_place_are_those_of_the_tokens_and_padding_is_zero(received, places):
    buffers = GraphBuffers(4, 2, 16, torch.device("cpu"), torch.zeros(0, 3))
    assert buffers.states is not None
    buffers.states.fill_(float("nan"))
    given = torch.arange(1.0, 10.0).view(3, 3)
    states = buffers.states[:3].copy_(given) if received else given
    tokens = torch.tensor([5, 6, 7])
    batch = ForwardBatch(tokens, tokens, tokens, {}, states)
    buffers.fill(batch, None if places is None else torch.tensor(places), 6)
    expected = torch.zeros(6, 3)
    expected[[0, 1, 2] if places is None else places] = given
    assert torch.equal(buffers.states[:6], expected)
    assert buffers.states[6:].isnan().all()
