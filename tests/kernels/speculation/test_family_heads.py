"""Heads for later tokens whose layer is one of their family: they draft by their formulas and change no token."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.errors import ConfigError, LoadError
from kernels.contract.speculation import SpeculativeSettings
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.quantized import fp8_rows
from tests.kits.quantized import rewrite as quantize
from tests.kits.speculation import step_heads
from tests.kits.speculation.drafting import drafted
from tests.kits.speculation.family_heads import LAYOUTS, Heads
from tests.kits.speculation.gated_heads import nested

ONE = SpeculativeSettings("MTP", num_steps=3, topk=1, num_draft_tokens=4)
SEVERAL = SpeculativeSettings("MTP", num_steps=2, topk=1, num_draft_tokens=3, multi_layer=True)


def rewrite(path, **keys):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.mark.parametrize(
    ("name", "settings", "images"),
    [
        *(pytest.param(name, ONE, False, id=name) for name in LAYOUTS),
        pytest.param("exaone4", ONE, True, id="exaone4.5"),
        pytest.param("mimo-v2-flash", SEVERAL, False, id="mimo-v2-flash-two"),
    ],
)
def test_heads_draft_their_formulas_and_change_no_token(name, settings, images, reference, drive, prompts, tmp_path):
    """Prompts are longer than windows. Each of MiMo-V2's heads reads the model's states."""
    model, (text,) = reference(name), prompts(40, seed=3)
    heads = Heads(name, model, tmp_path / "model", 2 if settings.multi_layer else 1)
    if images:
        nested(tmp_path / "model")
    driver = drive(tmp_path / "model", speculation=settings)
    found = drafted(driver, text, settings)
    assert driver.tokens[1] == model.greedy(text, len(driver.tokens[1]))
    assert len(found) == 5
    for root, tokens in found:
        known = torch.tensor(driver.tokens[1][: root + 1])
        with torch.inference_mode():
            states, read, path = heads.states(known[:-1]), known[1:], []
            for step in range(settings.num_steps):
                index = step if settings.multi_layer else 0
                made = heads.run(read, states, index)
                path.append(heads.best(made[-1], index))
                new = torch.tensor(path[-1:])
                if settings.multi_layer:
                    read = torch.cat((read[1:], new))
                else:
                    states, read = torch.cat((states, made[-1:])), torch.cat((read, new))
        assert tokens[: len(path)] == path


@pytest.mark.parametrize("name", LAYOUTS)
def test_half_precision_changes_no_token(name, reference, drive, prompts, tmp_path):
    """By the device's recorded or native passes, where it has them."""
    model, (text,) = reference(name), prompts(40, seed=3)
    Heads(name, model, tmp_path / "model")
    driver = drive(tmp_path / "model", dtype="bfloat16", speculation=ONE)
    alone = drive(model.path, dtype="bfloat16")
    drafted(driver, text, ONE)
    alone.admit(1, text)
    alone.step([(1, len(text))])
    alone.generate(1, len(driver.tokens[1]))
    assert driver.tokens[1] == alone.tokens[1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_heads_in_floats_change_no_token_of_a_quantized_model(name, reference, drive, prompts, tmp_path):
    """LongCat-Flash's files also have quantized experts that return their input."""
    (text,), heads = prompts(40, seed=3), Heads(name, reference(name), tmp_path / "model")

    def change(module, weight):
        kept = module.startswith(heads.first) or "mtp" in module
        return {f"{module}.weight": weight} if kept else fp8_rows(module, weight)

    settings = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    path = quantize(tmp_path / "model", tmp_path / "quantized", change, settings)
    driver, alone = drive(path, speculation=ONE), drive(path)
    assert len(drafted(driver, text, ONE)) == 5
    alone.admit(1, text)
    assert driver.tokens[1] == alone.generate(1, len(driver.tokens[1]))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in ("mimo", "nemotron-3")])
def test_trees_of_a_head_change_no_token(name, reference, drive, prompts, tmp_path):
    model, (text,) = reference(name), prompts(40, seed=3)
    Heads(name, model, tmp_path / "model")
    settings = SpeculativeSettings("MTP", num_steps=3, topk=2, num_draft_tokens=6)
    driver = drive(tmp_path / "model", speculation=settings)
    driver.admit(1, text)
    driver.step([(1, len(text))])
    for _ in range(4):
        driver.step([(1, 1)], drafts={1: 5})
    assert driver.tokens[1] == model.greedy(text, len(driver.tokens[1]))


def test_two_ranks_draft_as_one_device_does(reference, prompts, tmp_path):
    jobs, expected = [], []
    for name in ("step3p5", "mimo-v2-flash", "nemotron-3"):
        model, texts, path = reference(f"parallel-{name}"), prompts(20, 40, seed=3), tmp_path / name
        step_heads.Heads(model, path) if name == "step3p5" else Heads(name, model, path)
        jobs.append({"model": str(path), "prompts": texts, "length": 50, "speculation": msgspec.to_builtins(ONE)})
        expected.append([model.greedy(text, 50) for text in texts])
    for rank in run_ranks(jobs):
        assert [job["tokens"] for job in rank] == expected


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tensor_of_a_head_that_is_not_read_is_named(name, reference, drive, tmp_path):
    heads, file = Heads(name, reference(name), tmp_path / "model"), tmp_path / "model" / "model.safetensors"
    save_file(load_file(file) | {f"{heads.first}.mlp.other.weight": torch.zeros(2)}, file)
    with pytest.raises(LoadError, match=rf"{heads.first}\.mlp\.other\.weight is in the checkpoint and not in the"):
        drive(tmp_path / "model", speculation=ONE)


def test_a_head_of_other_layers_is_named(reference, drive, tmp_path):
    Heads("nemotron-3", reference("nemotron-3"), tmp_path / "model")
    rewrite(tmp_path / "model", mtp_layers_block_type=["mamba", "moe"])
    with pytest.raises(ConfigError, match=r"must be attention and moe, and is .*mamba.*; use .* NGRAM"):
        drive(tmp_path / "model", speculation=ONE)


def test_a_model_without_windows_has_no_heads_that_see_one(reference, drive, tmp_path):
    Heads("mimo-v2-flash", reference("mimo-v2-flash"), tmp_path / "model")
    rewrite(tmp_path / "model", layer_types=["full_attention"] * 4)
    with pytest.raises(ConfigError, match="layer_types names no layer with one"):
        drive(tmp_path / "model", speculation=ONE, load_format="dummy")


def test_files_without_heads_are_named(reference, drive, tmp_path):
    with pytest.raises(LoadError, match=r"no head for tokens after the next: no mtp.layers.N.eh_proj; give"):
        drive(reference("longcat-flash").path, speculation=ONE)
