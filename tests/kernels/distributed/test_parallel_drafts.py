"""Drafts on two ranks: each draws up the same draft tokens, and what is said is what one rank says."""

from __future__ import annotations

import json

import msgspec
import pytest

from kernels.contract.speculation import SpeculativeSettings
from tests.kernels.distributed.ranks import run, run_ranks
from tests.kits.speculation.dflash import DFLASH, SHAPES
from tests.kits.speculation.drafting import make_target, seeded, write
from tests.kits.speculation.gated_heads import with_head
from tests.kits.speculation.layouts import make_layout
from tests.kits.speculation.runner_drafts import PROMPTS

SHAPE = {"num_steps": 3, "num_draft_tokens": 6}


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
            "length": 50,
            "speculation": msgspec.to_builtins(settings),
            "sampling": {"temperature": 0.7, "seed": 3},
        }
        for target, settings in found
    ]


def test_two_ranks_draft_what_one_drafts(jobs):
    alone = [run(job | {"rendezvous": ""}, 0, 1) for job in jobs]
    for job, whole, first, second in zip(jobs, alone, *run_ranks(jobs), strict=True):
        assert first["tokens"] == second["tokens"] == whole["tokens"]
        assert first["accepted"] == second["accepted"] == whole["accepted"], job["model"]
        assert first["weight_bytes"] < whole["weight_bytes"]
    assert any(count > 1 for whole in alone for counts in whole["accepted"] for count in counts)


@pytest.mark.parametrize("algorithm", ["MTP", "NGRAM"])
def test_two_ranks_take_states_back_alike(algorithm, reference, prompts, tmp_path):
    model, texts = reference("parallel-qwen3.5"), prompts(23, 9)
    with_head(model, "qwen3.5", tmp_path / "model")
    settings = SpeculativeSettings(algorithm, num_steps=3, num_draft_tokens=4)
    job = {
        "model": str(tmp_path / "model"),
        "prompts": texts,
        "length": 60,
        "speculation": msgspec.to_builtins(settings),
    }
    first, second = run_ranks([job])
    assert first[0]["tokens"] == second[0]["tokens"]
    for text, tokens in zip(texts, first[0]["tokens"], strict=True):
        assert tokens == model.greedy(text, len(tokens))
