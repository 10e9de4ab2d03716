"""A GGUF file of a family, written as llama.cpp's converter writes it, computes what the checkpoint computes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from kernels.models.config_loader import read_config
from tests.kits.declared import declared, open_gguf
from tests.kits.gguf_checkpoints import greedy
from tests.kits.gguf_families import write_family

FAMILIES = (
    *("arcee", "cohere", "cohere-normed", "gguf-cohere2", "ernie4.5-moe", "ernie4.5-moe-biased"),
    *("exaone4", "exaone4-full", "exaone-moe", "gemma", "gguf-gemma2", "gguf-gemma3", "gguf-glm", "glm4", "glm4-moe"),
    *("granite", "granite-moe", "hunyuan-moe", "minimax-m2", "ministral3", "olmo", "olmo3", "olmoe", "gguf-phi3-long"),
    *("seed-oss", "smollm3", "stablelm", "gguf-starcoder2", "xverse"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_says_what_its_directory_says(name, reference, drive, prompts, tmp_path):
    """Of Gemma's norms the file holds what they come to."""
    model = reference(name)
    file = write_family(model.path, tmp_path / "model.gguf")
    (prompt,) = prompts(24)
    assert greedy(drive, file, prompt, 60) == model.greedy(prompt, 60)
    stored, checkpoint = load_file(model.path / "model.safetensors"), open_gguf(file)
    offset = read_config(model.path).norm_offset
    for tensor in declared(file):
        if tensor in stored:
            added = offset if tensor.endswith("norm.weight") else 0.0
            torch.testing.assert_close(checkpoint.floats(tensor).reshape(-1), stored[tensor].reshape(-1) + added)
