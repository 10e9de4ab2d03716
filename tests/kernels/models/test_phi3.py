"""Phi-3's fused projections and LongRoPE are those of transformers; ``test_equality`` compares the rest."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers

from kernels.contract.errors import ConfigError
from kernels.models.config_loader import read_config
from kernels.models.registry import tensors
from kernels.weights.loading import CheckpointFiles, Placement, open_weights
from kernels.weights.quantization.detect import detect_scheme
from kernels.weights.tensors import Shard
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.driver import COMMON
from tests.kits.quantized import fp8_rows, rewrite

QKV = "model.layers.0.self_attn.qkv_proj"
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0],
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A model whose positions are stretched from 64 to 256, and its directory."""
    torch.manual_seed(3)
    more = {"rope_parameters": LONG, "original_max_position_embeddings": 64, "pad_token_id": 0, "vocab_size": 212}
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**COMMON | more)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    path = tmp_path_factory.mktemp("long")
    model.save_pretrained(path)
    return model, path


def greedy(model, prompt, length):
    tokens = list(prompt)
    while len(tokens) < length:
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize(("context", "count"), [(64, 20), (256, 90)], ids=["short", "long"])
def test_longrope_factors_follow_the_context(context, count, long, drive, prompts):
    """Sequences longer than the original 64 tokens use the long factors, as transformers does."""
    model, path = long
    driver = drive(path, context_length=context)
    (prompt,) = prompts(count)
    driver.admit(1, prompt)
    assert driver.generate(1, count + 20) == greedy(model, prompt, count + 20)


def test_fused_projections_are_divided_by_section(long):
    _, path = long
    config = read_config(path)
    qkv = tensors(config)[f"{QKV}.weight"]
    rows = [index for rank in range(2) for part in qkv.parts(Shard(rank, 2)) for index in range(part.begin, part.end)]
    assert sorted(rows) == list(range(qkv.shape[0]))
    assert [part.end - part.begin for part in qkv.parts(Shard(1, 2))] == [24, 12, 12]


def test_quantized_fused_projections_are_cut_and_joined(long, tmp_path):
    path = rewrite(long[1], tmp_path / "fp8", fp8_rows, {"quant_method": "fp8"})
    specs, scheme = tensors(read_config(path, quantized=True)), detect_scheme(path, "")

    def read(shard):
        placement = Placement(torch.float32, torch.device("cpu"), shard)
        loader = open_weights(CheckpointFiles(str(path)), specs, placement, scheme)
        return loader.projection([QKV]).dequantize(torch.float32)

    whole, half = read(Shard()), read(Shard(1, 2))
    parts = specs[f"{QKV}.weight"].parts(Shard(1, 2))
    assert half.equal(torch.cat([part.narrow(whole) for part in parts]))


def test_two_ranks_compute_what_one_does(long, drive, prompts):
    _, path = long
    texts = prompts(5, 23)
    first, second = run_ranks([{"model": str(path), "prompts": texts, "length": 40}])
    alone = drive(path)
    for slot, text in enumerate(texts, start=1):
        alone.admit(slot, text)
        alone.generate(slot, 40)
    assert first[0]["tokens"] == second[0]["tokens"] == [alone.tokens[slot] for slot in sorted(alone.tokens)]


def test_factors_of_the_wrong_number_are_refused(long, tmp_path):
    shutil.copytree(long[1], tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    raw = json.loads(file.read_text())
    raw["rope_parameters"]["long_factor"] = [1.0]
    file.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="longrope: long_factor needs 6 factors"):
        read_config(tmp_path / "model")
