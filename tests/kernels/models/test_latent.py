"""Latent attention and DeepSeek's experts: long prompts, ranks, quantized weights, and what is refused;
``test_equality`` compares the families with transformers.
"""

from __future__ import annotations

import json
import shutil
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.adapters import AdapterSettings
from kernels.contract.caches import CacheGroup, Latent
from kernels.contract.errors import ConfigError
from kernels.contract.speculation import SpeculativeSettings
from kernels.devices import latent_attention
from kernels.models.config_loader import parse_config, read_config
from kernels.models.registry import caches
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.adapters import save_adapter
from tests.kits.driver import COMMON, DEEPSEEK, DEEPSEEK_V4
from tests.kits.parity import scored
from tests.kits.quantized import fp8_blocks, rewrite

CONFIG = COMMON | DEEPSEEK | {"architectures": ["DeepseekV3ForCausalLM"]}


@pytest.mark.parametrize("numbers", [1 << 25, 5000], ids=["all-heads", "some-heads"])
@pytest.mark.parametrize("name", ["deepseek-v3", "minicpm3"])
def test_long_chunks_are_attended_to_with_keys_and_values(name, numbers, reference, drive, prompts, monkeypatch):
    monkeypatch.setattr(latent_attention, "_NUMBERS", numbers)
    monkeypatch.setattr(latent_attention, "_EXPANDED", 90)
    monkeypatch.setattr(latent_attention, "_QUERIES", 50)
    model, (prompt,) = reference(name), prompts(240)
    found = scored(drive(model.path), prompt, [5, 135, 1, 99])
    np.testing.assert_allclose(found, model.logprobs(prompt).numpy(), atol=2e-4, rtol=1e-4)


def test_expanded_and_latent_rows_share_a_step(reference, drive, prompts, monkeypatch):
    monkeypatch.setattr(latent_attention, "_EXPANDED", 90)
    model, (short, long, last) = reference("deepseek-v3"), prompts(20, 200, 30)
    driver = drive(model.path)
    for slot, text in enumerate((short, long, last), start=1):
        driver.admit(slot, text)
    driver.step([(1, 20)])
    driver.step([(1, 1), (2, 200), (3, 30)])
    for slot, text in enumerate((short, long, last), start=1):
        assert driver.generate(slot, len(text) + 4) == model.greedy(text, len(text) + 4)


def test_caches_hold_one_vector_of_each_token(reference):
    config = read_config(reference("deepseek-v3").path)
    assert caches(config) == (CacheGroup(Latent(24, 8), (0, 1, 2)),)


def test_pages_of_broken_rows_are_cleared(reference, drive, prompts):
    driver, (text,) = drive(reference("deepseek-v3").path), prompts(70)
    driver.admit(1, text)
    driver.step([(1, 70)])
    loaded, pages = driver.runner._loaded, list(driver.pages[1])
    assert all(cache[pages].any() for cache in loaded.caches)
    with torch.inference_mode():
        loaded.clear_pages(pages)
    assert not any(cache[pages].any() for cache in loaded.caches)


def test_quantized_projections_are_close(reference, drive, prompts):
    model, (prompt,) = reference("minicpm3"), prompts(20)
    found = scored(drive(model.path, quantization="int8"), prompt, [20])
    expected, exact = model.logprobs(prompt).numpy(), scored(drive(model.path), prompt, [20])
    assert np.abs(found - expected).mean() < 0.1 * np.abs(expected - expected.mean(1, keepdims=True)).mean()
    assert np.abs(found - exact).max() > 0  # it was quantized


@pytest.mark.parametrize(("block", "ranks"), [(16, 1), (4, 2)])
def test_fp8_in_blocks_is_what_its_floats_are(block, ranks, reference, drive, prompts, tmp_path):
    """Blocks of 16 end inside of the fused projections, blocks of 4 divide every rank's part."""
    model, (prompt,) = reference("parallel-deepseek-v3"), prompts(20)
    settings = {"quant_method": "fp8", "weight_block_size": [block, block]}
    path = rewrite(model.path, tmp_path / "fp8", fp8_blocks(block, block), settings)
    floats = shutil.copytree(model.path, tmp_path / "floats")
    held = load_file(path / "model.safetensors")
    scales = {name.removesuffix("_scale_inv"): held.pop(name) for name in list(held) if name.endswith("_scale_inv")}
    for name, scale in scales.items():
        shape = held[name].shape
        wide = scale.repeat_interleave(block, 0)[: shape[0]].repeat_interleave(block, 1)[:, : shape[1]]
        held[name] = held[name].float() * wide
    save_file(held, floats / "model.safetensors")
    driver = drive(floats)
    driver.admit(1, prompt)
    expected = driver.generate(1, 32)
    if ranks == 1:
        driver = drive(path)
        driver.admit(1, prompt)
        assert driver.generate(1, 32) == expected
    else:
        first, second = run_ranks([{"model": str(path), "prompts": [prompt], "length": 32}])
        assert first[0]["tokens"] == second[0]["tokens"] == [expected]


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.2"])
@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.15), ("fp8_e4m3", 0.25), ("bfloat16", 0.1)])
def test_answers_of_vectors_in_few_bits_are_close(name, dtype, error, reference, drive, prompts):
    model, (prompt,) = reference(name), prompts(14)  # a token whose experts change is far off
    driver = drive(model.path, kv_cache_dtype=dtype)
    found, expected = scored(driver, prompt, [6, 8]), model.logprobs(prompt).numpy()
    assert np.abs(found - expected).mean() < error * np.abs(expected - expected.mean(1, keepdims=True)).mean()
    assert np.abs(found - expected).max() > 1e-3  # they were rounded
    parts = (24, 8, 12) if name == "deepseek-v3.2" else (24, 8)
    bytes_ = 2 * sum(parts) if dtype == "bfloat16" else sum(parts) + 2 * len(parts)
    assert driver.info.cache_token_bytes == 3 * bytes_


@pytest.mark.parametrize("name", ["deepseek-v3", "glm5", "hunyuan-v4", "mistral-large4"])
def test_narrow_vectors_serve_mixed_steps_alike(name, reference, drive, prompts):
    model, texts = reference(name), prompts(20, 70, 33)
    alone = []
    for text in texts:
        driver = drive(model.path, kv_cache_dtype="int8")
        driver.admit(1, text)
        alone.append(driver.generate(1, len(text) + 6))
    driver = drive(model.path, kv_cache_dtype="int8", speculation=SpeculativeSettings("NGRAM", num_draft_tokens=8))
    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text)
    driver.step([(1, 20), (2, 50)])
    driver.step([(1, 1), (2, 20), (3, 33)], drafts={1: 7})
    for _ in range(6):
        driver.step([(slot, 1) for slot in (1, 2, 3)], drafts={1: 7, 2: 7, 3: 7})
    for slot, text in enumerate(texts, start=1):
        assert driver.tokens[slot][: len(text) + 6] == alone[slot - 1]


def test_narrow_pages_of_broken_rows_are_cleared(reference, drive, prompts):
    driver, (text,) = drive(reference("deepseek-v3.2").path, kv_cache_dtype="fp8_e4m3"), prompts(30)
    driver.admit(1, text)
    driver.step([(1, 30)])
    loaded, pages = driver.runner._loaded, list(driver.pages[1])
    kept = [part for cache in loaded.caches for part in (cache.vectors, cache.keys)]
    assert all(part.values[pages].any() and part.scales[pages].any() for part in kept)
    with torch.inference_mode():
        loaded.clear_pages(pages)
    assert not any(part.values[pages].any() or part.scales[pages].any() for part in kept)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_cache_dtype": "int8", "kv_cache_quant_method": "none"}, "with a scale of each token"),
    ],
)
def test_options_without_a_latent_form_are_refused(options, says, reference, drive):
    with pytest.raises(ConfigError, match=says):
        drive(reference("deepseek-v3").path, **options)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"n_group": 3}, "8 experts cannot be divided into n_group 3"),
        ({"n_group": 2, "topk_group": 3}, "topk_group 3 are taken"),
        ({"n_group": 8, "topk_group": 2}, "num_experts_per_tok 3 is more than the experts of topk_group 2 groups"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must say dense or sparse for each layer"),
    ],
)
def test_what_is_wrong_with_deepseeks_sizes_is_named(change, says):
    with pytest.raises(ConfigError, match=says):
        parse_config(CONFIG | change)


def test_layers_of_experts_follow_config_json():
    def layers(**more):
        experts = parse_config(CONFIG | {"num_hidden_layers": 6} | more).experts
        return experts is not None and sorted(experts.layers)

    assert layers() == [1, 2, 3, 4, 5]
    assert layers(first_k_dense_replace=3) == [3, 4, 5]
    assert layers(moe_layer_freq=2) == [2, 4]
    assert layers(mlp_layer_types=["dense", "sparse"] * 3) == [1, 3, 5]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"page_size": 2}, "--page-size"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype"),
    ],
)
def test_compressed_attention_refuses_what_it_does_not_run_with(options, named, reference, drive):
    with pytest.raises(ConfigError, match=named):
        drive(reference("deepseek-v4").path, **options)


def test_an_adapter_of_products_by_group_is_refused(reference, drive, tmp_path):
    path = reference("deepseek-v4").path
    driver = drive(path, adapters=AdapterSettings(max_rank=4, max_batch=2))
    file = save_adapter(tmp_path / "adapter", {"model.layers.1.self_attn.o_a_proj": (24, 32)}, 1)
    with pytest.raises(ConfigError, match=r"o_a_proj takes no adapters: it is a product for each group of heads"):
        driver.runner.load_adapter(1, str(file))


def test_a_rate_of_deepseek_v4_that_is_no_number_is_named():
    given = COMMON | DEEPSEEK_V4 | {"architectures": ["DeepseekV4ForCausalLM"]}
    with pytest.raises(ConfigError, match="compress_ratios must be 0, 4 or 128 for each layer"):
        parse_config(given | {"layer_types": None, "compress_ratios": [[4]] * 5})


def test_compressed_attention_runs_with_quantized_weights(reference, drive, prompts):
    model, (prompt,) = reference("deepseek-v4"), prompts(40)
    found = torch.from_numpy(scored(drive(model.path, quantization="int8"), prompt, [23, 17]))
    off = (found - model.logprobs(prompt)).abs().mean()
    assert 1e-3 < off < 0.8


def test_published_names_of_deepseek_v4_are_read(reference, drive, prompts, tmp_path):
    model, (prompt,) = reference("deepseek-v4"), prompts(40)
    copy = tmp_path / "published"
    shutil.copytree(model.path, copy)
    saved = load_file(copy / "model.safetensors")
    other = {"model.": "", ".attn.norm.": ".attn.kv_norm.", "embed_tokens.": "embed.", "hc_head.hc_": "hc_head_"}
    published = {reduce(lambda text, pair: text.replace(*pair), other.items(), name): saved[name] for name in saved}
    assert {"embed.weight", "head.weight", "norm.weight", "layers.0.attn.kv_norm.weight"} <= set(published)
    save_file(published, copy / "model.safetensors", {"format": "pt"})
    expected = scored(drive(model.path), prompt, [40])
    assert (scored(drive(copy), prompt, [40]) == expected).all()


@pytest.mark.parametrize("name", ["hunyuan-v4", "ling3", "mistral-large4"])
def test_routers_stay_in_float32_where_transformers_keep_them(name, reference, drive, tmp_path):
    """Logits in bfloat16, or of rounded weights, choose other experts of some tokens. Without groups, and with a plain
    softmax, for which devices have kernels."""
    model = reference(name)
    path = shutil.copytree(model.path, tmp_path / "one-group")
    raw = json.loads((path / "config.json").read_text())
    raw |= {"n_group": 1, "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    (path / "config.json").write_text(json.dumps(raw))
    router, hidden = model.model.model.layers[2].mlp.gate, model.model.config.hidden_size
    x = torch.randn(4000, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    scores = x.float() @ router.weight.T
    if name != "mistral-large4":
        scores = scores.sigmoid() + router.e_score_correction_bias
    layer: Any = drive(path, dtype="bfloat16").runner._loaded.model.layers[2]
    experts = (layer.feed_forward if name == "hunyuan-v4" else layer.mlp).experts
    assert torch.equal(experts.choose(x).long().sort(1).values, scores.topk(3).indices.sort(1).values)
