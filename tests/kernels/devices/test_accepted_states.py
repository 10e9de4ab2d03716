"""The second run of accepted draft tokens, after a captured pass."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.core.batch import BoundedRows, StateSegments, VerifyingRows
from kernels.devices.state_cache import run_accepted


def test_accepted_tokens_after_a_captured_pass_lie_a_stride_apart() -> None:
    """A decode and a row with fewer draft tokens stand among rows of four places each; an ended row is left out."""
    seen: list[StateSegments] = []

    def run(inputs: tuple[Tensor, ...], segments: tuple[StateSegments, ...]) -> Tensor:
        seen.extend(segments)
        return inputs[0]

    captured = VerifyingRows(slice(0, 8), slice(0, 32), stride=4)
    captured.record(run, (torch.zeros(32),))
    starts, counts = np.array([5, 6, 9]), np.array([1, 4, 3])
    pages = np.array([[1, 2, 0], [3, 4, 5], [6, 7, 8]], dtype=np.int32)
    rows = BoundedRows(starts, counts, pages, 4, verifying=VerifyingRows(slice(1, 3), slice(1, 8)))
    assert rows.verifying is not None
    rows.verifying.use(captured, 3)
    run_accepted(rows, np.array([1, 3, 0]), torch.from_numpy)
    assert [each.tokens.tolist() for each in seen] == [[[0, 0], [4, 5]], [[6]]]
    assert [each.sources.tolist() for each in seen] == [[2, 4], [4]]
    assert [each.targets.tolist() for each in seen if each.targets is not None] == [[2, 4], [5]]
    assert len(captured.runs) == 1  # of the next replay
