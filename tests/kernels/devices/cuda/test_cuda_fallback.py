"""Models of transformers' modeling code on a GPU: their logits and tokens are transformers' own."""

from __future__ import annotations

import pytest
import torch

from tests.kits.fallback import drive_code, greatest_difference
from tests.kits.tiny_architectures import save_tiny


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", ["gpt_neox", "phi", "gemma2", "mixtral"])
def test_logits_and_tokens_are_transformers(kind, tmp_path):
    """Partial rotation, caps, windows and experts."""
    model = save_tiny(kind, tmp_path)
    driver = drive_code(tmp_path, device="cuda", page_size=16)
    assert driver.info.device.startswith("cuda")
    assert greatest_difference(model, driver) < 1e-3
