"""DeepSeek V4's published files: fp8 in blocks and experts in MXFP4 or fp8 stand for their floats; errors name a
tensor as the file does."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kernels.contract.errors import ConfigError, LoadError
from kernels.contract.step import SlotSampling
from kernels.weights.loading import CheckpointFiles, Placement, open_weights
from kernels.weights.quantization.detect import detect_scheme
from kernels.weights.quantization.mxfp4 import Mxfp4Weight
from kernels.weights.quantization.weights import Fp8Weight
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.declared import declared
from tests.kits.deepseek_v4_files import SETTINGS, write_published

MODEL = "blocks-deepseek-v4"


def scored(driver, prompt, chunks):
    """Log-probabilities of the prompt's tokens."""
    driver.admit(1, prompt, sampling=SlotSampling(temperature=0.0, prompt_logprobs=0))
    return np.concatenate([np.frombuffer(driver.step([(1, size)]).prompt_logprobs, np.float32) for size in chunks])


@pytest.mark.parametrize(
    ("experts", "config"),
    [
        ("fp4", {"expert_dtype": "fp4"}),
        ("fp4", {}),
        ("fp8", {"expert_dtype": "fp8"}),
        ("fp8", {"quantization_config": SETTINGS | {"expert_dtype": "fp8"}}),
        ("fp8", {}),
    ],
    ids=["fp4", "fp4-unsaid", "fp8", "fp8-in-settings", "fp8-unsaid"],
)
def test_published_files_stand_for_their_floats(experts, config, reference, drive, prompts, tmp_path):
    source, (prompt,) = reference(MODEL).path, prompts(40)
    published, floats = write_published(source, tmp_path, experts, config)
    driver = drive(published)
    found, expected = scored(driver, prompt, [23, 17]), scored(drive(floats), prompt, [23, 17])
    np.testing.assert_allclose(found, expected, atol=2e-3)
    assert np.abs(expected - scored(drive(source), prompt, [23, 17])).max() > 5e-3  # they were rounded


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_weights_are_kept_as_they_are_stored(experts, reference, tmp_path):
    path, floats = write_published(reference(MODEL).path, tmp_path, experts)
    placement = Placement(torch.float32, torch.device("cpu"))
    weights = open_weights(CheckpointFiles(str(path)), declared(path), placement, detect_scheme(path, ""))
    expected, layer = load_file(floats / "model.safetensors"), "model.layers.1"
    gates = weights.projection([f"{layer}.mlp.experts.2.{part}_proj" for part in ("gate", "up")])
    assert isinstance(gates, Mxfp4Weight if experts == "fp4" else Fp8Weight)
    assert gates.nbytes == 2 * 64 * 64 * (17 / 32 if experts == "fp4" else 1 + 4 / 256)
    stored = [expected[f"layers.1.ffn.experts.2.{part}.weight"] for part in ("w1", "w3")]
    assert torch.equal(gates.dequantize(torch.float32), torch.cat(stored))
    queries = weights.projection([f"{layer}.self_attn.q_b_proj"])
    assert isinstance(queries, Fp8Weight)
    assert torch.equal(queries.dequantize(torch.float32), expected["layers.1.attn.wq_b.weight"])


def test_scales_of_blocks_may_be_floats(reference, drive, prompts, tmp_path):
    def widen(tensors):
        for name in [name for name in tensors if name.endswith(".scale")]:
            tensors[name] = tensors[name].float()

    (prompt,) = prompts(20)
    paths = write_published(reference(MODEL).path, tmp_path, "fp8", {"expert_dtype": "fp8"}, widen)
    found, expected = (scored(drive(path), prompt, [20]) for path in paths)
    np.testing.assert_allclose(found, expected, atol=2e-3)


EXPERT, DENSE = "layers.1.ffn.experts.2.w1", "layers.2.attn.wq_b"


def without(name):
    return lambda tensors: tensors.pop(name)


def changed(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


def renamed(name, other):
    return lambda tensors: tensors.update({other: tensors.pop(name)})


def broken(scales):
    bits = scales.view(torch.uint8).clone()
    bits[0, 0] = 255
    return bits.view(torch.float8_e8m0fnu)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (without(f"{EXPERT}.scale"), f"{EXPERT}.scale is missing"),
        (without(f"{DENSE}.scale"), f"{DENSE}.scale is missing"),
        (without(f"{EXPERT}.weight"), "layers.1.mlp.experts.2.gate_proj.weight is missing"),
        (renamed(f"{DENSE}.scale", f"{DENSE}.scales"), f"{DENSE}.scales is in the checkpoint and not in the model"),
        (changed(f"{EXPERT}.scale", lambda x: x[:, :1]), f"{EXPERT}.scale has shape [64, 1]"),
        (changed(f"{EXPERT}.weight", lambda x: x[:, :16]), f"{EXPERT}.weight has shape [64, 16]"),
        (changed(f"{DENSE}.scale", lambda x: x[:3]), f"{DENSE}.scale has shape [3, 2]"),
        (
            changed(f"{DENSE}.weight", lambda x: x.bfloat16()),
            f"{DENSE}.scale is in the checkpoint and not in the model",
        ),
        (changed(f"{DENSE}.weight", lambda x: x.view(torch.int8)), f"{DENSE}.weight is stored as I8"),
        (changed(f"{EXPERT}.scale", lambda x: x.float()), f"{EXPERT}.scale is stored as F32"),
        (changed(f"{EXPERT}.scale", broken), "has scales that are not finite"),
        (changed(f"{DENSE}.scale", broken), "has scales that are not finite"),
    ],
)
def test_what_is_wrong_with_published_files_is_named(edit, says, reference, drive, tmp_path):
    path, _ = write_published(reference(MODEL).path, tmp_path, "fp4", {"expert_dtype": "fp4"}, edit)
    with pytest.raises(LoadError, match=re.escape(says)):
        drive(path)


def test_experts_of_two_forms_are_refused(reference, drive, tmp_path):
    def edit(tensors):
        tensors[f"{EXPERT}.weight"] = torch.zeros(64, 64, dtype=torch.float8_e4m3fn)

    path, _ = write_published(reference(MODEL).path, tmp_path, "fp4", {}, edit)
    with pytest.raises(LoadError, match=re.escape(f"{EXPERT}.weight has shape [64, 64], config.json (fp8, blocks of")):
        drive(path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"expert_dtype": "fp6"}, "expert_dtype must be fp8 or fp4"),
        (
            {"expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}},
            "expert_dtype fp4 goes with weight_block_size",
        ),
    ],
)
def test_settings_of_experts_that_are_not_read_are_named(config, says, reference, drive, tmp_path):
    path, _ = write_published(reference(MODEL).path, tmp_path, config=config)
    with pytest.raises(ConfigError, match=says):
        drive(path)


def test_two_ranks_read_their_parts_of_published_files_or_experts(reference, drive, prompts, tmp_path):
    path, _ = write_published(reference(MODEL).path, tmp_path)
    texts = prompts(5, 23)
    job = {"model": str(path), "prompts": texts, "length": 30}
    answers = run_ranks([job, job | {"options": {"ep_size": 2}}])
    alone = drive(path)
    for slot, text in enumerate(texts, start=1):
        alone.admit(slot, text)
        alone.generate(slot, 30)
    expected = [alone.tokens[slot] for slot in sorted(alone.tokens)]
    assert [reported["tokens"] for rank in answers for reported in rank] == [expected] * 4
