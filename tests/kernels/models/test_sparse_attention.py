"""Sparse attention of DeepSeek V3.2, GLM-5, HunYuan V4 and Mistral Large 4: what is chosen, long prompts, caches, and
sizes that are refused; ``test_equality`` compares the families with transformers.
"""

from __future__ import annotations

import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.caches import CacheGroup, Latent
from kernels.contract.errors import ConfigError
from kernels.core.attention_rows import AttentionRows
from kernels.devices import sparse_attention
from kernels.devices.sparse_attention import choose_tokens, highest
from kernels.models import hunyuan_v4
from kernels.models.config_loader import parse_config, read_config
from kernels.models.registry import caches
from tests.kits.driver import COMMON, HUNYUAN_V4, INDEXED, MISTRAL_LARGE4
from tests.kits.parity import scored

CONFIG = COMMON | INDEXED | {"architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 4}
LARGE = COMMON | MISTRAL_LARGE4 | {"architectures": ["MistralLarge4ForCausalLM"]}


@pytest.mark.parametrize("numbers", [1 << 25, 20000], ids=["all-queries", "some-queries"])
@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm5", "hunyuan-v4", "mistral-large4"])
def test_long_prompts_attend_to_what_was_chosen(name, numbers, reference, drive, prompts, monkeypatch):
    monkeypatch.setattr(sparse_attention, "_CPU_NUMBERS", numbers)
    model, (prompt,) = reference(name), prompts(240)
    found = scored(drive(model.path), prompt, [5, 135, 1, 99])
    np.testing.assert_allclose(found, model.logprobs(prompt).numpy(), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["glm5", "hunyuan-v4", "mistral-large4"])
def test_short_and_long_rows_share_a_step(name, reference, drive, prompts):
    model, texts = reference(name), prompts(5, 90, 40)
    driver = drive(model.path)
    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text)
    driver.step([(1, 5), (2, 60)])
    driver.step([(1, 1), (2, 30), (3, 40)])
    for slot, text in enumerate(texts, start=1):
        assert driver.generate(slot, len(text) + 15) == model.greedy(text, len(text) + 15)


def test_the_best_tokens_before_a_query_are_chosen():
    generator = torch.Generator().manual_seed(3)
    queries, weights = torch.randn(5, 4, 6, generator=generator), torch.randn(5, 4, generator=generator)
    keys = torch.randn(16, 6, generator=generator)
    cache = torch.full((6, 4, 6), torch.nan)
    pages = [5, 2, 3, 1]
    for index, page in enumerate(pages):
        cache[page] = keys[4 * index : 4 * index + 4]
    rows = AttentionRows(
        np.array([2, 11]), np.array([1, 4]), np.array([[4, 0, 0, 0], pages], dtype=np.int32), decodes=1
    )
    first, second = choose_tokens(queries, weights, cache, rows, 5)
    assert first is None
    scores = (torch.einsum("qhd,kd->qhk", queries[1:], keys).relu() * weights[1:, :, None]).sum(1)
    for query in range(4):
        expected = scores[query, : 12 + query].topk(5).indices
        assert set(second[query].tolist()) == set(expected.tolist())


def test_queries_with_few_tokens_choose_all_of_them():
    queries, weights, cache = torch.randn(8, 2, 6), torch.randn(8, 2), torch.randn(3, 4, 6)
    rows = AttentionRows(np.array([0]), np.array([8]), np.array([[1, 2]], dtype=np.int32), decodes=0)
    (chosen,) = choose_tokens(queries, weights, cache, rows, 6)
    for query in range(5):
        assert sorted(chosen[query].tolist()) == [-1] * (5 - query) + list(range(query + 1))


@pytest.mark.parametrize("hidden", [0, 1, 70])
def test_of_equal_scores_the_first_are_the_highest(hidden):
    seen = torch.tensor([[0.0, 3.0, 0.0, 0.0, 2.0, 0.0], [1.0, 1.0, 1.0, 0.0, torch.nan, 1.0]])
    scores = torch.cat((seen, torch.full((2, hidden), -torch.inf)), 1)
    assert highest(scores, 4).tolist() == [[0, 1, 2, 4], [0, 1, 2, 5]]


def test_layers_without_an_indexer_cache_no_keys_of_it(reference):
    assert caches(read_config(reference("deepseek-v3.2").path)) == (CacheGroup(Latent(24, 8, 12), (0, 1, 2)),)
    assert caches(read_config(reference("glm5").path)) == (
        CacheGroup(Latent(24, 8, 12), (0, 2)),
        CacheGroup(Latent(24, 8), (1, 3)),
    )


def test_layers_that_read_other_vectors_cache_their_own_keys_alone(reference, drive):
    """Layers 2 and 3 read the vectors of 0 and 1; 1 and 3 have no positions."""
    path = reference("mistral-large4").path
    assert caches(read_config(path)) == (
        CacheGroup(Latent(24, 8, 12), (0,)),
        CacheGroup(Latent(24, 0, 12), (1,)),
        CacheGroup(Latent(12, 0), (2,)),
        CacheGroup(Latent(24, 8), (4,)),
    )
    held = drive(path).runner._loaded.caches
    assert held[2][0] is held[0]
    assert held[2][1].shape[2] == 12
    assert held[3] is held[1]


def test_every_fourth_layer_of_mistral_large_4_has_no_positions():
    assert parse_config(LARGE | {"no_rope_layers": None, "kv_source_layers": None}).unrotated == {3}
    assert parse_config(LARGE | {"no_rope_layers": None, "no_rope_layer_interval": 2}).unrotated == {1, 3}
    assert parse_config(LARGE | {"rope_parameters": None}).rope.factor == 2048.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers must say 1 or 0 for each layer"),
        ({"kv_source_layers": [0, 1]}, "kv_source_layers must name a layer for each layer"),
        ({"kv_source_layers": [0, 1, 3, 3, 4]}, "has 3 for layer 2, which must be the layer itself or an earlier one"),
        ({"kv_source_layers": [0, 1, 0, 1, 2]}, "has 2 for layer 4, which must be"),
        ({"kv_source_layers": [0, 0, 0, 1, 4]}, "has 0 for layer 1, and no_rope_layers rotates one of both"),
    ],
)
def test_what_is_wrong_with_layers_that_share_vectors_is_named(change, says):
    with pytest.raises(ConfigError, match=says):
        parse_config(LARGE | change)


def test_pages_of_broken_rows_lose_their_keys(reference, drive, prompts):
    driver, (text,) = drive(reference("glm5").path), prompts(30)
    driver.admit(1, text)
    driver.step([(1, 30)])
    loaded, pages = driver.runner._loaded, list(driver.pages[1])
    own = [loaded.caches[layer].keys for layer in (0, 2)]
    assert all(keys[pages].any() for keys in own)
    with torch.inference_mode():
        loaded.clear_pages(pages)
    assert not any(keys[pages].any() for keys in own)


def test_an_indexer_has_no_deterministic_form(reference, drive):
    with pytest.raises(ConfigError, match="leave --enable-deterministic-inference out"):
        drive(reference("glm5").path, invariant=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"index_topk": 0}, "index_topk must be a whole number"),
        ({"index_head_dim": 4}, "index_head_dim 4 is less than qk_rope_head_dim 8"),
        ({"q_lora_rank": None}, "needs q_lora_rank"),
        ({"indexer_types": ["full"]}, "indexer_types must say full or shared for each layer"),
        ({"index_topk_pattern": "SFFF"}, "indexer_types must begin with full"),
    ],
)
def test_what_is_wrong_with_an_indexer_is_named(change, says):
    with pytest.raises(ConfigError, match=says):
        parse_config(CONFIG | change)


def test_layers_with_an_indexer_follow_config_json():
    def own(**more):
        latent = parse_config(CONFIG | more).latent
        return sorted(latent.index.own)

    assert own() == [0, 1, 2, 3]
    assert own(index_topk_freq=2) == [0, 1, 3]
    assert own(index_topk_freq=2, index_skip_topk_offset=1) == [0, 2]
    assert own(index_topk_pattern="FFSS") == [0, 1]
    assert own(indexer_types=["full", "shared", "shared", "full"]) == [0, 3]


@pytest.mark.parametrize("before", ["hc_{}_layer.hc_pre.hc_{}", "hc_{}_layer.hc_{}"])
def test_published_names_of_hunyuan_v4_are_read(before, reference, drive, prompts, tmp_path):
    """transformers saves others: ``hc_pre`` first, and ``linear_gate`` for each gate."""
    model, (prompt,) = reference("hunyuan-v4"), prompts(40)
    copy = tmp_path / "published"
    shutil.copytree(model.path, copy)
    saved = load_file(copy / "model.safetensors")
    published = {}
    for name, tensor in saved.items():
        name = name.replace(".hc_pre.hc_head.", ".hc_head.").replace(".mlp.linear_gate.", ".mlp.gate_proj.")
        name = re.sub(r"\.hc_pre\.hc_(\w+)_layer\.hc_", lambda found: f".{before.format(found[1], '')}", name)
        published[name.replace("shared_experts.linear_gate", "shared_experts.gate_proj")] = tensor
    assert set(published) != set(saved)
    save_file(published, copy / "model.safetensors", {"format": "pt"})
    assert (scored(drive(copy), prompt, [40]) == scored(drive(model.path), prompt, [40])).all()


def test_layers_of_hunyuan_v4_with_an_indexer_are_every_fourth():
    given = COMMON | HUNYUAN_V4 | {"architectures": ["HYV4ForCausalLM"], "num_hidden_layers": 7}
    config = parse_config(given | {"indexer_types": None, "mlp_layer_types": None})
    assert config.latent.index.own == {0, 1, 5}
    assert config.experts.layers == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize(("given", "limit"), [(0, 0.0), (-1.0, 0.0), (None, 10.0), (0.5, 0.5)])
def test_limits_of_hunyuan_v4_that_are_not_above_0_mean_none(given, limit):
    raw = COMMON | HUNYUAN_V4 | {"architectures": ["HYV4ForCausalLM"], "swiglu_limit": given}
    assert parse_config(raw).limit == limit


@pytest.mark.parametrize("given", [True, "5"])
def test_a_limit_of_hunyuan_v4_that_is_no_number_is_refused(given):
    raw = COMMON | HUNYUAN_V4 | {"architectures": ["HYV4ForCausalLM"], "swiglu_limit": given}
    with pytest.raises(ConfigError, match="swiglu_limit must be a number above 0"):
        parse_config(raw)


def test_hunyuan_v4_refuses_what_needs_whole_heads(reference):
    config = read_config(reference("hunyuan-v4").path)
    with pytest.raises(ConfigError, match="does not run with --enable-nsa-prefill-context-parallel"):
        hunyuan_v4.build(config, SimpleNamespace(context_parallel=object()))
