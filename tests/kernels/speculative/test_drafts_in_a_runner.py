"""Drafts within a runner: they are made from the right features of the right tokens, and change nothing."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.models.config import read_config
from kernels.platforms.base import PlatformError
from kernels.speculative.select import captured_layers
from kernels.speculative.settings import SpeculativeSettings
from kernels.step import SlotSampling
from tests.kernels.speculative.drafting import VOCAB, Plain, make_target, seeded, write
from tests.kernels.speculative.layouts import DRAFT, PlainMimo, make_layout, mimo_shapes, renamed
from tests.kernels.speculative.oracles import run_mixed
from tests.kernels.speculative.paged import Paged
from tests.kernels.speculative.test_capture import decoder
from tests.kernels.speculative.test_dflash import DFLASH, SHAPES, block
from tests.kernels.speculative.test_lossless_runner import truth
from tests.kernels.speculative.test_multi_mtp import chained

ASKED = [
    [random.Random(seed).randrange(VOCAB) for _ in range(length)] for seed, length in enumerate((5, 23, 1, 40, 17))
]
SAMPLINGS = [SlotSampling(temperature=0.0)] * 3 + [SlotSampling(temperature=0.9, seed=4)] * 2
LENGTH = 60


class Known:
    """A sequence's tokens and features as a draft sees them: those of ``seen`` positions, and the token after."""

    def __init__(self, tokens, features):
        self.seen, self.tokens, self.features = [len(tokens) - 1], torch.tensor([tokens]), features[None]


def eagle_chain(plain, known, steps):
    path = []
    for _ in range(steps):
        path.append(int(plain.ids[plain.after(known.features[0], known.tokens[0], path).argmax()]))
    return path


def drafts_of(driver):
    """Every chain that is drafted from now on for greedy rows: the slot's known tokens, and the guesses."""
    drafter, found = driver.runner._speculator.drafter, []
    draft = drafter.draft

    def spy(rows):
        drafts = draft(rows)
        for row, (slot, root, nodes) in enumerate(zip(rows.slots, rows.roots, drafts.nodes, strict=True)):
            if root and (rows.noise is None or not rows.noise.temperature[row]):
                found.append((rows.table[slot, : root + 1].tolist(), drafts.tree.tokens[row, 1:nodes].tolist()))
        return drafts

    drafter.draft = spy
    return found


def compare(target, algorithm, draft, expected, drive, steps=3, count=5, options=None, **settings):
    """``expected``: what is drafted of what is known, in so many steps. ``count``: of requests."""
    path = "" if draft is None else str(draft)
    settings = SpeculativeSettings(
        algorithm, draft_model_path=path, num_steps=steps, num_draft_tokens=steps + 1, **settings
    )
    asked, samplings = ASKED[-count:], SAMPLINGS[-count:]
    said, _ = truth(drive, target, asked, samplings, LENGTH, **options or {})
    driver = drive(target, speculation=settings, **options or {})
    assert driver.info.draft_parameters > 0
    found = drafts_of(driver)
    assert run_mixed(driver, asked, samplings, said, LENGTH)[0] == said
    assert len(found) > 10 * (count - 2)
    paged = Paged(rows=1, pages=6)
    config, model = decoder(target, paged, captured_layers(settings, read_config(target)))
    caches = paged.caches(config)
    for tokens, guesses in found[:: len(found) // 20 + 1]:
        seen = len(tokens) - 1
        _, features = model.split(model.forward(paged.batch([(0, 0, seen)], tokens[:-1]), caches))
        assert guesses == expected(Known(tokens, features), len(guesses)), len(tokens)


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
    said, _ = truth(drive, target, ASKED, SAMPLINGS, LENGTH)
    driver = drive(target, speculation=settings)
    told = []
    assert run_mixed(driver, ASKED, SAMPLINGS, said, LENGTH, told=told)[0] == said
    assert len(told) > 30


def test_attention_of_an_npu_is_refused_elsewhere(drive, tmp_path):
    _, algorithm, target, draft, _, _ = make_layout("eagle", tmp_path)
    settings = SpeculativeSettings(algorithm, str(draft), draft_attention_backend="torch_native")
    with pytest.raises(PlatformError, match="kernels of an NPU; leave it out with --device cpu"):
        drive(target, speculation=settings)
