"""The heads for later tokens of Step 3.5 and 3.7 Flash: they draft what their formulas say, and change no token."""

from __future__ import annotations

import json

import pytest
import torch

from kernels.contract.errors import ConfigError
from kernels.contract.speculation import SpeculativeSettings
from tests.kits.speculation.gated_heads import nested
from tests.kits.speculation.step_heads import Heads

ONE = SpeculativeSettings("MTP", num_steps=3, topk=1, num_draft_tokens=4)
SEVERAL = SpeculativeSettings("MTP", num_steps=2, topk=1, num_draft_tokens=3, multi_layer=True)


def watched(driver):
    """The drafts that the driver's drafter makes: roots of the first row and their tokens."""
    drafter, drafted = driver.runner._loaded.speculator.drafter, []
    draft = drafter.draft

    def spy(rows):
        result = draft(rows)
        drafted.append((int(rows.roots[0]), result.tree.tokens[0, 1:].tolist()))
        return result

    drafter.draft = spy
    return drafted


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("settings", [ONE, SEVERAL], ids=["one", "several"])
def test_heads_draft_their_formulas_and_change_no_token(settings, images, reference, drive, prompts, tmp_path):
    """Prompts are longer than the window of the heads."""
    model, texts = reference("step3p5"), prompts(20, 60, seed=3)
    heads = Heads(model, tmp_path / "model")
    if images:
        nested(tmp_path / "model")
    driver = drive(tmp_path / "model", speculation=settings)
    drafted = watched(driver)
    for slot, text in enumerate(texts[::-1], start=1):
        driver.admit(slot, text)
        driver.step([(slot, len(text))])
    for _ in range(6):
        driver.step([(slot, 1) for slot in (1, 2)], drafts=dict.fromkeys((1, 2), settings.num_steps))
    for slot, text in enumerate(texts[::-1], start=1):
        assert driver.tokens[slot] == model.greedy(text, len(driver.tokens[slot]))
    assert len(drafted) == 6
    for root, found in drafted:
        known = torch.tensor(driver.tokens[1][: root + 1])
        states, read, path = heads.stream(known[:-1]), known[1:], []
        for step in range(settings.num_steps):
            index = 4 + step if settings.multi_layer else 4
            made = heads.run(index, read, states)
            path.append(int(heads.logits(index, made[-1]).argmax()))
            new = torch.tensor(path[-1:])
            if settings.multi_layer:  # the next one reads its states, and tokens one position later
                states, read = made, torch.cat((read[1:], new))
            else:
                states, read = torch.cat((states, made[-1:])), torch.cat((read, new))
        assert found[: len(path)] == path


def test_half_precision_changes_no_token_either(reference, drive, prompts, tmp_path):
    """By the device's recorded or native passes, where it has them."""
    Heads(reference("step3p5"), tmp_path / "model")
    (text,) = prompts(40, seed=3)
    made = []
    for settings in (None, ONE, SEVERAL):
        driver = drive(tmp_path / "model", dtype="bfloat16", **({} if settings is None else {"speculation": settings}))
        driver.admit(1, text)
        driver.step([(1, len(text))])
        while len(driver.tokens[1]) < 52:
            driver.step([(1, 1)], **({} if settings is None else {"drafts": {1: settings.num_steps}}))
        made.append(driver.tokens[1][:52])
    assert made[0] == made[1] == made[2]


def test_lists_without_an_entry_for_a_head_are_named(reference, drive, tmp_path):
    Heads(reference("step3p5"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["rope_theta"] = config["rope_theta"][:4]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="rope_theta has no entry of layer 4, a head for later tokens"):
        drive(tmp_path / "model", speculation=ONE)


def test_heads_of_several_windows_are_not_run_together(reference, drive, tmp_path):
    """Each runs alone."""
    Heads(reference("step3p5"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["layer_types"][5] = "full_attention"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"differ in their window or other sizes.*leave --enable-multi-layer-eagle"):
        drive(tmp_path / "model", speculation=SEVERAL)
    drive(tmp_path / "model", speculation=ONE)
