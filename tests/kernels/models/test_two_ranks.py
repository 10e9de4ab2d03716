"""Families on two ranks, which divide heads, projections and experts between them."""

from __future__ import annotations

import pytest

from tests.kernels.distributed.ranks import run_ranks
from tests.kits.driver import DIVIDED
from tests.kits.published import PUBLISHED


@pytest.mark.parametrize("name", [*DIVIDED, *PUBLISHED])
def test_two_ranks_compute_what_one_does(name, reference, prompts):
    model, (text,) = reference(f"parallel-{name}"), prompts(37)
    first, second = run_ranks([{"model": str(model.path), "prompts": [text], "length": 46}])
    assert first[0]["tokens"] == second[0]["tokens"] == [model.greedy(text, 46)]
