"""Requests of several adapters run in one batch on a simulated NPU, in captured graphs and without them."""

from __future__ import annotations

import pytest

from tests.kits.adapters import assert_rows_use_their_adapters
from tests.kits.tiny_model import make_tiny_model


@pytest.mark.parametrize(("graphs", "dtype", "atol"), [(False, "float32", 1e-3), (True, "bfloat16", 1.0)])
def test_rows_use_their_adapters(graphs, dtype, atol, drive, prompts, tmp_path):
    """Graphs are captured of the fused operator for attention, which takes 16 bits."""
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=1)
    vocab = drive(path).info.vocab_size
    options = {"device": "npu", "page_size": 128, "max_slots": 5, "max_step_tokens": 64, "dtype": dtype}
    options |= {"disable_graphs": not graphs, "max_total_tokens": 16 * 128}
    driver = assert_rows_use_their_adapters(path, tmp_path, drive, prompts, vocab, atol, steps=3, **options)
    assert bool(driver.info.graph_rows) == graphs
