"""gpt-oss on two ranks and with experts in MXFP4; ``test_equality`` compares it with transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import FP4_VALUES

from kernels.contract.errors import ConfigError
from kernels.devices.cpu.dense_linear import CpuLinear
from kernels.models.config_loader import parse_config
from kernels.weights.quantization.mxfp4 import Mxfp4Weight
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.driver import COMMON, GPT_OSS
from tests.kits.native import compiled, needs_native, platform
from tests.kits.parity import scored
from tests.kits.rounded_once import assert_only_rounded_once

__all__ = ["compiled", "platform"]

SIZES = COMMON | GPT_OSS | {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 212}
PACKED = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def floats(blocks, scales):
    """[experts, outputs, inputs], a byte at a time."""
    values = torch.tensor(FP4_VALUES)
    pairs = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), -1)
    return (pairs.flatten(-2) * 2.0 ** (scales.float() - 127).unsqueeze(-1)).flatten(-2)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A checkpoint whose experts are in MXFP4, and transformers' model of their floats."""
    torch.manual_seed(11)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    path = tmp_path_factory.mktemp("packed")
    model.save_pretrained(path)
    held = load_file(path / "model.safetensors")
    for name in [name for name in held if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = held.pop(name).shape
        blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, (count, outputs, inputs // 32), dtype=torch.uint8)
        held |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).data = floats(blocks, scales).transpose(1, 2).contiguous()
    save_file(held, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text()) | {"quantization_config": PACKED}
    (path / "config.json").write_text(json.dumps(raw))
    return path, model


def logprobs(model, prompt):
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].float().log_softmax(-1).numpy()


def test_packed_experts_are_those_of_their_floats(packed, drive, prompts):
    (path, model), (prompt,) = packed, prompts(40)
    found = scored(drive(path), prompt, [30, 1, 9], SIZES["vocab_size"])
    np.testing.assert_allclose(found, logprobs(model, prompt), atol=2e-4, rtol=1e-4)


def test_packed_experts_stay_packed(packed, drive, prompts):
    driver, (prompt,) = drive(packed[0], dtype="bfloat16"), prompts(40)
    driver.admit(1, prompt)
    assert len(driver.generate(1, 44)) == 44
    if driver.info.cpu_operators not in ("", "none", "pending"):
        assert driver.info.weight_bytes < 1.3 * driver.info.parameters


@needs_native
def test_native_products_are_those_of_floats(platform):
    blocks = torch.randint(0, 256, (96, 6, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scales = torch.randint(118, 130, (96, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    weight, x = Mxfp4Weight.from_blocks(blocks, scales, torch.bfloat16), torch.randn(40, 192).bfloat16()
    expected = floats(blocks, scales)
    assert torch.equal(weight.dequantize(torch.float32), expected)
    linear = platform.linear.make_quantized(weight, None)
    assert not isinstance(linear, CpuLinear)
    for rows in (1, 40):
        assert_only_rounded_once(linear(x[:rows]), x[:rows], expected, None)


def test_two_ranks_divide_packed_experts(packed, drive, prompts):
    (text,) = prompts(23)
    driver = drive(packed[0])
    driver.admit(1, text)
    first, second = run_ranks([{"model": str(packed[0]), "prompts": [text], "length": 32}])
    assert first[0]["tokens"] == second[0]["tokens"] == [driver.generate(1, 32)]


def test_sinks_refuse_invariant_results(reference, drive):
    with pytest.raises(ConfigError, match="GptOssForCausalLM has the sinks of attention"):
        drive(reference("gpt-oss").path, invariant=True)


def test_blocks_that_do_not_fit_are_refused(packed, drive):
    raw = SIZES | {"architectures": ["GptOssForCausalLM"], "quantization_config": PACKED}
    assert parse_config(raw, quantized=True).experts.packed
    with pytest.raises(ConfigError, match="in blocks of 32"):
        parse_config(raw | {"intermediate_size": 80}, quantized=True)
    with pytest.raises(
        ConfigError, match=r"blocks in intermediate_size, 2 of GptOssForCausalLM .* this model takes 1, 2"
    ):
        drive(packed[0], tp_size=4, rendezvous="127.0.0.1:1")


def test_mxfp4_is_refused_for_other_families(reference, drive):
    overrides = json.dumps({"quantization_config": PACKED})
    with pytest.raises(ConfigError, match="quant_method mxfp4 is read for gpt-oss alone"):
        drive(reference("qwen3-moe").path, config_overrides=overrides)
