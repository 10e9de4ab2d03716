"""Checkpoints of bitsandbytes: tables of four bits with one or two levels of factors, and int8."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.errors import ConfigError, LoadError
from kernels.contract.step import SlotSampling
from kernels.weights.quantization.bitsandbytes import BitsAndBytes
from kernels.weights.quantization.detect import detect_scheme
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.quantized import rewrite

FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EIGHT = {"quant_method": "bitsandbytes", "_load_in_8bit": True, "llm_int8_threshold": 6.0}
LOWER = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0)
UPPER = (0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0)
TABLE = torch.tensor(LOWER + UPPER)
OUTER = torch.linspace(-1, 1, 256)
BLOCK, NESTED, OFFSET = 64, 32, 0.25


def blocks(weight):
    """Codes uint8 and factors of each block, of the numbers of ``weight`` one after the other."""
    padded = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    absmax = padded.abs().amax(1)
    codes = (padded / absmax[:, None]).unsqueeze(2).sub(TABLE).abs().argmin(2).to(torch.uint8)
    return codes.flatten()[: weight.numel() + weight.numel() % 2], absmax


def inner(absmax):
    """Codes of the factors, and their factors."""
    parts = (absmax - OFFSET).split(NESTED)
    outer = torch.stack([part.abs().max() for part in parts])
    codes = [(part / top).unsqueeze(1).sub(OUTER).abs().argmin(1) for part, top in zip(parts, outer, strict=True)]
    return torch.cat(codes).to(torch.uint8), outer


def four(nested, state=True):
    def change(module, weight):
        codes, absmax = blocks(weight)
        name, said = f"{module}.weight", {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16"}
        said["shape"] = list(weight.shape)
        made = {
            name: (codes[::2] << 4 | codes[1::2])[:, None],
            f"{name}.absmax": absmax,
            f"{name}.quant_map": TABLE.clone(),
        }
        if nested:
            own, outer = inner(absmax)
            made |= {f"{name}.absmax": own, f"{name}.nested_absmax": outer, f"{name}.nested_quant_map": OUTER.clone()}
            said |= {"nested_blocksize": NESTED, "nested_offset": OFFSET, "nested_dtype": "float32"}
        text = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
        return made | ({f"{name}.quant_state.bitsandbytes__nf4": text} if state else {})

    return change


def floats(nested):
    def change(module, weight):
        codes, absmax = blocks(weight)
        if nested:
            own, outer = inner(absmax)
            absmax = OUTER[own.int()] * outer.repeat_interleave(NESTED)[: len(own)] + OFFSET
        wide = TABLE[codes.int()][: weight.numel()] * absmax.repeat_interleave(BLOCK)[: weight.numel()]
        return {f"{module}.weight": wide.view(weight.shape)}

    return change


def eight(module, weight):
    tops = weight.abs().amax(1)
    values = (weight * (127 / tops[:, None])).round().to(torch.int8)
    return {
        f"{module}.weight": values,
        f"{module}.SCB": tops,
        f"{module}.weight_format": torch.zeros((), dtype=torch.uint8),
    }


def eight_in_floats(module, weight):
    made = eight(module, weight)
    return {f"{module}.weight": made[f"{module}.weight"].float() * (made[f"{module}.SCB"][:, None] / 127)}


def scores(driver, text):
    driver.admit(1, text, sampling=SlotSampling(temperature=0.0, prompt_logprobs=0))
    return np.frombuffer(driver.step([(1, len(text))]).prompt_logprobs, np.float32)


CASES = {
    "4bit": (four(False), FOUR, floats(False)),
    "4bit-without-state": (four(False, state=False), FOUR, floats(False)),
    "4bit-nested": (four(True), FOUR | {"bnb_4bit_use_double_quant": True}, floats(True)),
    "8bit": (eight, EIGHT, eight_in_floats),
}


@pytest.mark.parametrize("name", ["qwen3", "phi3-full", "native-moe"])
@pytest.mark.parametrize("case", CASES)
def test_weights_stand_for_their_floats(name, case, reference, drive, prompts, tmp_path):
    """Blocks of 64 cross rows of 48 numbers."""
    change, settings, plain = CASES[case]
    source, (text,) = reference(name).path, prompts(30)
    found = scores(drive(rewrite(source, tmp_path / "own", change, settings)), text)
    expected = scores(drive(rewrite(source, tmp_path / "floats", plain)), text)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(expected - scores(drive(source), text)).max() > 1e-3  # it was rounded


def test_ranks_divide_blocks_of_four_bits(reference, drive, prompts, tmp_path):
    (text,), path = prompts(20), rewrite(reference("parallel-qwen3").path, tmp_path / "own", four(True), FOUR)
    driver = drive(path)
    driver.admit(1, text)
    expected = driver.generate(1, 30)
    first, second = run_ranks([{"model": str(path), "prompts": [text], "length": 30}])
    assert first[0]["tokens"] == second[0]["tokens"] == [expected]


def test_made_up_weights_of_four_bits_run(reference, drive, tmp_path):
    path = rewrite(reference("qwen3").path, tmp_path / "own", four(False), FOUR)
    driver = drive(path, load_format="dummy")
    driver.admit(1, [3, 4, 5])
    assert len(driver.generate(1, 9)) == 9


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"load_in_8bit": True}, "one of load_in_4bit and load_in_8bit must be true"),
        ({"load_in_4bit": False}, "one of load_in_4bit and load_in_8bit must be true"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage 'bfloat16' is not supported"),
    ],
)
def test_other_settings_are_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        BitsAndBytes(FOUR | change)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (b"{", "quant_state.bitsandbytes__nf4 cannot be read"),
        (b'{"shape": [1, 2], "blocksize": 64}', r"is of a weight \[1, 2\] in blocks of 64"),
        (b'{"shape": [1, 2], "blocksize": 65}', "has a blocksize of 65"),
    ],
)
def test_a_wrong_state_is_refused_by_name(state, says, reference, drive, tmp_path):
    path = rewrite(reference("qwen3").path, tmp_path / "own", four(True), FOUR)
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if "quant_state" in name)
    save_file(weights | {name: torch.tensor(list(state), dtype=torch.uint8)}, path / "model.safetensors")
    with pytest.raises(LoadError, match=says):
        drive(path)


def test_factors_of_two_levels_need_their_offset(reference, drive, tmp_path):
    path = rewrite(reference("qwen3").path, tmp_path / "own", four(True), FOUR)
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if "quant_state" in name)
    state = json.loads(bytes(weights[name].tolist()))
    del state["nested_offset"]
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file(weights | {name: text}, path / "model.safetensors")
    with pytest.raises(LoadError, match=f"{name} has no nested_offset"):
        drive(path)
    save_file({key: tensor for key, tensor in weights.items() if key != name}, path / "model.safetensors")
    with pytest.raises(LoadError, match=r"quant_state.bitsandbytes__nf4 is missing"):
        drive(path)


def test_weights_of_eight_bits_in_tiles_are_refused(reference, drive, tmp_path):
    path = rewrite(reference("qwen3").path, tmp_path / "own", eight, EIGHT)
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if name.endswith(".weight_format"))
    save_file(weights | {name: torch.tensor(3, dtype=torch.uint8)}, path / "model.safetensors")
    with pytest.raises(LoadError, match=f"{name} is 3, .* supported is 0"):
        drive(path)


def test_a_missing_table_is_refused_before_weights_are_read(reference, drive, tmp_path):
    path = rewrite(reference("qwen3").path, tmp_path / "own", four(False), FOUR)
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if name.endswith("quant_map"))
    del weights[name]
    save_file(weights, path / "model.safetensors")
    with pytest.raises(LoadError, match=f"{name} is missing"):
        drive(path)


def test_the_flag_must_agree_with_the_files(reference, tmp_path):
    path = rewrite(reference("qwen3").path, tmp_path / "own", four(False), FOUR)
    assert detect_scheme(path, "bitsandbytes").name == "bitsandbytes 4 bit"
    with pytest.raises(ConfigError, match="quantized by bitsandbytes, and --quantization asks for awq"):
        detect_scheme(path, "awq")
