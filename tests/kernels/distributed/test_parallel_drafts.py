"""Drafts on two ranks: each draws up the same draft tokens, and what is said is what one rank says."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

from kernels.contract.config import RunnerConfig
from kernels.contract.expert_settings import ExchangeSettings
from kernels.contract.speculation import SpeculativeSettings
from kernels.devices.cpu.device import CpuDevice
from kernels.distributed.draft_experts import DraftExperts
from kernels.distributed.group import Group
from kernels.execution import outputs
from kernels.execution.result_builder import ResultBuilder
from kernels.models.config_loader import read_config
from kernels.models.registry import tensors
from kernels.speculation.division import divide_draft
from kernels.speculation.stage_drafter import StageDrafter
from tests.kernels.distributed.ranks import run, run_ranks
from tests.kits.speculation import latent_heads
from tests.kits.speculation.dflash import DFLASH, SHAPES
from tests.kits.speculation.drafting import make_target, seeded, write
from tests.kits.speculation.gated_heads import with_head
from tests.kits.speculation.layouts import make_layout
from tests.kits.speculation.oracles import Oracle
from tests.kits.speculation.runner_drafts import PROMPTS

SHAPE = {"num_steps": 3, "num_draft_tokens": 6}
NEW = 16
"""Tokens that each prompt gets at least."""


def greedy(model, texts):
    return [model.greedy(text, len(text) + NEW) for text in texts]


def first_tokens(answers, texts):
    """Of each answer its prompt and NEW tokens; drafts may have added some."""
    return [tokens[: len(text) + NEW] for tokens, text in zip(answers, texts, strict=True)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Trees of two heads, one of whom has few tokens of its own and one of whom is given few, and blocks."""
    found = []
    for name in ("eagle-token-map", "eagle3"):
        folder = tmp_path_factory.mktemp(name)
        _, algorithm, target, draft, _, _ = make_layout(name, folder)
        (folder / "map.json").write_text(json.dumps(list(range(0, 96, 2))))
        settings = SpeculativeSettings(
            algorithm, draft_model_path=str(draft), topk=3, token_map=str(folder / "map.json"), **SHAPE
        )
        found.append((target, settings))
    folder = tmp_path_factory.mktemp("dflash")
    (folder / "target").mkdir()
    target, _ = make_target(folder / "target", tie_word_embeddings=False)
    draft = write(folder / "draft", DFLASH, seeded(SHAPES, 41))
    found.append((target, SpeculativeSettings("DFLASH", draft_model_path=str(draft), **SHAPE)))
    return [
        {
            "model": str(target),
            "prompts": PROMPTS[:3],
            "new": NEW,
            "speculation": msgspec.to_builtins(settings),
            "sampling": {"temperature": 0.7, "seed": 3},
        }
        for target, settings in found
    ]


@pytest.fixture(scope="module")
def alone(jobs):
    return [run(job | {"rendezvous": ""}, 0, 1) for job in jobs]


def test_two_ranks_draft_what_one_drafts(jobs, alone):
    for job, whole, first, second in zip(jobs, alone, *run_ranks(jobs), strict=True):
        assert first["tokens"] == second["tokens"] == whole["tokens"]
        assert first["accepted"] == second["accepted"] == whole["accepted"], job["model"]
        assert first["weight_bytes"] < whole["weight_bytes"]
    assert any(count > 1 for whole in alone for counts in whole["accepted"] for count in counts)


def test_three_stages_draft_what_one_drafts(jobs, alone):
    """Captured layers of the first stage pass through the second one."""
    for whole, *stages in zip(alone, *run_ranks([job | {"stages": 3} for job in jobs], 3), strict=True):
        for reported in stages:
            assert first_tokens(reported["tokens"], PROMPTS[:3]) == first_tokens(whole["tokens"], PROMPTS[:3])
            assert reported["accepted"] == whole["accepted"]


def test_a_stage_drafts_before_a_request_has_pages_for_it(jobs, alone):
    """In pages of one token a request that has just sampled has none for its last token, nor for draft tokens."""
    small = [job | {"stages": 2, "options": {"page_size": 1}} for job in jobs]
    for whole, first, last in zip(alone, *run_ranks(small), strict=True):
        assert first["tokens"] == last["tokens"]
        assert [each[:50] for each in last["tokens"]] == [each[:50] for each in whole["tokens"]]
        assert last["accepted"] == whole["accepted"]


def test_stages_capture_trees_even_if_a_chain_may_be_as_deep():
    """As n-grams: twelve nodes, of which a chain may have all."""

    class Trees(Oracle):
        branches = True

    for branches, own in ((True, Trees), (False, Oracle)):
        drafter = own(11, 1, bool, 96)
        stage = StageDrafter(drafter, Group(), CpuDevice(threads=1), 4)
        assert (stage.max_nodes, stage.depth, stage.branches) == (12, 11, branches)


def test_what_the_last_stage_drafts_counts_as_drafting(monkeypatch):
    monkeypatch.setattr(outputs, "perf_counter", iter([1.0, 3.5]).__next__)
    last, none, sent = outputs.StepOutputs.__new__(outputs.StepOutputs), np.zeros(0, dtype=np.int32), []
    last._broken = lambda step, builder: none
    last._device = CpuDevice(threads=1)
    last._model = SimpleNamespace(stage=SimpleNamespace(send_outcome=sent.append))
    last._speculator = SimpleNamespace(
        drafts_for=lambda step, reached: none, draft_next=lambda step, rows, broken: np.ones((1, 3), dtype=np.int64)
    )
    builder = ResultBuilder(none, none)
    last._tell_stages(None, none, builder)
    assert (builder.draft, sent[0].tolist()) == (2.5, [1, 1, 1])


@pytest.mark.long
def test_four_ranks_in_two_stages_draft_for_latent_attention(reference, prompts, tmp_path):
    """Chains from a head in the model's own files, and trees of n-grams."""
    model, texts = reference("parallel-deepseek-v3"), prompts(23, 9)
    latent_heads.with_head(model, DeepseekV3DecoderLayer, tmp_path / "model")
    texts[1] = texts[1][:4] * 4
    drafts = SpeculativeSettings("MTP", num_steps=3), SpeculativeSettings("NGRAM", num_draft_tokens=8)
    job = {"model": str(tmp_path / "model"), "prompts": texts, "new": NEW, "stages": 2}
    for answers in run_ranks([job | {"speculation": msgspec.to_builtins(each)} for each in drafts], 4):
        for reported in answers:
            assert first_tokens(reported["tokens"], texts) == greedy(model, texts)
        assert max(count for counts in answers[1]["accepted"] for count in counts) > 1


@pytest.fixture(scope="module")
def sparse(reference, tmp_path_factory):
    """Targets of experts, each with a draft of experts: a head, and the model itself."""
    latent, plain = reference("parallel-deepseek-v3"), reference("placed-moe")
    path = tmp_path_factory.mktemp("heads") / "model"
    latent_heads.with_head(latent, DeepseekV3DecoderLayer, path)
    return [
        (latent, str(path), SpeculativeSettings("MTP", num_steps=3)),
        (plain, str(plain.path), SpeculativeSettings("STANDALONE", draft_model_path=str(plain.path), num_steps=3)),
    ]


def drafting(path, settings, exchange=None, **job):
    settings = msgspec.to_builtins(msgspec.structs.replace(settings, exchange=exchange))
    return {"model": path, "new": NEW, "speculation": settings} | job


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_parts_of_attention_divide_the_experts_of_their_drafts(size, sparse, prompts):
    """A part has other requests than the other, or none; four ranks are two of each part. The target's experts move,
    also before steps in which only one part admits a request and therefore drafts first."""
    texts, modes, moving = prompts(23, 9, 40), ("low_latency", "normal"), {"rebalance": {"iterations": 2}}
    jobs, expected = [], []
    for (model, path, settings), mode, parts in zip(sparse, modes, ([texts[:1], texts[1:]], [[], texts]), strict=True):
        exchange = ExchangeSettings(mode)
        options = {"dp_size": 2, "ep_size": size, "exchange": msgspec.to_builtins(exchange), "experts": moving}
        jobs += [
            drafting(path, settings, exchange, parts=parts, options=options),
            drafting(path, settings, parts=parts, options=options),
        ]
        expected.append([(part, greedy(model, part)) for part in parts])
    for rank, answers in enumerate(run_ranks(jobs, size)):
        for own, divided, whole in zip(expected, answers[::2], answers[1::2], strict=True):
            part, tokens = own[rank * 2 // size]
            assert first_tokens(divided["tokens"], part) == first_tokens(whole["tokens"], part) == tokens
            assert divided["accepted"] == whole["accepted"]
            assert divided["draft_bytes"] < whole["draft_bytes"]
            assert divided["moved"]
        assert (
            rank * 2 // size == 0 or max(map(max, filter(None, answers[2]["accepted"]))) > 3
        )  # the model drafts its own tokens


def test_ranks_divide_the_experts_of_drafts_as_those_of_the_target(sparse, prompts):
    texts = prompts(23, 9)
    jobs = [
        drafting(path, settings, prompts=texts, options={"ep_size": parts})
        for _, path, settings in sparse
        for parts in (2, 1)
    ]
    first, second = run_ranks(jobs)
    for (model, _, _), parts, inner, other in zip(sparse, first[::2], first[1::2], second[::2], strict=True):
        assert parts["tokens"] == other["tokens"]
        assert first_tokens(parts["tokens"], texts) == greedy(model, texts)
        assert parts["accepted"] == inner["accepted"]
        assert parts["draft_bytes"] == inner["draft_bytes"]


def test_a_part_without_drafts_joins_the_passes_of_others(monkeypatch):
    """The parts have 3 and 0 tokens, then 0 and 2; then both have finished."""
    experts, told, seen = DraftExperts(Group(), 1, 4, torch.float32, torch.device("cpu")), [], []
    experts.parts = 2
    answers = iter([[3, -1], [-1, 2], [-1, -1]])

    def gather(x):
        told.append(int(x))
        return torch.tensor([next(answers)]).view(2, 1)

    monkeypatch.setattr(experts.across, "all_gather_rows", gather)
    experts.layers += [lambda x: seen.append((tuple(x.shape), experts.tokens(len(x))))] * 2
    experts.set_width(6)
    for layer in experts.layers:
        layer(torch.zeros(3, 6))
    experts.finish()
    assert told == [3, -1, -1]
    assert seen == [((3, 6), (3, 0))] * 2 + [((0, 6), (0, 2))] * 2


def test_experts_of_drafts_are_divided_as_the_target_if_they_can_be(sparse):
    _, path, _ = sparse[1]
    whole = read_config(path)
    declared = tensors(whole).values()
    config = RunnerConfig(model_path=path, tp_size=4, ep_size=4)
    group = Group()
    group.size = 4

    def parts(**change):
        experts = replace(whole.experts, **change)
        return divide_draft(config, group, None, replace(whole, experts=experts), declared).ep_size

    assert parts() == 4
    assert parts(inner=3) == 4  # which four ranks cannot divide
    assert parts(count=6) == 1
    assert parts(identities=1) == 1


@pytest.mark.parametrize("algorithm", ["MTP", "NGRAM"])
def test_two_ranks_take_states_back_alike(algorithm, reference, prompts, tmp_path):
    model, texts = reference("parallel-qwen3.5"), prompts(23, 9)
    with_head(model, "qwen3.5", tmp_path / "model")
    settings = SpeculativeSettings(algorithm, num_steps=3, num_draft_tokens=4)
    job = {
        "model": str(tmp_path / "model"),
        "prompts": texts,
        "new": NEW,
        "speculation": msgspec.to_builtins(settings),
    }
    first, second = run_ranks([job])
    assert first[0]["tokens"] == second[0]["tokens"]
    for text, tokens in zip(texts, first[0]["tokens"], strict=True):
        assert tokens == model.greedy(text, len(tokens))
