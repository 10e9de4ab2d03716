"""A model on two ranks says what transformers says of the whole."""

from __future__ import annotations

import json

import pytest

from kernels.contract.errors import ConfigError
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.adapters import adapted_modules, end_modules, expert_modules, merged, save_adapter

NAMES = ["parallel-llama", "parallel-qwen2", "parallel-qwen3"]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7}


@pytest.fixture(scope="module")
def models(reference):
    return {name: reference(name) for name in NAMES}


def test_two_ranks_generate_what_one_generates(models, drive, prompts):
    """Greedy tokens are transformers', sampled ones those of one rank; each rank holds its share and finds it alone."""
    texts = prompts(5, 23, 40)
    alone = drive(models["parallel-qwen3"].path)
    jobs = [{"model": str(model.path), "prompts": texts, "length": 60} for model in models.values()]
    jobs.append(jobs[2] | {"sampling": SAMPLED, "tokens_of_rank": [4096, 2048]})
    first, second = run_ranks(jobs)
    for model, reported, also in zip(models.values(), first, second, strict=False):
        assert reported["tokens"] == [model.greedy(text, 60) for text in texts]
        assert also["tokens"] == reported["tokens"]
    assert first[3]["tokens"] == second[3]["tokens"] == sampled_alone(alone, texts)
    assert first[3]["num_pages"] == second[3]["num_pages"] == 2048 // 16 + 1
    whole = alone.info
    assert first[2]["parameters"] == second[2]["parameters"] == whole.parameters
    assert whole.weight_bytes / 2 < first[2]["weight_bytes"] < 0.55 * whole.weight_bytes
    assert first[2]["cache_bytes"] == whole.cache_bytes / 2


def sampled_alone(driver, texts):
    from kernels.contract.step import SlotSampling

    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text, sampling=SlotSampling(**SAMPLED))
        driver.generate(slot, 60)
    return [driver.tokens[slot] for slot in sorted(driver.tokens)]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("parallel-llama", 1),
        ("parallel-deepseek-v3", 1),
        ("parallel-moe", 1),
        ("placed-moe", 2),
        ("parallel-gpt-oss", 1),
        ("parallel-gemma4-moe", 1),
    ],
)
def test_two_ranks_divide_adapters_as_their_layers(name, parts, reference, drive, prompts, tmp_path):
    """One key head is on both ranks, layers are divided by outputs and by inputs. The second adapter is of DoRA."""
    path, texts = reference(name).path, prompts(5, 23, 40)
    modules = adapted_modules(path) | end_modules(path)
    if name in ("parallel-gpt-oss", "parallel-gemma4-moe"):
        modules |= expert_modules(path)
    files = [save_adapter(tmp_path / "1", modules, 1)]
    files.append(save_adapter(tmp_path / "2", adapted_modules(path, ("kv_b_proj", ".experts.")), 2, use_dora=True))
    job = {"model": str(path), "prompts": texts, "new": 20, "adapters": [str(file) for file in files]}
    job |= {
        "targets": ["all", "dora", "embed_tokens", "lm_head", "experts", "kv_b_proj"],
        "options": {"ep_size": parts},
    }
    ((first,), (second,)) = run_ranks([job])
    assert first["tokens"] == second["tokens"]
    for text, file, tokens in zip(texts, (*files, None), first["tokens"], strict=True):
        alone = drive(merged(path, tmp_path / f"merged-{len(text)}", file))
        alone.admit(1, text)
        alone.generate(1, len(text) + 20)
        assert tokens == alone.tokens[1]


@pytest.mark.parametrize(
    ("size", "change", "says"),
    [
        (3, {}, "num_attention_heads 4 .* --tensor-parallel-size 3; this model takes 1, 2, 4"),
        (2, {"vocab_size": 211}, "vocab_size 211 .* --tensor-parallel-size 2; this model takes 1"),
        (2, {"intermediate_size": 81}, "intermediate_size 81"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6}, "num_key_value_heads 6 .* 4 do not divide"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_its_numbers(size, change, says, models, drive):
    with pytest.raises(ConfigError, match=says):
        drive(
            models["parallel-qwen3"].path,
            tp_size=size,
            rendezvous="127.0.0.1:1",
            config_overrides=json.dumps(change),
        )
