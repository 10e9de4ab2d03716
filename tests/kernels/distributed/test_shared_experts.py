"""Data-parallel attention: ranks with requests of their own share layers of experts."""

from __future__ import annotations

import pytest
import torch

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import ConfigError
from kernels.contract.speculation import SpeculativeSettings
from kernels.distributed.group import Group
from kernels.distributed.shared_experts import SharedExperts
from tests.kernels.distributed.ranks import run_ranks

NAMES = ["parallel-moe", "parallel-shared", "parallel-deepseek-v3"]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_other_requests_generate_what_one_device_does(size, reference, prompts):
    """One part has more tokens than the other in each pass, or nothing to run at all."""
    models = [reference(name) for name in NAMES]
    texts = prompts(5, 23, 40)
    parts = [[texts[0]], [texts[1], texts[2]]], [[], texts], [texts, []]
    jobs = [
        {"model": str(model.path), "parts": each, "length": 60, "options": {"dp_size": 2}}
        for model in models
        for each in parts
    ]
    found = run_ranks(jobs, size)
    for rank, answers in enumerate(found):
        for number, answer in enumerate(answers):
            model, own = models[number // len(parts)], parts[number % len(parts)][rank * 2 // size]
            assert answer["tokens"] == [model.greedy(text, 60) for text in own], (rank, number)


def test_a_part_has_whole_attention_and_its_slice_of_the_experts(reference, prompts):
    model = reference("parallel-moe")
    texts = prompts(5)
    job = {"model": str(model.path), "length": 9}
    (shared,), _ = run_ranks([job | {"parts": [texts, texts], "options": {"dp_size": 2}}])
    (divided,), _ = run_ranks([job | {"prompts": texts}])
    assert shared["weight_bytes"] > divided["weight_bytes"]


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("parallel-qwen3", {}, "no layers of experts"),
        ("parallel-moe", {"speculation": SpeculativeSettings("NGRAM")}, "--speculative-algorithm"),
    ],
)
def test_what_cannot_be_shared_is_refused(name, change, says, reference, drive):
    with pytest.raises(ConfigError, match=says):
        drive(reference(name).path, tp_size=2, dp_size=2, rendezvous="127.0.0.1:1", **change)


def test_more_rows_than_the_others_expect_are_an_error():
    shared = SharedExperts(Group(), 1, 4, torch.float32, torch.device("cpu"))
    shared.enter((1,))
    with pytest.raises(ValueError, match="2 tokens is over the 1"):
        shared.run(torch.zeros(2, 4), lambda rows: rows)
    with pytest.raises(ValueError, match="of 2 parts"):
        shared.enter((1, 1))


def test_the_ranks_of_attention_are_some_of_all():
    config = RunnerConfig(model_path="", tp_rank=3, tp_size=4, dp_size=2)
    assert (config.attention_rank, config.attention_size) == (1, 2)
