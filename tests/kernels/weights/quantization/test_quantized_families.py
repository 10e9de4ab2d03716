"""Quantized checkpoints of families with latent attention, and with experts of their own: each format stands for the
floats that it was made from, and a tensor that is missing, extra or misshapen is named."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.errors import LoadError
from kernels.contract.step import SlotSampling
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.modelslim import write
from tests.kits.parity import scored
from tests.kits.quantized import fp8_blocks, fp8_rows, rewrite
from tests.kits.quantized_words import awq, dequantized, gptq, packed

WORDS = {"bits": 4, "group_size": 16}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16},
        }
    },
}
LAYOUTS = {
    "awq": (awq(4, 16), {"quant_method": "awq", "zero_point": True, "version": "gemm", **WORDS}, dequantized(4, 16)),
    "gptq": (gptq(4, 16), {"quant_method": "gptq", "desc_act": False, "sym": False, **WORDS}, dequantized(4, 16)),
    "compressed-tensors": (packed(4, 16), PACKED, dequantized(4, 16, True)),
}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
LATENT = ["deepseek-v2", "deepseek-v3", "deepseek-v3.2", "minicpm3", "mistral-large4"]
SPARSE = ["glm4-moe", "minimax-m2", "olmoe", "qwen3-moe"]
FAMILIES = [f"sixteens-{name}" for name in (*LATENT, *SPARSE)]
"""Whose sizes are multiples of 16."""
PROMPT = list(range(3, 40))


def scores(driver):
    driver.admit(1, PROMPT, sampling=SlotSampling(temperature=0.0, prompt_logprobs=0))
    return np.frombuffer(driver.step([(1, len(PROMPT))]).prompt_logprobs, np.float32)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_of_four_bits_stand_for_their_floats(name, layout, reference, drive, tmp_path):
    change, settings, floats = LAYOUTS[layout]
    source = reference(name).path
    result = scores(drive(rewrite(source, tmp_path / "words", change, settings)))
    expected = scores(drive(rewrite(source, tmp_path / "floats", floats)))
    assert np.abs(result - expected).mean() < 5e-3  # where two experts are equally good, another one is chosen
    assert np.abs(expected - scores(drive(source))).max() > 5e-3  # it was rounded


@pytest.mark.parametrize("name", FAMILIES)
def test_fp8_in_blocks_stands_for_its_floats(name, reference, drive, tmp_path):
    source = reference(name).path

    def floats(module, weight):
        made = fp8_blocks(16, 16)(module, weight)
        wide = made[f"{module}.weight_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
        rows, columns = weight.shape
        return {f"{module}.weight": made[f"{module}.weight"].float() * wide[:rows, :columns]}

    result = scores(drive(rewrite(source, tmp_path / "words", fp8_blocks(16, 16), FP8)))
    expected = scores(drive(rewrite(source, tmp_path / "floats", floats)))
    assert np.abs(result - expected).mean() < 5e-3
    assert np.abs(expected - scores(drive(source))).max() > 5e-3


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("experts", ["W8A8_DYNAMIC", "W4A8_DYNAMIC"])
def test_modelslim_is_near_its_floats(name, experts, reference, drive, tmp_path):
    """All in 8 bits, or experts in 4; an indexer's weights of heads stay in floats."""

    def kind(module):
        if module.endswith("weights_proj"):
            return "FLOAT"
        return experts if ".experts." in module else "W8A8_DYNAMIC"

    result, expected = (scores(drive(path)) for path in write(reference(name).path, tmp_path, kind))
    spread = np.abs(expected - expected.mean()).mean()
    assert 0 < np.abs(result - expected).mean() < 0.35 * spread


LOSSES = {
    "bamba": (4, 9),
    "deepseek-v4": (2.5, 5),
    "falcon": (3, 7),
    "hunyuan-v4": (2.5, 6),
    "lfm3": (3.5, 8.5),
    "ling3": (4.5, 10),
    "minimax-m3": (3, 6),
    "minimax-text": (3, 4.5),
    "mistral-large4": (3, 5),
    "qwen4": (2.5, 4),
}
"""What int8 and fp8 may lose, in multiples of what bfloat16 does."""


@pytest.mark.parametrize("name", LOSSES)
def test_eight_bits_lose_a_few_times_what_bf16_does(name, reference, drive, prompts):
    """A small Qwen 4 turns any rounding into a large difference: its choices of blocks and experts, and its gates of
    n-grams, jump. So losses are compared with those of bfloat16, and over several prompts."""
    path, texts = reference(name).path, [prompts(60, seed=seed)[0] for seed in range(3)]

    def found(**options):
        driver = drive(path, **options)
        results = []
        for text in texts:
            results.append(scored(driver, text, [60]))
            driver.release(1)
        return np.concatenate(results)

    exact = found()
    half, *eights = (
        np.abs(found(**options) - exact).mean()
        for options in ({"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "fp8"})
    )
    for lost, times in zip(eights, LOSSES[name], strict=True):
        assert 0.5 * half < lost < times * half


BROKEN = {
    "missing": (lambda tensors, name: tensors.pop(name), "is missing|lacks|has no"),
    "extra": (lambda tensors, name: tensors.update({f"{name}_more": torch.zeros(2)}), "not in the model"),
    "misshapen": (lambda tensors, name: tensors.update({name: tensors[name][:-1].clone()}), r"\[.*\]"),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gemma4", "layers.0.self_attn.q_norm.weight"),
        ("gpt-oss", "layers.1.mlp.experts.down_proj"),
        ("kimi-linear", "A_log"),
        ("llama4", "feed_forward.experts.gate_up_proj"),
        ("mimo-v2-flash", "layers.1.self_attn.attention_sink_bias"),
        ("deepseek-v3", "layers.1.self_attn.kv_b_proj.weight"),
        ("qwen3-next", "conv1d"),
    ],
)
def test_a_tensor_that_is_wrong_is_named_with_what_was_expected(kind, name, part, reference, drive, tmp_path):
    source = reference(name).path
    shutil.copy(source / "config.json", tmp_path)
    tensors = load_file(source / "model.safetensors")
    wrong = next(tensor for tensor in sorted(tensors) if part in tensor)
    change, says = BROKEN[kind]
    change(tensors, wrong)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=says) as error:
        drive(tmp_path)
    assert wrong in str(error.value)


def stacked(path):
    """Turn a checkpoint of Step 3.5 into one that keeps what is stored of all experts of a layer in one tensor."""
    tensors, joined = load_file(path / "model.safetensors"), {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdecimal() else 0 for part in name.split(".")]):
        if ".experts." in name:
            layer, _, rest = name.partition(".experts.")
            joined.setdefault(f"{layer}.{rest.partition('.')[2]}", []).append(tensors.pop(name))
    save_file(tensors | {name: torch.stack(each) for name, each in joined.items()}, path / "model.safetensors")
    return path


def test_all_experts_of_a_layer_in_one_tensor_of_fp8_are_read(reference, drive, tmp_path):
    """As Step 3.5 and 3.7 Flash are published: experts in fp8, all else in floats, which config.json does not say."""
    apart = rewrite(reference("parallel-step3p5").path, tmp_path / "apart", experts_alone(fp8_blocks(16, 16)), FP8)
    shutil.copytree(apart, tmp_path / "stacked")
    path = stacked(tmp_path / "stacked")
    names = load_file(path / "model.safetensors").keys()
    assert "model.layers.1.moe.gate_proj.weight_scale_inv" in names
    assert not any(".experts." in name for name in names)
    np.testing.assert_array_equal(scores(drive(path)), scores(drive(apart)))
    alone = drive(path)
    alone.admit(1, PROMPT)
    alone.generate(1, 45)
    (first,), (second,) = run_ranks([{"model": str(path), "prompts": [PROMPT], "length": 45}])
    assert first["tokens"] == second["tokens"] == [alone.tokens[1]]


def experts_alone(change):
    return lambda module, weight: change(module, weight) if ".experts." in module else {f"{module}.weight": weight}


SCALES = "model.layers.1.moe.down_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda tensors: tensors.pop(SCALES), "moe.experts.0.down_proj.weight_scale_inv is missing"),
        (lambda tensors: tensors.update({SCALES: tensors[SCALES][:4].clone()}), f"{SCALES} has shape [4, 3, 2]"),
        (lambda tensors: tensors.update({SCALES: tensors[SCALES][:, :2].clone()}), "shape [2, 2], config.json"),
    ],
    ids=["missing", "of too few experts", "misshapen"],
)
def test_scales_of_all_experts_that_are_wrong_are_named(edit, says, reference, drive, tmp_path):
    path = stacked(rewrite(reference("step3p5").path, tmp_path, experts_alone(fp8_blocks(16, 16)), FP8))
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(LoadError, match=re.escape(says)):
        drive(path)


def test_fbgemm_is_fp8_with_a_scale_for_each_output(reference, drive, tmp_path):
    """As Llama 3.1 405B is published; some of its layers stay in floats."""

    def change(module, weight):
        return {f"{module}.weight": weight} if ".layers.0." in module else fp8_rows(module, weight)

    settings = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    source = reference("parallel-llama").path
    path = rewrite(source, tmp_path / "fbgemm", change, settings)
    fp8 = rewrite(source, tmp_path / "fp8", change, {"quant_method": "fp8"})
    np.testing.assert_array_equal(scores(drive(path)), scores(drive(fp8)))
