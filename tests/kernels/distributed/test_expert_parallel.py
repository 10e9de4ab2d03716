"""Ranks that have some of each layer's experts say what transformers says of the whole."""

from __future__ import annotations

import json

import pytest

from kernels.contract.errors import ConfigError
from tests.kernels.distributed.ranks import run_ranks

NAMES = ["placed-moe", "placed-shared", "parallel-deepseek-v3"]


def job(model, texts, parts, **options):
    return {"model": str(model.path), "prompts": texts, "length": 50, "options": {"ep_size": parts} | options}


def test_two_ranks_with_half_of_the_experts_generate_what_one_does(reference, drive, prompts):
    """Those in int8, too, each rank holds its share of, in float32 and by the native operator in bfloat16."""
    models, texts = [reference(name) for name in NAMES], prompts(5, 23, 40)
    jobs = [job(model, texts, 2) for model in models]
    jobs += [job(models[0], texts, 2, dtype=dtype, quantization="int8") for dtype in ("float32", "bfloat16")]
    first, second = run_ranks(jobs)
    assert [reported["tokens"] for reported in first] == [reported["tokens"] for reported in second]
    for model, reported in zip(models, first, strict=False):
        assert reported["tokens"] == [model.greedy(text, 50) for text in texts]
    alone = drive(models[0].path).info
    assert first[0]["parameters"] == alone.parameters
    assert alone.weight_bytes / 2 < first[0]["weight_bytes"] < 0.6 * alone.weight_bytes
    quantized = drive(models[0].path, quantization="int8").info
    assert first[3]["parameters"] == first[4]["parameters"] == quantized.parameters
    assert quantized.weight_bytes / 2 < first[3]["weight_bytes"] < 0.7 * quantized.weight_bytes


def test_four_ranks_divide_experts_or_pairs_of_ranks_do(reference, prompts):
    """Four parts of one rank each, and two parts of two ranks, which share the inner dimension of their experts."""
    models, texts = [reference(name) for name in (NAMES[0], NAMES[2])], prompts(5, 23)
    jobs = [job(model, texts, parts) for model in models for parts in (4, 2)]
    ranks = run_ranks(jobs, 4)
    for number, model in enumerate(models):
        expected = [model.greedy(text, 50) for text in texts]
        assert all(rank[2 * number + each]["tokens"] == expected for rank in ranks for each in range(2))
    assert len({rank[number]["parameters"] for rank in ranks for number in (0, 1)}) == 1


@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_attention_share_divided_experts(size, reference, prompts):
    """Two parts of attention with requests of their own, and two parts of the experts."""
    models, texts = [reference(name) for name in (NAMES[1], NAMES[2])], prompts(5, 23, 40)
    given, options = [[texts[0]], texts[1:]], {"dp_size": 2, "ep_size": 2}
    jobs = [{"model": str(model.path), "parts": given, "length": 50, "options": options} for model in models]
    for rank, answers in enumerate(run_ranks(jobs, size)):
        for model, answer in zip(models, answers, strict=True):
            assert answer["tokens"] == [model.greedy(text, 50) for text in given[rank * 2 // size]]


def test_stages_of_a_pipeline_divide_their_experts(reference, prompts):
    model, texts = reference(NAMES[0]), prompts(5, 23)
    ranks = run_ranks([job(model, texts, 2) | {"stages": 2, "length": 30}], 4)
    assert [rank[0]["tokens"] for rank in ranks] == [[model.greedy(text, 30) for text in texts]] * 4


@pytest.mark.parametrize(
    ("name", "size", "parts", "says"),
    [
        ("placed-moe", 2, 4, "--expert-parallel-size 4 must divide --tensor-parallel-size 2"),
        ("parallel-moe", 2, 2, "7 experts .* cannot be divided by --expert-parallel-size 2"),
        ("parallel-qwen3", 2, 2, "has no experts"),
        ("parallel-gpt-oss", 2, 2, "only be divided by their inner dimension: leave --expert-parallel-size out"),
        ("parallel-longcat-flash", 2, 2, "only be divided by their inner dimension"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(name, size, parts, says, reference, drive):
    with pytest.raises(ConfigError, match=says):
        drive(reference(name).path, tp_size=size, ep_size=parts, rendezvous="127.0.0.1:1")


def test_an_inner_dimension_that_ranks_cannot_share_is_refused(reference, drive):
    path, change = reference("placed-moe").path, json.dumps({"moe_intermediate_size": 33})
    with pytest.raises(ConfigError, match=r"moe_intermediate_size 33 .* the 2 ranks of each part"):
        drive(path, tp_size=4, ep_size=2, rendezvous="127.0.0.1:1", config_overrides=change)
