"""A model on two simulated NPUs: hccl between two processes, eager and in graphs."""

from __future__ import annotations

import json

import msgspec
import pytest

from app.understudy import MODEL_DIR
from app.understudy.drafts import draft_path
from kernels.contract.speculation import SpeculativeSettings
from tests.kernels.distributed.divisions import FOUR_RANKS, TWO_RANKS, compare
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.simulated_npu import SPEC

pytestmark = pytest.mark.long


def test_two_npus_generate_what_one_generates(reference, prompts):
    """float32 against transformers; bfloat16 in graphs, whose replays hold the collectives, against eager."""
    texts = prompts(21, 29, 40)
    models = [reference(name) for name in ("parallel-llama", "parallel-qwen2", "parallel-qwen3")]
    npu = {"device": "npu", "page_size": 128}
    jobs = [{"model": str(model.path), "prompts": texts, "length": 44, "options": npu} for model in models]
    for model in (models[0], models[2]):
        for options in ({"disable_graphs": True}, {"graph_rows": [2, 4]}):
            half = npu | {"dtype": "bfloat16"} | options
            jobs.append({"model": str(model.path), "prompts": texts, "length": 46, "options": half})
    jobs.append(jobs[-1] | {"streams_of_rank": [1000, 1]})  # rank 1 can capture one graph, and not the next
    first, second = run_ranks(jobs)
    assert [reported["tokens"] for reported in first] == [reported["tokens"] for reported in second]
    for model, reported in zip(models, first, strict=False):
        assert reported["tokens"] == [model.greedy(text, 44) for text in texts]
    for eager, graphs in (first[3:5], first[5:7]):
        assert (eager["graph_rows"], graphs["graph_rows"]) == ([], [2, 4])
        assert graphs["tokens"] == eager["tokens"]
    assert first[7]["graph_rows"] == second[7]["graph_rows"] == [4]  # what one rank lacks is used by none
    assert first[7]["tokens"] == first[5]["tokens"]


@pytest.mark.parametrize("ahead", [1, 2])
def test_ranks_launch_steps_before_results_and_drop_a_row_together(ahead, reference, prompts):
    """Rank 1 reads no results by itself. The first prompt's cache becomes NaN before step 4. Both ranks drop its row
    before the step that follows this result."""
    model, texts = reference("parallel-llama"), prompts(5, 23)
    npu = {"device": "npu", "page_size": 128}
    job = {"model": str(model.path), "prompts": texts, "length": 10, "options": npu, "unread": ahead}
    first, second = (reported[0] for reported in run_ranks([job]))
    assert first == second
    assert [number for number, slot, _ in first["failed"] if slot == 1] == [*range(4, 11)]
    messages = [message for *_, message in first["failed"]]
    assert messages[: ahead + 1] == [messages[0]] * (ahead + 1)
    assert messages[ahead + 1] != messages[0]
    expected = model.greedy(texts[1], len(texts[1]) + 10)[len(texts[1]) :]
    assert [tokens[-1] for tokens in first["tokens"]] == expected


def test_ranks_of_which_one_has_no_own_kernels_agree(reference, prompts):
    npu = {"device": "npu", "page_size": 128, "dtype": "bfloat16", "graph_rows": [2]}
    job = {"model": str(reference("parallel-qwen3").path), "prompts": prompts(5, 23), "length": 32, "options": npu}
    job["sampling"] = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 3}
    first, second = run_ranks([job | {"own_of_rank": own} for own in ("00", "10")])
    assert [reported["tokens"] for reported in first] == [reported["tokens"] for reported in second]
    assert first[0]["tokens"] == first[1]["tokens"]
    assert first[1]["graph_rows"] == [2]


def test_graphs_of_two_npus_with_half_of_the_experts_give_eager_tokens(reference, prompts):
    """bfloat16; grouped and latent attention."""
    texts = prompts(5, 17)
    half = {"device": "npu", "page_size": 128, "ep_size": 2, "dtype": "bfloat16"}
    jobs = [
        {"model": str(reference(name).path), "prompts": texts, "length": 26, "options": half | options}
        for name in ("placed-moe", "parallel-wide-deepseek-v3")
        for options in ({"disable_graphs": True}, {"graph_rows": [2]})
    ]
    first, second = run_ranks(jobs)
    assert [reported["tokens"] for reported in first] == [reported["tokens"] for reported in second]
    for eager, graphs in (first[:2], first[2:]):
        assert eager["tokens"] == graphs["tokens"]
        assert (eager["graph_rows"], graphs["graph_rows"]) == ([], [2])


def test_two_npus_with_experts_that_move_generate_what_one_does(reference, prompts):
    """In 16 and 8 bits, where a token takes one expert, so that sums do not depend on where it is."""
    model, texts = reference("placed-moe"), prompts(5, 23)
    copies = {"redundant": 2, "dispatch": "dynamic"}
    stay, move = (copies | {"rebalance": {"iterations": 12, "min_utilization": least}} for least in (0.0, 1.0))
    half = {"device": "npu", "page_size": 128, "ep_size": 2, "dtype": "bfloat16"}
    half["config_overrides"], options = json.dumps({"num_experts_per_tok": 1}), []
    for kind in ({}, {"quantization": "int8"}):
        options += [half | kind | {"experts": stay, "disable_graphs": True}]
        options += [half | kind | {"experts": move, "graph_rows": [2]}]
    first, second = run_ranks(
        [{"model": str(model.path), "prompts": texts, "length": 40, "options": each} for each in options]
    )
    assert [reported["tokens"] for reported in first] == [reported["tokens"] for reported in second]
    assert first[0]["tokens"] == first[1]["tokens"] != first[2]["tokens"] == first[3]["tokens"]
    assert first[1]["graph_rows"] == first[3]["graph_rows"] == [2]
    moved = [reported["moved"] for reported in first]
    assert moved == [reported["moved"] for reported in second]
    assert moved[0] == moved[2] == 0 < min(moved[1], moved[3])


def test_two_stages_of_npus_replay_graphs_as_one_npu_does(reference, drive, prompts):
    """In bfloat16, as float32 has no graphs: a dense model, of experts, and of latent attention; stages of one NPU, and
    of two that divide a dense model's tensors. Draft tokens are verified in graphs, too."""
    models, texts = [reference(name) for name in ("parallel-llama", "placed-moe", "wide-deepseek-v3")], prompts(5, 9)
    graphs = {"device": "npu", "page_size": 128, "dtype": "bfloat16", "graph_rows": [1, 4]}
    jobs = [{"model": str(model.path), "prompts": texts, "length": 14, "stages": 2} for model in models]
    jobs = [job | {"options": graphs} for job in jobs]
    drafted = jobs[0] | {"speculation": {"algorithm": "NGRAM", "num_draft_tokens": 4}, "length": 40}
    jobs += [drafted, drafted | {"options": graphs | {"disable_graphs": True}}]
    expected = []
    for model in models:
        alone = drive(model.path, **graphs)
        assert list(alone.info.graph_rows) == [1, 4]
        expected.append(alone.generate_together(texts, 14))
    for reports in run_ranks(jobs):
        assert [one["tokens"] for one in reports[:3]] == expected
        assert [one["graph_rows"] for one in reports] == [*[[1, 4]] * 4, []]
        assert reports[3]["tokens"] == reports[4]["tokens"]
        assert any(count > 1 for counts in reports[3]["accepted"] for count in counts)
    divided = jobs[0] | {"options": graphs | {"disable_graphs": True}}
    for captured, eager in run_ranks([jobs[0], divided], 4):
        assert (captured["graph_rows"], captured["tokens"]) == ([1, 4], eager["tokens"])


def test_the_last_stage_of_npus_drafts_in_graphs_as_eagerly():
    """In bfloat16: trees of the included model's head. Prompts are longer than any row that is captured."""
    settings = SpeculativeSettings("EAGLE3", str(draft_path("EAGLE3")), num_steps=3, topk=3, num_draft_tokens=6)
    graphs = {"device": "npu", "page_size": 128, "dtype": "bfloat16", "graph_rows": [1, 4]}
    prompts = [[300 + token % 7 for token in range(12)], [400 + token % 5 for token in range(9)]]
    job = {"model": str(MODEL_DIR), "prompts": prompts, "length": 24, "stages": 2, "options": graphs}
    job["speculation"] = msgspec.to_builtins(settings)
    (first, _), (captured, eager) = run_ranks([job, job | {"options": graphs | {"disable_graphs": True}}])
    assert first["tokens"] == captured["tokens"] == eager["tokens"]
    assert captured["accepted"] == eager["accepted"]
    assert max(map(max, captured["accepted"])) > 1
    assert captured["eager_drafts"] <= 2 < eager["eager_drafts"]


def test_two_npus_share_experts_in_graphs_as_eagerly(reference, prompts):
    """A part replays a graph while the other runs a chunk, or has no rows; one has more rows than any graph."""
    texts = prompts(5, 9, 17, 4)
    cases = [("placed-moe", [[texts[0]], texts[1:]]), ("wide-deepseek-v3", [[], texts[:1]])]
    npu = {"device": "npu", "page_size": 128, "dtype": "bfloat16", "dp_size": 2, "ep_size": 2}
    jobs = [
        {"model": str(reference(name).path), "parts": parts, "length": 26, "options": npu | options}
        for name, parts in cases
        for options in ({"disable_graphs": True}, {"graph_rows": [1, 2]})
    ]
    for answers in run_ranks(jobs):
        assert [answer["graphs"] for answer in answers] == [[], [1, 2]] * 2
        assert answers[1]["replays"] > answers[0]["replays"] == 0
        assert answers[0]["tokens"] == answers[1]["tokens"]
        assert answers[2]["tokens"] == answers[3]["tokens"]


def test_experts_move_beside_graphs_of_two_npus_that_share_them(reference, prompts):
    """A token takes one expert, so that sums do not depend on where it is. One step in three counts and is eager."""
    texts, copies = prompts(5, 9, 17), {"redundant": 2, "dispatch": "dynamic"}
    stay, move = (copies | {"rebalance": {"iterations": 12, "min_utilization": least}} for least in (0.0, 1.0))
    npu = {"device": "npu", "page_size": 128, "dtype": "bfloat16", "dp_size": 2, "ep_size": 2}
    npu["config_overrides"] = json.dumps({"num_experts_per_tok": 1})
    options = [{"experts": stay, "disable_graphs": True}, {"experts": move, "graph_rows": [1, 2]}]
    job = {"model": str(reference("placed-moe").path), "parts": [texts[:1], texts[1:]], "length": 40}
    moved = []
    for eager, graphs in run_ranks([job | {"options": npu | each} for each in options]):
        assert eager["tokens"] == graphs["tokens"]
        assert (eager["graphs"], graphs["graphs"]) == ([], [1, 2])
        assert graphs["replays"] > eager["replays"] == 0
        moved.append((eager["moved"], graphs["moved"]))
    assert moved[0] == moved[1]
    assert moved[0][0] == 0 < moved[0][1]


def test_two_npus_divide_prompts_of_sparse_attention_by_tokens(reference, prompts):
    """float32, without the operators, against transformers; in bfloat16 they say what they do divided by heads."""
    model, texts = reference("parallel-wide-deepseek-v3.2"), prompts(150, 140)
    npu = {"device": "npu", "page_size": 128}
    job = {"model": str(model.path), "prompts": texts, "length": 154, "chunk": 100}
    halves = npu | {"dtype": "bfloat16"}
    options = [npu | {"context_parallel": True}, halves | {"context_parallel": True}, halves]
    first, second = run_ranks([job | {"options": each} for each in options])
    assert [reported["tokens"] for reported in first] == [reported["tokens"] for reported in second]
    assert first[0]["tokens"] == [model.greedy(text, 154) for text in texts]
    for divided, heads, text in zip(first[1]["tokens"], first[2]["tokens"], texts, strict=True):
        assert divided[: len(text) + 2] == heads[: len(text) + 2]


@pytest.mark.parametrize(("divisions", "size"), [(TWO_RANKS, 2), (FOUR_RANKS, 4)], ids=["two", "four"])
def test_npus_generate_what_one_device_does_in_every_division(divisions, size, reference, prompts):
    """float32, against transformers."""
    prefix, *ends = prompts(128, 7, 5)
    compare(reference, divisions, size, [prefix + end for end in ends], device="npu", page_size=128)


def test_rows_travel_between_two_npus(reference, prompts):
    """float32 by all-to-all against transformers; in 16 bits the NPU's own operators against all ranks having all rows,
    where int8 experts get tokens in int8."""
    model, texts = reference("placed-shared"), prompts(5, 23)
    parts = [[texts[0]], [texts[1]]]
    alike = {"device": "npu", "page_size": 128, "dp_size": 2, "ep_size": 2}
    low, half = {"exchange": {"mode": "low_latency"}}, {"dtype": "bfloat16"}
    kinds = [{"exchange": {"mode": "normal"}}, half | low, half, half | low, half]
    kinds = [kind | ({"quantization": "int8"} if number > 2 else {}) for number, kind in enumerate(kinds)]
    jobs = [{"model": str(model.path), "parts": parts, "length": 28, "options": alike | kind} for kind in kinds]
    for rank, answers in enumerate(run_ranks(jobs)):
        tokens, calls = [answer["tokens"] for answer in answers], [answer["calls"] for answer in answers]
        assert tokens[0] == [model.greedy(texts[rank], 28)]
        assert tokens[1] == tokens[2]
        known = len(texts[rank]) + 4  # sums of 16 bits that are rounded to 8 differ sooner or later
        assert [answer[:known] for answer in tokens[3]] == [answer[:known] for answer in tokens[4]]
        if SPEC.startswith("A2"):  # the others' operators do not take so few numbers, or do not exist
            assert 0 == calls[0] < calls[1] == calls[2] < calls[3] == calls[4]
        else:
            assert not any(calls)
