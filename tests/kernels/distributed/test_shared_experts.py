"""Data-parallel attention: ranks with requests of their own share layers of experts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import ConfigError
from kernels.contract.expert_settings import ExchangeSettings
from kernels.devices.communication import Communication
from kernels.distributed.group import Group
from kernels.distributed.shared_experts import SharedExperts
from kernels.execution import executor_list
from tests.kernels.distributed.ranks import run_ranks

NAMES = ["parallel-moe", "parallel-shared", "parallel-deepseek-v3", "parallel-deepseek-v4"]


def test_ranks_with_other_requests_generate_what_one_device_does(reference, prompts):
    """One part has more tokens than the other in each pass, or nothing to run at all."""
    models = [reference(name) for name in NAMES]
    texts = prompts(5, 23, 40)
    parts = [[[texts[0]], [texts[1], texts[2]]], [[], texts], [texts, []]]
    jobs = [
        {"model": str(model.path), "parts": each, "new": 12, "options": {"dp_size": 2}}
        for model in models
        for each in parts
    ]
    for rank, answers in enumerate(run_ranks(jobs)):
        for number, answer in enumerate(answers):
            model, own = models[number // len(parts)], parts[number % len(parts)][rank]
            assert answer["tokens"] == [model.greedy(text, len(text) + 12) for text in own], (rank, number)


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
        ("parallel-moe", {"pp_size": 2}, "--pipeline-parallel-size"),
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


def test_passes_have_the_size_of_a_graph_where_one_fits():
    shared = SharedExperts(Group(), 1, 4, torch.float32, torch.device("cpu"))
    shared.sizes = (2, 4)
    for given, size, tokens in ((3, 4, 4), (2, 2, 2), (5, 0, 5), (0, 0, 0)):
        shared.enter((given,))
        assert (shared.size, shared.tokens(given)) == (size, (tokens,))
    shared.enter((3,))
    rows: list[int] = []
    assert shared.run(torch.ones(3, 4), lambda x: rows.append(len(x)) or x * 2).tolist() == [[2.0] * 4] * 3
    assert rows == [4]


def test_options_that_forbid_graphs_are_logged(caplog):
    shared = SharedExperts(Group(), 1, 4, torch.float32, torch.device("cpu"), exchange=ExchangeSettings())
    config = RunnerConfig(model_path="", disable_graph_padding=True)
    device = SimpleNamespace(communication=Communication("nccl"))
    loaded = SimpleNamespace(config=config, speculator=None, draft_experts=None, device=device)
    with caplog.at_level("INFO", logger="troupe.kernels"):
        assert executor_list._shared(SimpleNamespace(loaded=loaded), shared, None, 8)[1] == ()
    assert "eagerly because of NCCL, whose captured operations all ranks have to replay together" in caplog.text
    assert "together, --moe-a2a-backend, --disable-cuda-graph-padding." in caplog.text


def test_the_ranks_of_attention_are_some_of_all():
    config = RunnerConfig(model_path="", tp_rank=3, tp_size=4, dp_size=2)
    assert (config.attention_rank, config.attention_size) == (1, 2)
