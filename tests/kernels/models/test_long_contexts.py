"""Positions far beyond the length that a model was first trained on: 130,000 tokens in chunks, by each way of
stretching. One layer with a window: its last logits depend on the last tokens and on their positions alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kernels.contract.step import SlotSampling
from tests.kits.driver import COMMON, VOCAB
from tests.kits.parity import distribution

LENGTH, WINDOW = 130_000, 48
SIZES = COMMON | {"num_hidden_layers": 1, "head_dim": 12, "max_position_embeddings": 131_072}
ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}
LONGROPE = {"short_factor": [1.0 + 0.01 * pair for pair in range(6)], "long_factor": [2.0 + pair for pair in range(6)]}
ROPES = {
    "yarn": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 4096, "factor": 32.0} | LONGROPE,
    "llama3": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}


def save(family: str, path: Path, **more: Any) -> Any:
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**SIZES | more)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    model.save_pretrained(path)
    return model


def last_logprobs(driver: Any, prompt: list[int], step: int) -> np.ndarray:
    """Of the token after ``prompt``, run in chunks of ``step``."""
    driver.admit(1, prompt, sampling=SlotSampling(temperature=0.0, logprobs=VOCAB))
    result = None
    while driver.pending(1) and len(driver.tokens[1]) == len(prompt):
        result = driver.step([(1, min(step, driver.pending(1)))])
    assert result is not None
    return distribution(result.top_ids, result.top_logprobs, 1)[0]


@pytest.mark.parametrize("kind", ROPES)
def test_prompts_of_130_000_tokens_rotate_as_in_transformers(
    kind: str, drive: Any, prompts: Any, tmp_path: Path
) -> None:
    rope = {"rope_theta": 10000.0} | ROPES[kind]
    model, (prompt,) = save("Mistral", tmp_path, sliding_window=WINDOW, rope_parameters=rope), prompts(LENGTH)
    driver = drive(tmp_path, max_total_tokens=LENGTH + 64, max_step_tokens=8192, max_slots=2)
    found = last_logprobs(driver, prompt, 8192)
    positions = torch.arange(LENGTH - 2 * WINDOW, LENGTH).unsqueeze(0)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt[-2 * WINDOW :]]), position_ids=positions).logits[0, -1]
    np.testing.assert_allclose(found, logits.log_softmax(-1).numpy(), atol=2e-3, rtol=1e-3)


def test_attention_in_chunks_begins_anew_behind_130_000_tokens(drive: Any, prompts: Any, tmp_path: Path) -> None:
    """A query sees the tokens since the last multiple of the chunk, at their own positions."""
    chunk, length = 64, LENGTH + 40
    experts = {"num_local_experts": 2, "moe_layers": [], "intermediate_size_mlp": 80, "no_rope_layers": [1]}
    rope = {"rope_theta": 10000.0} | ROPES["llama3"]
    model = save("Llama4Text", tmp_path, attention_chunk_size=chunk, rope_parameters=rope, **experts)
    (prompt,) = prompts(length)
    driver = drive(tmp_path, max_total_tokens=length + 64, max_step_tokens=8192, max_slots=2)
    found = last_logprobs(driver, prompt, 8192)
    first = length // chunk * chunk
    assert 0 < length - first < chunk
    with torch.inference_mode():
        positions = torch.arange(first, length).unsqueeze(0)
        logits = model(torch.tensor([prompt[first:]]), position_ids=positions).logits[0, -1]
    np.testing.assert_allclose(found, logits.log_softmax(-1).numpy(), atol=2e-3, rtol=1e-3)


def test_full_attention_reads_32_000_tokens(drive: Any, prompts: Any, tmp_path: Path) -> None:
    rope = {"rope_theta": 10000.0} | ROPES["yarn"]
    model, (prompt,) = save("Llama", tmp_path, rope_parameters=rope, **ONE_HEAD), prompts(32_000)
    driver = drive(tmp_path, max_total_tokens=32_064, max_step_tokens=8192, max_slots=2)
    found = last_logprobs(driver, prompt, 8192)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1]
    np.testing.assert_allclose(found, logits.log_softmax(-1).numpy(), atol=2e-3, rtol=1e-3)
