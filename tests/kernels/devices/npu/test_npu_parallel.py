"""A model on two simulated NPUs: hccl between two processes, eager and in graphs."""

from __future__ import annotations

import pytest

from tests.kernels.distributed.ranks import run_ranks

pytestmark = pytest.mark.long


def test_two_npus_generate_what_one_generates(reference, prompts):
    """float32 against transformers; bfloat16 in graphs, whose replays hold the collectives, against eager."""
    texts = prompts(5, 23, 40)
    models = [reference(name) for name in ("parallel-llama", "parallel-qwen2", "parallel-qwen3")]
    npu = {"device": "npu", "page_size": 128}
    jobs = [{"model": str(model.path), "prompts": texts, "length": 52, "options": npu} for model in models]
    for model in (models[0], models[2]):
        for options in ({"disable_graphs": True}, {"graph_rows": [2, 4]}):
            half = npu | {"dtype": "bfloat16"} | options
            jobs.append({"model": str(model.path), "prompts": texts, "length": 64, "options": half})
    jobs.append(jobs[-1] | {"streams_of_rank": [1000, 1]})  # rank 1 can capture one graph, and not the next
    first, second = run_ranks(jobs)
    assert [reported["tokens"] for reported in first] == [reported["tokens"] for reported in second]
    for model, reported in zip(models, first, strict=False):
        assert reported["tokens"] == [model.greedy(text, 52) for text in texts]
    for eager, graphs in (first[3:5], first[5:7]):
        assert (eager["graph_rows"], graphs["graph_rows"]) == ([], [2, 4])
        assert graphs["tokens"] == eager["tokens"]
    assert first[7]["graph_rows"] == second[7]["graph_rows"] == [4]  # what one rank lacks is used by none
    assert first[7]["tokens"] == first[5]["tokens"]


def test_ranks_of_which_one_has_no_own_kernels_agree(reference, prompts):
    npu = {"device": "npu", "page_size": 128, "dtype": "bfloat16", "graph_rows": [2]}
    job = {"model": str(reference("parallel-qwen3").path), "prompts": prompts(5, 23), "length": 32, "options": npu}
    job["sampling"] = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 3}
    first, second = run_ranks([job | {"own_of_rank": own} for own in ("00", "10")])
    assert [reported["tokens"] for reported in first] == [reported["tokens"] for reported in second]
    assert first[0]["tokens"] == first[1]["tokens"]
    assert first[1]["graph_rows"] == [2]


@pytest.mark.parametrize("name", ["placed-moe", "parallel-deepseek-v3"])
def test_two_npus_with_half_of_the_experts_generate_what_one_does(name, reference, prompts):
    """float32 against transformers; in bfloat16 graphs say what eager steps say."""
    model, texts = reference(name), prompts(5, 23)
    npu = {"device": "npu", "page_size": 128, "ep_size": 2}
    job = {"model": str(model.path), "prompts": texts, "length": 40}
    options = [npu, npu | {"dtype": "bfloat16", "disable_graphs": True}, npu | {"dtype": "bfloat16", "graph_rows": [2]}]
    first, second = run_ranks([job | {"options": each} for each in options])
    assert [reported["tokens"] for reported in first] == [reported["tokens"] for reported in second]
    assert first[0]["tokens"] == [model.greedy(text, 40) for text in texts]
    assert first[1]["tokens"] == first[2]["tokens"]
    assert first[2]["graph_rows"] == ([2] if name == "placed-moe" else [])


def test_two_npus_generate_in_two_stages_what_one_generates(reference, prompts):
    model, texts = reference("parallel-llama"), prompts(5, 23, 40)
    npu = {"device": "npu", "page_size": 128}
    job = {"model": str(model.path), "prompts": texts, "length": 52, "options": npu, "stages": 2}
    expected = [model.greedy(text, 52) for text in texts]
    assert [reported[0]["tokens"] for reported in run_ranks([job])] == [expected] * 2


def test_two_npus_share_experts_with_requests_of_their_own(reference, prompts):
    texts = prompts(5, 23, 40)
    models = [reference(name) for name in ("parallel-moe",)]
    options = {"device": "npu", "page_size": 128, "dp_size": 2}
    parts = [[texts[0]], [texts[1], texts[2]]], [[], texts[:1]]
    jobs = [
        {"model": str(model.path), "parts": each, "length": 44, "options": options}
        for model in models
        for each in parts
    ]
    for rank, answers in enumerate(run_ranks(jobs)):
        for number, answer in enumerate(answers):
            model, own = models[number // 2], parts[number % 2][rank]
            assert answer["tokens"] == [model.greedy(text, 44) for text in own], (rank, number)
