"""What ranks say of a model in every way of dividing it: what transformers says."""

from __future__ import annotations

import pytest

from tests.kernels.distributed.divisions import FOUR_RANKS, TWO_RANKS, compare


@pytest.mark.parametrize(
    ("divisions", "size"), [(TWO_RANKS, 2), pytest.param(FOUR_RANKS, 4, marks=pytest.mark.long)], ids=["two", "four"]
)
def test_ranks_generate_what_one_device_does_in_every_division(divisions, size, reference, prompts):
    prefix, *ends = prompts(32, 7, 5)
    compare(reference, divisions, size, [prefix + end for end in ends])


@pytest.mark.long
@pytest.mark.parametrize("half", [0, 1])
def test_two_cuda_ranks_generate_what_one_device_does_in_every_division(half, cuda, reference, prompts):
    """float32, in graphs of up to four rows."""
    prefix, *ends = prompts(32, 7, 5)
    divisions = TWO_RANKS[half::2]
    compare(reference, divisions, 2, [prefix + end for end in ends], graph_rows=[1, 2, 4], **cuda)
