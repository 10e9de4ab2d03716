"""MiniMax M3: caches, blocks of tokens that are chosen for groups of heads, and published sizes; ``test_equality``
compares the family with transformers.
"""

from __future__ import annotations

import numpy as np
import pytest

from kernels.contract.caches import CacheGroup, Latent, Paged
from kernels.contract.errors import ConfigError
from kernels.devices import block_sparse_attention
from kernels.devices.experts import ClampedGate
from kernels.models.config_loader import parse_config
from kernels.models.registry import caches
from tests.kits.driver import COMMON, MINIMAX_M3
from tests.kits.parity import scored

CONFIG = COMMON | MINIMAX_M3 | {"architectures": ["MiniMaxM3VLForCausalLM"]}
PUBLISHED = {key: value for key, value in CONFIG.items() if not key.startswith("index_") and "_types" not in key} | {
    "hidden_act": "swigluoai",
    "moe_layer_freq": [0, 1, 1],
    "sparse_attention_config": {
        "sparse_attention_freq": [0, 1, 1],
        "sparse_disable_index_value": [0, 1, 1],
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 12,
        "sparse_block_size": 4,
        "sparse_topk_blocks": 5,
        "sparse_local_block": 1,
        "sparse_init_block": 0,
        "sparse_score_type": "max",
    },
}


def test_layers_with_an_indexer_keep_index_keys_beside_pages():
    assert caches(parse_config(CONFIG)) == (
        CacheGroup(Latent(12, 0), (1, 2)),
        CacheGroup(Paged(2, 16, 16), (0, 1, 2)),
    )
    assert caches(parse_config(CONFIG | {"layer_types": None})) == (CacheGroup(Paged(2, 16, 16), (0, 1, 2)),)


def test_published_keys_are_those_of_transformers():
    found = parse_config(PUBLISHED)
    assert found == parse_config(CONFIG)
    assert (found.gate, found.intermediate_size, found.rope.dim) == (ClampedGate(1.702, 2.0), 64, 8)


@pytest.mark.parametrize("numbers", [1 << 25, 3000])
def test_long_prompts_attend_to_the_blocks_of_their_heads(numbers, reference, drive, prompts, monkeypatch):
    """With all queries in one product, and with some."""
    monkeypatch.setattr(block_sparse_attention, "_CPU_NUMBERS", numbers)
    model, (prompt,) = reference("minimax-m3"), prompts(240)
    found = scored(drive(model.path), prompt, [5, 135, 1, 99])
    np.testing.assert_allclose(found, model.logprobs(prompt).numpy(), atol=2e-4, rtol=1e-4)


def test_rows_of_few_and_many_blocks_share_a_step(reference, drive, prompts):
    model, texts = reference("minimax-m3"), prompts(5, 60, 40)
    driver = drive(model.path)
    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text)
    driver.step([(1, 5), (2, 30)])
    driver.step([(1, 1), (2, 30), (3, 40)])
    for slot, text in enumerate(texts, start=1):
        assert driver.generate(slot, len(text) + 9) == model.greedy(text, len(text) + 9)


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_caches_of_eight_bits_lose_about_what_bf16_does(dtype, reference, drive, prompts):
    path, (prompt,) = reference("minimax-m3").path, prompts(120)
    exact, half, eight = (
        scored(drive(path, **options), prompt, [50, 1, 69])
        for options in ({}, {"dtype": "bfloat16"}, {"kv_cache_dtype": dtype})
    )
    assert 0 < np.abs(eight - exact).mean() < 3 * np.abs(half - exact).mean()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"index_n_heads": 4}, "index_n_heads 4 is not supported; supported is one for each of num_key_value_heads, 2"),
        ({"index_local_blocks": 6}, "index_local_blocks 6 is more than index_topk_blocks 5"),
        ({"index_head_dim": 6}, "index_head_dim 6 is less than the 8 numbers"),
        ({"qk_norm_type": "per_layer"}, "qk_norm_type 'per_layer' is not supported; supported is 'per_head'"),
        ({"sparse_attention_config": [1]}, "sparse_attention_config must be an object"),
        ({"sparse_attention_config": {"sparse_init_block": 1}}, "sparse_init_block 1 is not supported"),
    ],
)
def test_wrong_sizes_are_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        parse_config(CONFIG | change)


def test_values_of_the_index_are_refused():
    own = PUBLISHED["sparse_attention_config"] | {"sparse_disable_index_value": [0, 1, 0]}
    with pytest.raises(ConfigError, match="sparse_disable_index_value must be 1 in all layers"):
        parse_config(PUBLISHED | {"sparse_attention_config": own})
