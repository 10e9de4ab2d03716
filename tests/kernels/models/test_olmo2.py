"""OLMo 2 on two ranks and from GGUF; ``test_equality`` compares its logits and greedy tokens with transformers."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.kernels.distributed.ranks import run_ranks
from tests.kits.driver import COMMON
from tests.kits.gguf_checkpoints import greedy
from tests.kits.gguf_writer import write_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose four query heads share one key head, and its directory."""
    torch.manual_seed(4)
    more = {"num_key_value_heads": 1, "vocab_size": 212, "pad_token_id": 0}
    made = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**COMMON | more)).eval()
    for parameter in made.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    path = tmp_path_factory.mktemp("olmo2")
    made.save_pretrained(path)
    return path


def test_two_ranks_norm_over_all_heads(model, drive, prompts):
    texts = prompts(5, 23)
    first, second = run_ranks([{"model": str(model), "prompts": texts, "length": 40}])
    alone = drive(model)
    for slot, text in enumerate(texts, start=1):
        alone.admit(slot, text)
        alone.generate(slot, 40)
    assert first[0]["tokens"] == second[0]["tokens"] == [alone.tokens[slot] for slot in sorted(alone.tokens)]


def test_a_gguf_file_computes_what_its_directory_does(model, drive, prompts, tmp_path):
    file = write_gguf(model, tmp_path / "model.gguf")
    (prompt,) = prompts(12)
    assert greedy(drive, file, prompt, 20) == greedy(drive, model, prompt, 20)
