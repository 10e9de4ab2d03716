"""Ranks that have some of each layer's experts say what transformers says of the whole."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest

from kernels.contract.errors import ConfigError
from kernels.contract.expert_settings import ExpertSettings
from kernels.distributed.group import Group
from kernels.models.config import local_config
from kernels.models.config_loader import read_config
from tests.kernels.distributed.ranks import run_ranks

NAMES = ["placed-moe", "placed-shared", "parallel-deepseek-v3"]


LENGTH = 26
"""Of prompts of 5 to 17 tokens with what is generated."""


def job(model, texts, parts, **options):
    return {"model": str(model.path), "prompts": texts, "length": LENGTH, "options": {"ep_size": parts} | options}


def test_two_ranks_with_half_of_the_experts_generate_what_one_does(reference, drive, prompts):
    """Those in int8, too, each rank holds its share of, in float32 and by the native operator in bfloat16."""
    models, texts = [reference(name) for name in NAMES], prompts(5, 9, 17)
    jobs = [job(model, texts, 2) for model in models]
    jobs += [job(models[0], texts, 2, dtype=dtype, quantization="int8") for dtype in ("float32", "bfloat16")]
    first, second = run_ranks(jobs)
    assert [reported["tokens"] for reported in first] == [reported["tokens"] for reported in second]
    for model, reported in zip(models, first, strict=False):
        assert reported["tokens"] == [model.greedy(text, LENGTH) for text in texts]
    alone = drive(models[0].path).info
    assert first[0]["parameters"] == alone.parameters
    assert alone.weight_bytes / 2 < first[0]["weight_bytes"] < 0.6 * alone.weight_bytes
    quantized = drive(models[0].path, quantization="int8").info
    assert first[3]["parameters"] == first[4]["parameters"] == quantized.parameters
    assert quantized.weight_bytes / 2 < first[3]["weight_bytes"] < 0.7 * quantized.weight_bytes


def test_layers_between_streams_share_experts_and_run_parts_of_attention(reference, prompts):
    model, texts = reference("parallel-hunyuan-v4"), prompts(5, 9, 17)
    parts = [[texts[0]], texts[1:]]
    shared = {"model": str(model.path), "parts": parts, "length": LENGTH, "options": {"dp_size": 2, "ep_size": 2}}
    for rank, (whole, part) in enumerate(run_ranks([job(model, texts, 2), shared])):
        assert whole["tokens"] == [model.greedy(text, LENGTH) for text in texts]
        assert part["tokens"] == [model.greedy(text, LENGTH) for text in parts[rank]]


def test_ranks_with_whole_dense_layers_generate_what_one_does(reference, prompts):
    """Beside experts in parts, alone, and with prompts that ranks divide."""
    texts = prompts(5, 9, 70)
    models = [reference(name) for name in (NAMES[2], "parallel-glm4-moe", "parallel-deepseek-v3.2")]
    kinds = [{"ep_size": 2}, {}, {"context_parallel": True}]
    jobs = [
        job(model, texts, 1, **kind, whole_dense=whole) | {"new": 12}
        for model, kind in zip(models, kinds, strict=True)
        for whole in (True, False)
    ]
    for answers in run_ranks(jobs):
        for model, whole, divided in zip(models, answers[::2], answers[1::2], strict=True):
            assert whole["tokens"] == [model.greedy(text, len(text) + 12) for text in texts]
            assert whole["weight_bytes"] > divided["weight_bytes"]


def test_whole_dense_layers_need_experts_beside_them_and_no_division(reference, drive):
    config = read_config(reference(NAMES[2]).path)
    odd = dataclasses.replace(config, intermediate_size=81)
    with pytest.raises(ConfigError, match="intermediate_size 81"):
        local_config(odd, 2)
    assert local_config(dataclasses.replace(odd, whole_dense=True), 2).intermediate_size == 81
    for name in (NAMES[0], "parallel-qwen3"):
        with pytest.raises(ConfigError, match="no dense feed-forward layers beside"):
            drive(reference(name).path, tp_size=2, whole_dense=True, rendezvous="127.0.0.1:1")


def placed(redundant, model, dispatch="static", **options):
    """Redundant places, and experts in another order than their own."""
    config = read_config(model.path)
    assert config.experts is not None
    row = [*reversed(range(config.experts.count)), *range(redundant)]
    return {
        "experts": {
            "redundant": redundant,
            "dispatch": dispatch,
            "location": json.dumps({"physical_to_logical_map": [row] * config.layers}),
        }
    } | options


def test_ranks_with_redundant_experts_generate_what_one_device_does(reference, prompts):
    """Their copies are of all kinds: on one rank and on two; tokens are divided over them in both ways."""
    models, texts = [reference(name) for name in NAMES], prompts(5, 9, 17)
    kinds = [(0, "static"), (4, "static"), (4, "dynamic")]
    answers = run_ranks([job(one, texts, 2, **placed(kind[0], one, kind[1])) for one in models for kind in kinds])
    for rank in answers:
        for model, reported in zip([one for one in models for _ in kinds], rank, strict=True):
            assert reported["tokens"] == [model.greedy(text, LENGTH) for text in texts]


def test_redundant_experts_of_quantized_weights_and_of_attention_parts(reference, drive, prompts):
    """Quantized ones by the native operators, in bfloat16."""
    model, texts = reference(NAMES[0]), prompts(5, 9, 17)
    kinds = [{"quantization": "int8"}, {}]
    jobs = [
        job(model, texts, 2, **placed(2, model, dispatch), **kind, dtype="bfloat16")
        for kind in kinds
        for dispatch in ("static", "dynamic")
    ]
    first, second = run_ranks(jobs)
    assert [reported["tokens"] for reported in first] == [reported["tokens"] for reported in second]
    assert len({reported["parameters"] for reported in first}) == 1
    assert first[0]["parameters"] == drive(model.path).info.parameters
    parts = [[texts[0]], texts[1:]]
    shared = {"model": str(model.path), "parts": parts, "length": LENGTH}
    options = {"dp_size": 2, "ep_size": 2} | placed(2, model, "dynamic")
    for rank, (answer,) in enumerate(run_ranks([shared | {"options": options}])):
        assert answer["tokens"] == [model.greedy(text, LENGTH) for text in parts[rank]]


def test_experts_move_between_steps_and_tokens_stay_the_same(reference, prompts):
    model, texts = reference(NAMES[0]), prompts(5, 9, 17)
    moving = {"rebalance": {"iterations": 6, "layers_per_chunk": 1}}
    kinds = [
        {"experts": moving},
        {"experts": moving | {"redundant": 2}},
        {"experts": moving | {"redundant": 2, "dispatch": "dynamic"}},
        {"experts": {"redundant": 2, "rebalance": {"iterations": 6, "layers_per_chunk": 100}}},
        {"experts": {"redundant": 2, "rebalance": {"iterations": 6, "min_utilization": 0.0}}},
    ]
    first, second = run_ranks([job(model, texts, 2, **kind) for kind in kinds])
    expected = [model.greedy(text, LENGTH) for text in texts]
    for one, other in zip(first, second, strict=True):
        assert one["tokens"] == other["tokens"] == expected
    moved = [one["moved"] for one in first]
    assert moved[4] == 0 < min(moved[:4])
    assert moved == [other["moved"] for other in second]


def test_ranks_that_read_different_placements_are_refused(reference, drive, monkeypatch):
    class Unlike(Group):
        """Its other rank has read another placement."""

        size = 2

        def minimum(self, value: int) -> int:
            return min(value, 1)

    model = reference(NAMES[0])
    monkeypatch.setattr("kernels.execution.runner.join_group", lambda device, config: Unlike())
    options = placed(4, model) | {"tp_size": 2, "ep_size": 2, "rendezvous": "127.0.0.1:1"}
    options["experts"] = msgspec.convert(options["experts"], ExpertSettings)
    with pytest.raises(ConfigError, match="workers have read different placements; give all nodes the same file"):
        drive(model.path, **options)


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
