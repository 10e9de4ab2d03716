"""A model in stages says what one process says of it."""

from __future__ import annotations

import json

import pytest

from kernels.contract.errors import ConfigError
from kernels.contract.step import SlotSampling
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.adapters import adapted_modules, end_modules, merged, save_adapter

NAMES = ["parallel-llama", "parallel-qwen2", "parallel-qwen3"]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7}


@pytest.fixture(scope="module")
def models(reference):
    return {name: reference(name) for name in NAMES}


def sampled_alone(driver, texts):
    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text, sampling=SlotSampling(**SAMPLED))
        driver.generate(slot, 26)
    return [driver.tokens[slot] for slot in sorted(driver.tokens)]


def test_two_stages_generate_what_one_generates(models, drive, prompts):
    texts = prompts(5, 9, 17)
    alone = drive(models["parallel-qwen3"].path)
    jobs = [{"model": str(model.path), "prompts": texts, "length": 26, "stages": 2} for model in models.values()]
    jobs.append(jobs[2] | {"sampling": SAMPLED, "tokens_of_rank": [4096, 2048]})
    first, second = run_ranks(jobs)
    for model, reported, also in zip(models.values(), first, second, strict=False):
        assert reported["tokens"] == [model.greedy(text, 26) for text in texts]
        assert also["tokens"] == reported["tokens"]
    assert first[3]["tokens"] == second[3]["tokens"] == sampled_alone(alone, texts)
    assert first[3]["num_pages"] == second[3]["num_pages"] == 2048 // 16 + 1
    assert first[2]["parameters"] == second[2]["parameters"] == alone.info.parameters
    assert first[2]["cache_bytes"] + second[2]["cache_bytes"] == alone.info.cache_bytes
    assert max(first[2]["weight_bytes"], second[2]["weight_bytes"]) < alone.info.weight_bytes


def test_stages_run_as_programs_what_one_process_does(reference, drive, prompts):
    """In bfloat16, where a CPU's native operators have programs."""
    path, texts = reference("parallel-moe").path, prompts(5, 9, 17)
    alone = drive(path, dtype="bfloat16", max_slots=9)
    expected = alone.generate_together(texts, 26)
    job = {"model": str(path), "prompts": texts, "length": 26, "stages": 2, "options": {"dtype": "bfloat16"}}
    for (reported,) in run_ranks([job]):
        assert reported["tokens"] == expected
        assert reported["graph_rows"] == list(alone.info.graph_rows)


NGRAM = {"algorithm": "NGRAM", "num_draft_tokens": 8}


def test_two_stages_verify_what_the_last_one_drafts(models, prompts):
    model, texts = models[NAMES[0]], prompts(5, 9, 17)
    texts[2] = texts[2][:4] * 5
    job = {"model": str(model.path), "prompts": texts, "length": 60, "stages": 2, "speculation": NGRAM}
    jobs = [job, job | {"chunk": 4}, job | {"poisoned": 0}, job | {"sampling": SAMPLED}]
    jobs.append(job | {"sampling": SAMPLED, "speculation": None})
    first, second = run_ranks(jobs)
    assert [one["tokens"] for one in first] == [one["tokens"] for one in second]
    expected = [model.greedy(text, 60) for text in texts]
    assert [each[:60] for each in first[0]["tokens"]] == [each[:60] for each in first[1]["tokens"]] == expected
    assert [each[:60] for each in first[2]["tokens"]] == expected[1:]
    assert [each[:60] for each in first[3]["tokens"]] == [each[:60] for each in first[4]["tokens"]]
    for reports in (first, second):
        assert all(max(max(step, default=0) for step in one["accepted"]) > 2 for one in reports[:3])
        assert list(reports[2]["failed"]) == ["1"]


@pytest.mark.parametrize("name", [NAMES[0], "parallel-deepseek-v3"])
def test_each_stage_holds_the_adapters_of_its_layers(name, reference, drive, prompts, tmp_path):
    path, texts = reference(name).path, prompts(5, 9, 17)
    modules = adapted_modules(path, (".experts.", "shared_experts.down")) | end_modules(path)
    some = {module: shape for module, shape in modules.items() if ".layers.0." in module}
    files = [save_adapter(tmp_path / f"{seed}", each, seed) for seed, each in enumerate((modules, some))]
    job = {"model": str(path), "prompts": texts, "length": 26, "adapters": [str(file) for file in files]}
    job["targets"] = ["all", "embed_tokens", "lm_head", "kv_b_proj"]
    expected = []
    for text, file in zip(texts, [*files, None], strict=True):
        alone = drive(merged(path, tmp_path / f"merged-{len(expected)}", file))
        alone.admit(1, text)
        alone.generate(1, 26)
        expected.append(alone.tokens[1])
    for reports in run_ranks([job | {"stages": 2}]):
        assert reports[0]["tokens"] == expected


def test_a_row_that_is_not_finite_in_a_stage_fails_alone_in_all(models, prompts):
    model, texts = models[NAMES[0]], prompts(5, 9, 17)
    job = {"model": str(model.path), "prompts": texts, "length": 26, "stages": 2}
    for reports in run_ranks([job | {"poisoned": stage} for stage in (0, 1)]):
        for reported in reports:
            assert list(reported["failed"]) == ["1"]
            assert "finite" in reported["failed"]["1"]
            assert reported["tokens"] == [model.greedy(text, 26) for text in texts[1:]]


def test_chunks_behind_one_that_fails_fail_too_and_leave_others_alone(models, prompts):
    model, texts = models[NAMES[0]], prompts(40, 40)
    job = {"model": str(model.path), "prompts": texts, "length": 50, "stages": 2, "overlapped": 8}
    _, last = run_ranks([job | {"poisoned": stage} for stage in (0, 1)])
    for reported in last:
        assert [(number, slot) for number, slot, _ in reported["failed"]] == [(2, 1), (3, 1), (4, 1)]
        assert all("finite" in message for _, _, message in reported["failed"])
        assert reported["tokens"][:50] == model.greedy(texts[1], 50)


def test_families_with_sizes_beside_the_usual_generate_in_two_stages(reference, prompts):
    models, texts = [reference(name) for name in ("parallel-falcon", "parallel-grok")], prompts(5, 9, 17)
    jobs = [{"model": str(model.path), "prompts": texts, "length": 26, "stages": 2} for model in models]
    for reports in run_ranks(jobs):
        for model, reported in zip(models, reports, strict=True):
            assert reported["tokens"] == [model.greedy(text, 26) for text in texts], model.path


@pytest.mark.long
def test_families_of_other_layers_generate_in_two_stages(reference, prompts):
    """Experts, some behind dense layers; latent attention; layers with windows, layer norms, and sinks."""
    names = ["moe", "shared", "deepseek-v3", "gpt-oss", "starcoder2", "cohere", "minicpm3"]
    models = [reference(f"parallel-{name}") for name in names]
    texts = prompts(5, 9, 17)
    jobs = [{"model": str(model.path), "prompts": texts, "length": 26, "stages": 2} for model in models]
    for reports in run_ranks(jobs):
        for model, reported in zip(models, reports, strict=True):
            assert reported["tokens"] == [model.greedy(text, 26) for text in texts], model.path


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("parallel-deepseek-v3.2", "some layers read what others made"),
        ("parallel-deepseek-v4", "its layers have sizes or constants of their own"),
        ("parallel-lfm2-moe", "its layers keep states"),
    ],
)
def test_layers_that_no_stage_runs_alone_are_refused_by_name(name, says, reference, drive):
    with pytest.raises(
        ConfigError, match=f"cannot be cut into stages, because {says}; leave --pipeline-parallel-size out"
    ):
        drive(reference(name).path, pp_size=2, rendezvous="127.0.0.1:1")


def test_too_many_stages_are_refused_by_the_number_of_layers(models, drive):
    with pytest.raises(ConfigError, match="cannot have --pipeline-parallel-size 64: each stage needs a layer"):
        drive(models[NAMES[0]].path, pp_size=64, rendezvous="127.0.0.1:1", config_overrides=json.dumps({}))
