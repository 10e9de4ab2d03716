"""Models of transformers' modeling code on a simulated NPU: their logits and tokens are transformers' own."""

from __future__ import annotations

import pytest

from tests.kits.fallback import drive_code, greatest_difference
from tests.kits.tiny_architectures import save_tiny

KINDS = ["gpt_neox", "phi", "gemma2", "mixtral", "gpt_oss"]
"""Partial rotation, caps, windows, experts and sinks."""


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_tokens_are_transformers(kind, tmp_path):
    model = save_tiny(kind, tmp_path)
    driver = drive_code(tmp_path, device="npu", page_size=128, max_total_tokens=2048)
    assert driver.info.device.startswith("npu")
    assert greatest_difference(model, driver) < 1e-3


def test_bfloat16_is_near(tmp_path):
    """By the fused attention."""
    model = save_tiny("phi", tmp_path)
    driver = drive_code(tmp_path, device="npu", page_size=128, max_total_tokens=2048, dtype="bfloat16")
    assert greatest_difference(model, driver) < 0.3
