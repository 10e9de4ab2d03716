"""A model in stages says what one process says of it."""

from __future__ import annotations

import json

import pytest

from kernels.contract.errors import ConfigError
from kernels.contract.step import SlotSampling
from tests.kernels.distributed.ranks import run_ranks

NAMES = ["parallel-llama", "parallel-qwen2", "parallel-qwen3"]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7}


@pytest.fixture(scope="module")
def models(reference):
    return {name: reference(name) for name in NAMES}


def sampled_alone(driver, texts):
    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text, sampling=SlotSampling(**SAMPLED))
        driver.generate(slot, 60)
    return [driver.tokens[slot] for slot in sorted(driver.tokens)]


def test_two_stages_generate_what_one_generates(models, drive, prompts):
    texts = prompts(5, 23, 40)
    alone = drive(models["parallel-qwen3"].path)
    jobs = [{"model": str(model.path), "prompts": texts, "length": 60, "stages": 2} for model in models.values()]
    jobs.append(jobs[2] | {"sampling": SAMPLED, "tokens_of_rank": [4096, 2048]})
    first, second = run_ranks(jobs)
    for model, reported, also in zip(models.values(), first, second, strict=False):
        assert reported["tokens"] == [model.greedy(text, 60) for text in texts]
        assert also["tokens"] == reported["tokens"]
    assert first[3]["tokens"] == second[3]["tokens"] == sampled_alone(alone, texts)
    assert first[3]["num_pages"] == second[3]["num_pages"] == 2048 // 16 + 1
    assert first[2]["parameters"] == second[2]["parameters"] == alone.info.parameters
    assert first[2]["cache_bytes"] + second[2]["cache_bytes"] == alone.info.cache_bytes
    assert max(first[2]["weight_bytes"], second[2]["weight_bytes"]) < alone.info.weight_bytes


@pytest.mark.long
def test_families_of_other_layers_generate_in_two_stages(reference, prompts):
    """Experts, some behind dense layers; latent attention; layers with windows, layer norms, and sinks."""
    names = ["moe", "shared", "deepseek-v3", "gpt-oss", "starcoder2", "cohere", "minicpm3"]
    models = [reference(f"parallel-{name}") for name in names]
    texts = prompts(5, 23, 40)
    jobs = [{"model": str(model.path), "prompts": texts, "length": 60, "stages": 2} for model in models]
    for reports in run_ranks(jobs):
        for model, reported in zip(models, reports, strict=True):
            assert reported["tokens"] == [model.greedy(text, 60) for text in texts], model.path


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("parallel-deepseek-v3.2", "some layers read what others made"),
        ("parallel-lfm2-moe", "its layers keep states"),
    ],
)
def test_layers_that_no_stage_runs_alone_are_refused_by_name(name, says, reference, drive):
    with pytest.raises(ConfigError, match=f"cannot be cut into stages, because {says}"):
        drive(reference(name).path, pp_size=2, rendezvous="127.0.0.1:1")


@pytest.mark.long
def test_two_stages_of_two_ranks_generate_what_one_generates(models, prompts):
    texts = prompts(5, 23, 40)
    jobs = [{"model": str(models[NAMES[0]].path), "prompts": texts, "length": 60, "stages": 2}]
    expected = [models[NAMES[0]].greedy(text, 60) for text in texts]
    assert [reported[0]["tokens"] for reported in run_ranks(jobs, 4)] == [expected] * 4


def test_too_many_stages_are_refused_by_the_number_of_layers(models, drive):
    with pytest.raises(ConfigError, match="cannot have --pipeline-parallel-size 64: each stage needs a layer"):
        drive(models[NAMES[0]].path, pp_size=64, rendezvous="127.0.0.1:1", config_overrides=json.dumps({}))
