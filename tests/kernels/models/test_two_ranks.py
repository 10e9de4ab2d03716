"""Families on two ranks, which divide heads, projections and experts between them."""

from __future__ import annotations

import pytest

from tests.kernels.distributed.ranks import run_ranks
from tests.kits.families import TWO_RANKS


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_compute_what_one_does(name, reference, prompts):
    model, (text,) = reference(f"parallel-{name}"), prompts(37)
    first, second = run_ranks([{"model": str(model.path), "prompts": [text], "length": 43}])
    (tokens,) = first[0]["tokens"]
    assert second[0]["tokens"] == [tokens]
    assert len(tokens) == 43
    assert model.continues(text, tokens[37:])
