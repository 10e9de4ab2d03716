"""Drafts within a runner: they are made from the right features of the right tokens, and change nothing."""

from __future__ import annotations

import pytest

from kernels.contract.errors import UnsupportedError
from kernels.contract.speculation import SpeculativeSettings
from tests.kits.speculation.dflash import DFLASH, SHAPES, block
from tests.kits.speculation.drafting import Plain, make_target, seeded, write
from tests.kits.speculation.layouts import DRAFT, PlainMimo, make_layout, mimo_shapes, renamed
from tests.kits.speculation.lossless import truth
from tests.kits.speculation.mtp import chained
from tests.kits.speculation.oracles import run_mixed
from tests.kits.speculation.runner_drafts import LENGTH, PROMPTS, SAMPLINGS, compare, eagle_chain


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mimo", "mimo-inside", "deepseek"])
def test_heads(name, drive, tmp_path):
    _, algorithm, target, draft, _, plain = make_layout(name, tmp_path)
    compare(target, algorithm, draft, lambda known, steps: eagle_chain(plain, known, steps), drive)


def test_several_heads(drive, tmp_path):
    (tmp_path / "target").mkdir()
    target, own = make_target(tmp_path / "target")
    prefixes = [f"mtp_layers.{index}" for index in range(3)]
    weights = seeded({name: shape for head in prefixes for name, shape in mimo_shapes(head).items()}, 31)
    draft = write(tmp_path / "draft", DRAFT | {"num_nextn_predict_layers": 3}, renamed(weights))
    plain = PlainMimo(weights, own)

    def expected(known, steps):
        return chained(known, plain, prefixes, 0, steps)

    compare(target, "MTP", draft, expected, drive, multi_layer=True)


def test_blocks(drive, tmp_path):
    (tmp_path / "target").mkdir()
    target, own = make_target(tmp_path / "target")
    weights = seeded(SHAPES, 41)
    draft = write(tmp_path / "draft", DFLASH, weights)

    def expected(known, steps):
        return block(known, Plain(weights), own["model.embed_tokens.weight"], 0, 4).argmax(-1).tolist()[:steps]

    compare(target, "DFLASH", draft, expected, drive)


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_trees(name, drive, tmp_path):
    _, algorithm, target, draft, _, _ = make_layout(name, tmp_path)
    settings = SpeculativeSettings(algorithm, draft_model_path=str(draft), num_steps=4, topk=3, num_draft_tokens=10)
    outputs, _ = truth(drive, target, PROMPTS, SAMPLINGS, LENGTH)
    driver = drive(target, speculation=settings)
    reported = []
    assert run_mixed(driver, PROMPTS, SAMPLINGS, outputs, LENGTH, reported=reported)[0] == outputs
    assert len(reported) > 30


def test_attention_of_an_npu_is_refused_elsewhere(drive, tmp_path):
    _, algorithm, target, draft, _, _ = make_layout("eagle", tmp_path)
    settings = SpeculativeSettings(algorithm, str(draft), draft_attention_backend="torch_native")
    with pytest.raises(UnsupportedError, match="kernels of an NPU; leave it out with --device cpu"):
        drive(target, speculation=settings)
