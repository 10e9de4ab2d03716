"""Scales of keys and values that were found before: of a file, of checkpoints, and what is wrong with them."""

from __future__ import annotations

import json
import logging
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import ConfigError, LoadError, UnsupportedError
from kernels.contract.step import SlotSampling
from kernels.devices.cpu.cache import CpuCaches
from kernels.devices.cpu.device import CpuDevice
from kernels.models.config_loader import read_config
from kernels.state.cache_dtype import choose_cache

SCORED = SlotSampling(temperature=0.0, prompt_logprobs=0)
LAYERS, HEADS, DIM = 3, 2, 16
SCHEME = {
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
}


@pytest.fixture
def path(reference):
    return reference("qwen3").path


@pytest.fixture
def file(tmp_path):
    def write(scales, dtype="float8_e4m3fn", **more):
        found = {"model_type": "qwen3", "kv_cache": {"dtype": dtype, "scaling_factor": scales} | more}
        (tmp_path / "scales.json").write_text(json.dumps(found))
        return str(tmp_path / "scales.json")

    return write


@pytest.fixture
def checkpoint(path, tmp_path):
    """A copy of the checkpoint with more tensors in each layer."""

    def make(settings, tensors, description=None):
        target = tmp_path / "checkpoint"
        shutil.copytree(path, target)
        config = json.loads((target / "config.json").read_text())
        if settings is not None:
            config["quantization_config"] = settings
        (target / "config.json").write_text(json.dumps(config))
        held = load_file(target / "model.safetensors")
        for layer in range(LAYERS):
            held |= {f"model.layers.{layer}.self_attn.{name}": value + layer for name, value in tensors.items()}
        save_file(held, target / "model.safetensors")
        if description is not None:
            types = dict.fromkeys(held, "FLOAT") | description
            (target / "quant_model_description.json").write_text(json.dumps(types))
        return target

    return make


def choose(path, rank=0, size=1, **options):
    config = RunnerConfig(str(path), tp_rank=rank, tp_size=size, **options)
    return choose_cache(config, read_config(path, quantized=True), torch.float32, CpuDevice(threads=1))


def each(scale=0.5):
    return {str(layer): scale + layer for layer in range(LAYERS)}


def test_a_file_has_a_scale_for_each_layer(path, file):
    choice = choose(path, kv_cache_dtype="fp8_e4m3", kv_cache_scales=file({"0": each()}))
    assert choice.dtype == torch.float8_e4m3fn
    for layer, found in enumerate(choice.scales):
        assert found.scales.shape == (2, HEADS, DIM)
        assert (found.scales == 0.5 + layer).all()
    ranks = file({"0": each(), "1": each(2.0)}, "int8")
    for rank, first in enumerate((0.5, 2.0)):
        found = choose(path, rank, 2, kv_cache_dtype="int8", kv_cache_scales=ranks).scales[0]
        assert found.scales.shape == (2, 1, DIM)
        assert (found.scales == first).all()


@pytest.mark.parametrize(
    ("scales", "dtype", "says"),
    [
        ({"0": {"0": 0.5}}, "float8_e4m3fn", "scales of 1 layers, and the model has layers 0 to 2"),
        ({"0": each(), "1": each()}, "float8_e4m3fn", r"ranks \[0, 1\], and the model runs on 1"),
        ({"0": each()}, "int8", "has scales for int8, but the cache has dtype fp8_e4m3; use --kv-cache-dtype int8"),
        ({"0": each() | {"1": 0.0}}, "float8_e4m3fn", "the scale of layer 1 must be above 0"),
        ({"0": each() | {"1": "many"}}, "float8_e4m3fn", "cannot be read"),
        ([1], "float8_e4m3fn", "cannot be read"),
        ({}, "float8_e4m3fn", r"scales of ranks \[\]"),
    ],
)
def test_a_file_that_does_not_fit(scales, dtype, says, path, file):
    with pytest.raises(ConfigError, match=says):
        choose(path, kv_cache_dtype="fp8_e4m3", kv_cache_scales=file(scales, dtype))


def test_a_file_changes_what_a_model_says(path, file, drive, prompts):
    (prompt,) = prompts(40)

    def scores(**options):
        driver = drive(path, **options)
        driver.admit(1, prompt, sampling=SCORED)
        return np.frombuffer(driver.step([(1, len(prompt))]).prompt_logprobs, np.float32)

    exact = scores()
    near = scores(kv_cache_dtype="fp8_e4m3", kv_cache_scales=file({"0": dict.fromkeys(map(str, range(3)), 0.05)}))
    far = scores(kv_cache_dtype="fp8_e4m3", kv_cache_scales=file({"0": dict.fromkeys(map(str, range(3)), 1e-4)}))
    assert np.abs(near - exact).mean() < 0.2 * np.abs(far - exact).mean()  # 448 times 0.0001 cuts most numbers off


def test_a_checkpoint_s_own_scales(checkpoint, caplog):
    """As compressed-tensors writes them: they say the cache's type by themselves."""
    settings = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}} | SCHEME
    path = checkpoint(settings, {"k_scale": torch.tensor(0.25), "v_scale": torch.tensor([0.5, 0.75])})
    choice = choose(path)
    assert choice.dtype == torch.float8_e4m3fn
    assert [float(layer.scales[0, 1, 3]) for layer in choice.scales] == [0.25, 1.25, 2.25]
    assert choice.scales[1].scales[1, :, 7].tolist() == [1.5, 1.75]
    assert choose(path, kv_cache_dtype="bfloat16").scales is None
    token = choose(path, kv_cache_quant_method="per_token_head")
    assert (token.dtype, token.scales) == (torch.float8_e4m3fn, None)
    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        assert choose(path, kv_cache_dtype="int8").scales is None
    assert "are for fp8_e4m3 and not used" in caplog.text


def test_modelslim_has_a_scale_for_each_number(checkpoint, drive, prompts):
    shape = (HEADS * DIM,)
    scales, offsets = torch.rand(shape) * 0.02 + 0.04, torch.arange(HEADS * DIM).float() % 5
    path = checkpoint(
        None,
        {
            "k_proj.kv_cache_scale": scales, "k_proj.kv_cache_offset": offsets,
            "v_proj.kv_cache_scale": scales * 2, "v_proj.kv_cache_offset": offsets * 0,
        },
        {"kv_cache_type": "C8", "model_quant_type": "C8"},
    )  # fmt: skip
    choice = choose(path)
    assert choice.dtype == torch.int8
    assert torch.equal(choice.scales[0].scales[0].flatten(), scales)
    assert torch.equal(choice.scales[0].offsets[0].flatten(), offsets)
    assert torch.equal(choose(path, 1, 2).scales[0].scales[1].flatten(), 2 * scales[DIM:])
    driver = drive(path)
    assert driver.info.cache_dtype == "int8"
    (prompt,) = prompts(20)
    driver.admit(1, prompt)
    assert len(driver.generate(1, 30)) == 30


def test_scales_that_are_none(checkpoint):
    path = checkpoint({"quant_method": "fp8"}, {"k_scale": torch.tensor(-1.0), "v_scale": torch.tensor(1.0)})
    with pytest.raises(LoadError, match=r"layers.0.self_attn.k_scale .* not above 0"):
        choose(path)


def test_scales_of_another_model(checkpoint):
    path = checkpoint({"quant_method": "fp8"}, {"k_scale": torch.ones(5), "v_scale": torch.ones(5)})
    with pytest.raises(LoadError, match=r"has 5 numbers; expected 1, 2 .* or 32"):
        choose(path)


def test_without_scales(path, caplog):
    """Whole numbers need them; fp8 can do without, and says so."""
    assert choose(path).dtype is None
    assert choose(path, kv_cache_dtype="int8").scales is None
    with pytest.raises(ConfigError, match="static scales"):
        choose(path, kv_cache_dtype="int8", kv_cache_quant_method="none")
    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        fixed = choose(path, kv_cache_dtype="fp8_e4m3", kv_cache_quant_method="none").scales
    assert "with scale 1.0" in caplog.text
    assert all((layer.scales == 1).all() for layer in fixed)


def test_a_checkpoint_for_another_device(checkpoint, monkeypatch, caplog):
    """Its type is what suits it, no order: where a device has no such numbers the cache is the model's."""
    path = checkpoint({"quant_method": "fp8"}, {"k_scale": torch.tensor(1.0), "v_scale": torch.tensor(1.0)})

    def refuse(self, dtype):
        raise UnsupportedError("no such numbers here")

    monkeypatch.setattr(CpuCaches, "check_dtype", refuse)
    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        assert choose(path).dtype is None
    assert "not used: no such numbers here" in caplog.text
    with pytest.raises(UnsupportedError):
        choose(path, kv_cache_dtype="fp8_e4m3")
