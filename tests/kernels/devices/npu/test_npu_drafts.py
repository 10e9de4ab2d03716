"""Drafts on a simulated NPU: what is drafted is what follows from scratch, and what is said stays the same."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tokenizers import Tokenizer

import kernels.devices.npu.device
from app.understudy.drafts import DRAFTS, draft_path
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from kernels.devices.base import DeviceTraits
from kernels.devices.capture import Capture
from kernels.devices.npu.native_attention import native_attention
from kernels.execution import step_memory
from kernels.execution.captures import Passes
from tests.kits.speculation import step_heads
from tests.kits.speculation.dflash import DFLASH, SHAPES, block
from tests.kits.speculation.drafting import Plain, make_target, seeded, write
from tests.kits.speculation.family_heads import Heads
from tests.kits.speculation.layouts import make_layout
from tests.kits.speculation.lossless import truth
from tests.kits.speculation.oracles import run_mixed
from tests.kits.speculation.runner_drafts import LENGTH, PROMPTS, SAMPLINGS, compare, eagle_chain
from tests.kits.speculation.stream_heads import StreamHead

OPTIONS = {"device": "npu", "page_size": 128, "max_step_tokens": 64, "max_total_tokens": 8 * 128, "max_slots": 5}


@pytest.mark.parametrize("name", ["eagle", "deepseek"])
def test_heads(name, drive, tmp_path):
    _, algorithm, target, draft, _, plain = make_layout(name, tmp_path)
    compare(
        target, algorithm, draft, lambda known, steps: eagle_chain(plain, known, steps), drive, count=3, options=OPTIONS
    )


@pytest.mark.parametrize(
    ("name", "several"),
    [
        ("step3p5", False),
        ("step3p5", True),
        ("mimo-v2-flash", False),
        ("mimo-v2-flash", True),
        ("longcat-flash", False),
        ("deepseek-v4", False),
    ],
)
def test_heads_of_families(name, several, reference, drive, prompts, tmp_path):
    """Step 3.5's and MiMo-V2's, whose layers have windows, by one head for all steps, and by one for each; and DeepSeek
    V4's, which reads several residual streams."""
    model, (text,) = reference(name), prompts(40)
    if name == "step3p5":
        step_heads.Heads(model, tmp_path / "model")
    elif name == "deepseek-v4":
        StreamHead(model, tmp_path / "model")
    else:
        Heads(name, model, tmp_path / "model", 1 + several)
    settings = SpeculativeSettings("MTP", num_steps=2, topk=1, num_draft_tokens=3, multi_layer=several)
    driver = drive(tmp_path / "model", speculation=settings, **OPTIONS)
    driver.admit(1, text)
    driver.step([(1, len(text))])
    for _ in range(6):
        driver.step([(1, 1)], drafts={1: 2})
    assert driver.tokens[1] == model.greedy(text, len(driver.tokens[1]))


def test_blocks(drive, tmp_path):
    (tmp_path / "target").mkdir()
    target, own = make_target(tmp_path / "target")
    weights = seeded(SHAPES, 41)
    draft = write(tmp_path / "draft", DFLASH, weights)

    def expected(known, steps):
        return block(known, Plain(weights), own["model.embed_tokens.weight"], 0, 4).argmax(-1).tolist()[:steps]

    compare(target, "DFLASH", draft, expected, drive, count=3, options=OPTIONS)


def test_trees(drive, tmp_path):
    _, algorithm, target, draft, _, _ = make_layout("eagle3", tmp_path)
    settings = SpeculativeSettings(algorithm, draft_model_path=str(draft), num_steps=4, topk=3, num_draft_tokens=10)
    outputs, _ = truth(drive, target, PROMPTS[3:], SAMPLINGS[3:], LENGTH, **OPTIONS)
    driver = drive(target, speculation=settings, **OPTIONS)
    assert run_mixed(driver, PROMPTS[3:], SAMPLINGS[3:], outputs, LENGTH)[0] == outputs


@pytest.mark.parametrize(("algorithm", "topk"), [("EAGLE3", 3), ("DFLASH", 1)])
def test_the_drafts_in_the_box_are_believed(algorithm, topk, drive):
    """In bfloat16, by fused attention and in graphs."""
    model = DRAFTS.parent / "model"
    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).encode("What is the capital of France?").ids
    settings = SpeculativeSettings(algorithm, str(draft_path(algorithm)), num_steps=4, topk=topk, num_draft_tokens=6)
    driver = drive(model, dtype="bfloat16", speculation=settings, **OPTIONS | {"max_slots": 2})
    driver.admit(1, tokens, sampling=SlotSampling(temperature=0.0))
    driver.step([(1, len(tokens))])
    for _ in range(12):
        assert not driver.step([(1, 1)], {1: 5}).failed
    assert len(driver.tokens[1]) - len(tokens) > 18


@pytest.mark.parametrize("backend", ["", "torch_native"])
def test_a_draft_has_attention_of_its_own(backend, drive, monkeypatch):
    called = []
    monkeypatch.setattr(
        "kernels.devices.npu.attention.native_attention", lambda *args: called.append(args) or native_attention(*args)
    )
    settings = SpeculativeSettings("EAGLE", str(draft_path("EAGLE")), draft_attention_backend=backend)
    model = DRAFTS.parent / "model"
    driver = drive(model, dtype="bfloat16", speculation=settings, disable_graphs=True, **OPTIONS | {"max_slots": 2})
    driver.admit(1, [5, 6, 7, 8])
    driver.step([(1, 4)])
    called.clear()
    driver.step([(1, 1)], {1: 3})
    assert len(called) == (3 if backend else 0)  # what was observed, and two draft tokens that are gone on from


def test_a_draft_without_graphs_beside_a_model_with_them(drive, monkeypatch):
    """The same tokens; the graphs of the model's passes are captured and no others."""
    counted, captures = [], {}
    begin = torch.npu.NPUGraph.capture_begin
    monkeypatch.setattr(
        torch.npu.NPUGraph,
        "capture_begin",
        lambda self, *args, **kwargs: (counted.append(1), begin(self, *args, **kwargs))[1],
    )
    model, tokens = DRAFTS.parent / "model", {}
    for disabled in (False, True):
        settings = SpeculativeSettings("EAGLE3", str(draft_path("EAGLE3")), disable_graphs=disabled)
        driver = drive(model, dtype="bfloat16", speculation=settings, **OPTIONS | {"max_slots": 2})
        captures[disabled] = len(counted)
        counted.clear()
        driver.admit(1, [5, 6, 7, 8], sampling=SlotSampling(temperature=0.0))
        driver.step([(1, 4)])
        for _ in range(4):
            driver.step([(1, 1)], {1: 3})
        tokens[disabled] = driver.tokens[1]
    assert 0 < captures[True] < captures[False]
    assert tokens[True] == tokens[False]


def test_a_draft_without_graphs_keeps_none_of_precompilation(drive, monkeypatch):
    """What is captured while kernels are compiled computes nothing later."""
    monkeypatch.setattr(Capture, "precompile", lambda self, passes: passes())
    monkeypatch.setattr(kernels.devices.npu.device, "DeviceTraits", partial(DeviceTraits, compiles=True))
    monkeypatch.setattr(step_memory, "precompile_drafts", lambda *arguments: None)
    monkeypatch.setattr(Passes, "capture_decodes", lambda *arguments: None)  # of the model
    settings = SpeculativeSettings("EAGLE3", str(draft_path("EAGLE3")), disable_graphs=True)
    options = OPTIONS | {"max_slots": 2, "dtype": "bfloat16"}
    driver = drive(DRAFTS.parent / "model", speculation=settings, **options)
    expansion = driver.runner._loaded.speculator.drafter._expansion
    assert (expansion._observing, expansion._levels) == (None, None)
