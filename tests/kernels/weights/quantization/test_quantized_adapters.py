"""Adapters over quantized weights: the model runs as one whose weights are the floats that its own stand for, with the
adapter in them."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.contract.adapters import AdapterSettings
from kernels.contract.step import SlotSampling
from tests.kits.adapters import adapted_modules, merged, save_adapter
from tests.kits.gguf_checkpoints import floats as gguf_floats
from tests.kits.gguf_writer import write_gguf
from tests.kits.quantized import fp8_blocks, fp8_rows, rewrite
from tests.kits.quantized_words import awq, dequantized, gptq, int8_rows, packed

PROMPT = list(range(3, 40))
WORDS = {"bits": 4, "group_size": 16}
PACKED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed(kind, **parts):
    groups = {"group_0": {"targets": ["Linear"], **parts}}
    return {"quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"], "config_groups": groups}


def int8_floats(module, weight):
    made = int8_rows()(module, weight)
    return {f"{module}.weight": made[f"{module}.weight"].float() * made[f"{module}.weight_scale"]}


def fp8_floats(module, weight):
    made = fp8_rows(module, weight)
    return {f"{module}.weight": made[f"{module}.weight"].float() * made[f"{module}.weight_scale"]}


def block_floats(module, weight):
    made = fp8_blocks(16, 16)(module, weight)
    wide = made[f"{module}.weight_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
    return {f"{module}.weight": made[f"{module}.weight"].float() * wide[: weight.shape[0], : weight.shape[1]]}


FORMATS = {  # how it is written, its settings, the floats that it stands for
    "awq": (awq(4, 16), {"quant_method": "awq", "zero_point": True, "version": "gemm", **WORDS}, dequantized(4, 16)),
    "gptq": (gptq(4, 16), {"quant_method": "gptq", "desc_act": False, "sym": False, **WORDS}, dequantized(4, 16)),
    "packed": (packed(4, 16), compressed("pack-quantized", weights=PACKED), dequantized(4, 16, True)),
    "int8": (int8_rows(), compressed("int-quantized", weights=ROWS, input_activations=TOKENS), int8_floats),
    "fp8 rows": (fp8_rows, {"quant_method": "fp8"}, fp8_floats),
    "fp8 blocks": (fp8_blocks(16, 16), {"quant_method": "fp8", "weight_block_size": [16, 16]}, block_floats),
}
ROUNDS = ("int8", "fp8 rows", "fp8 blocks")
"""Formats whose products round their inputs, too."""


def scores(driver, adapter=0):
    driver.admit(1, PROMPT, sampling=SlotSampling(temperature=0.0, prompt_logprobs=0), adapter=adapter)
    result = np.frombuffer(driver.step([(1, len(PROMPT))]).prompt_logprobs, np.float32)
    driver.release(1)
    driver.step([])
    return result


def assert_runs_as_merged(path, floats, tmp_path, drive, modules, most, dora):
    """``most``: of the error, as a share of what the adapter changes."""
    file = save_adapter(tmp_path / "adapter", modules, 1, use_dora=dora)
    targets = ("all", "dora") if dora else ("all", "experts")
    driver = drive(path, adapters=AdapterSettings(max_rank=4, max_batch=2, targets=targets))
    driver.runner.load_adapter(1, str(file))
    wanted = scores(drive(merged(floats, tmp_path / "merged", file)))
    change = np.abs(wanted - scores(driver)).mean()
    assert np.abs(scores(driver, 1) - wanted).mean() < most * change


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", FORMATS)
def test_an_adapter_over_quantized_weights_is_as_merged(kind, dora, reference, drive, tmp_path):
    name = "sixteens-qwen3-moe"
    write, settings, floats = FORMATS[kind]
    source = reference(name).path
    path = rewrite(source, tmp_path / "quantized", write, settings)
    plain = rewrite(source, tmp_path / "floats", floats)
    modules = adapted_modules(source, (".experts.",) if dora else ())
    assert_runs_as_merged(path, plain, tmp_path, drive, modules, 0.1 if kind in ROUNDS else 0.01, dora)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K"])
def test_an_adapter_over_a_gguf_file_is_as_merged(kind, dora, reference, drive, tmp_path):
    source = reference("parallel-qwen3").path
    file = write_gguf(source, tmp_path / "model.gguf", kind)
    plain = gguf_floats(source, tmp_path / "floats", file)
    assert_runs_as_merged(file, plain, tmp_path, drive, adapted_modules(source), 0.01, dora)
