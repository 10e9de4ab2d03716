"""Drafts of a runner: prompts, sampling settings, and the resulting drafts."""

from __future__ import annotations

import random

import torch

from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from kernels.models.config_loader import read_config
from kernels.speculation.load import captured_layers
from tests.kits.speculation.captures import decoder
from tests.kits.speculation.drafting import VOCAB
from tests.kits.speculation.lossless import truth
from tests.kits.speculation.oracles import run_mixed
from tests.kits.speculation.paged import Paged

__all__ = [
    "LENGTH",
    "PROMPTS",
    "SAMPLINGS",
    "Known",
    "compare",
    "drafts_of",
    "eagle_chain",
]

PROMPTS = [
    [random.Random(seed).randrange(VOCAB) for _ in range(length)] for seed, length in enumerate((5, 23, 1, 40, 17))
]

SAMPLINGS = [SlotSampling(temperature=0.0)] * 3 + [SlotSampling(temperature=0.9, seed=4)] * 2

LENGTH = 48


class Known:
    """A sequence's tokens and features as a draft observes them: those of ``seen`` positions, and the next token."""

    def __init__(self, tokens, features):
        self.seen, self.tokens, self.features = [len(tokens) - 1], torch.tensor([tokens]), features[None]


def eagle_chain(plain, known, steps):
    path = []
    for _ in range(steps):
        path.append(int(plain.ids[plain.after(known.features[0], known.tokens[0], path).argmax()]))
    return path


def drafts_of(driver):
    """Record every chain drafted for greedy rows from now on: the slot's known tokens and the draft tokens."""
    drafter, found = driver.runner._loaded.speculator.drafter, []
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
    """``expected``: returns the draft for known tokens and a number of steps. ``count``: number of requests."""
    path = "" if draft is None else str(draft)
    settings = SpeculativeSettings(
        algorithm, draft_model_path=path, num_steps=steps, num_draft_tokens=steps + 1, **settings
    )
    prompts, samplings = PROMPTS[-count:], SAMPLINGS[-count:]
    outputs, _ = truth(drive, target, prompts, samplings, LENGTH, **options or {})
    driver = drive(target, speculation=settings, **options or {})
    assert driver.info.draft_parameters > 0
    found = drafts_of(driver)
    assert run_mixed(driver, prompts, samplings, outputs, LENGTH)[0] == outputs
    assert len(found) > 10 * (count - 2)
    paged = Paged(rows=1, pages=6)
    config, model = decoder(target, paged, captured_layers(settings, read_config(target)))
    caches = paged.caches(config)
    for tokens, draft_tokens in found[:: len(found) // 20 + 1]:
        seen = len(tokens) - 1
        _, features = model.split(model.forward(paged.batch([(0, 0, seen)], tokens[:-1]), caches))
        assert draft_tokens == expected(Known(tokens, features), len(draft_tokens)), len(tokens)
