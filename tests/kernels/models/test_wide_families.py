"""Models that a GPU is compared with the CPU by: what they predict does not hang on the last bit of a number."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kits.parity import scored
from tests.kits.wide_families import WIDE_VOCAB, save_wide


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4-equal", "gemma4-moe"])
def test_another_order_of_sums_changes_little(name, tmp_path, drive):
    """Chunks add in another order than a whole prompt: less than a quarter of ``test_cuda_wide_families``' bound."""
    save_wide(name, tmp_path)
    options = {"page_size": 64, "max_step_tokens": 320, "max_total_tokens": 1024, "dtype": "float32"}
    prompt = np.random.default_rng(3).integers(0, WIDE_VOCAB, 300).tolist()
    whole, chunks = (
        scored(drive(tmp_path, **options), prompt, counts, WIDE_VOCAB) for counts in ([300], [70, 129, 1, 100])
    )
    assert np.abs(whole - chunks).max() < 5e-4
