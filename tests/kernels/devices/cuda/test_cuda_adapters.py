"""Requests of several adapters run in one batch on a GPU, in captured graphs and without them."""

from __future__ import annotations

import pytest

from tests.kernels.devices.cuda.interpreted import install
from tests.kits.adapters import assert_rows_use_their_adapters, end_modules
from tests.kits.tiny_model import make_tiny_model


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_rows_use_their_adapters(graphs, device, drive, prompts, tmp_path, monkeypatch):
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=1)
    vocab = drive(path).info.vocab_size
    if device.type == "cpu":
        install(monkeypatch)
    options = {"device": "cuda", "page_size": 16, "max_slots": 5, "max_step_tokens": 64, "context_length": 64}
    options |= {"disable_graphs": not graphs, "graph_rows": (1, 4) if graphs else ()}
    options["more"] = end_modules(path)
    driver = assert_rows_use_their_adapters(path, tmp_path, drive, prompts, vocab, 1e-3, steps=3, **options)
    assert driver.info.graph_rows == options["graph_rows"]
