"""Counts of the tokens that experts take."""

from __future__ import annotations

import torch

from kernels.models.layers.routes import count_tokens


def test_tokens_are_counted_in_layers_with_experts_alone() -> None:
    experts = torch.tensor([[[0, 0], [3, 1]], [[0, 0], [1, 2]]], dtype=torch.int32)
    counts = count_tokens(experts, [1], 4)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [[0, 0, 0, 0], [0, 2, 1, 1]]
