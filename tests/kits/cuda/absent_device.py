"""A runner on a GPU that is absent."""

from __future__ import annotations

import json

import pytest
import torch

from tests.kernels.devices.cuda.absent import install

__all__ = [
    "CONFIG",
    "drive",
]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 40000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@pytest.fixture
def drive(monkeypatch, tmp_path, drive):
    """A runner of made-up weights, and what it captured."""

    def make(config=CONFIG, **options):
        path = tmp_path / "model"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        reported = install(monkeypatch)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        given = {"load_format": "dummy", "dtype": "bfloat16", "max_total_tokens": 1 << 15, "page_size": 64}
        options = given | {"graph_rows": (1, 4)} | options
        return drive(path, device="cuda", context_length=4096, **options), reported

    return make
