"""ModelSlim checkpoints on simulated NPUs, by the vendor's operators."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
import torch_npu
from safetensors.torch import load_file, save_file

from app.understudy import MODEL_DIR
from kernels.contract.step import SlotSampling
from kernels.devices.npu_simulator.activate import active
from kernels.devices.npu_simulator.constraints import ConstraintError
from tests.kits.modelslim import calibrate, shifted, write

PAGE = 128
OPTIONS = {"dtype": "bfloat16", "device": "npu", "page_size": PAGE, "max_step_tokens": 256}
SCORED = SlotSampling(temperature=0.0, prompt_logprobs=0)
ROUNDS, SCALES = "npu_quantize", "npu_dynamic_quant"
NORM_ROUNDS, NORM_SCALES = "npu_add_rms_norm_quant", "npu_add_rms_norm_dynamic_quant"
PRODUCT, WEIGHT_ONLY, PACKS = "npu_quant_matmul", "npu_weight_quant_batchmatmul", "npu_convert_weight_to_int4pack"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The included model with floats of 32 bits, its path, a prompt of its own words, and what each layer sees."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tmp_path_factory.mktemp("box") / "model"
    write(MODEL_DIR, path.parent / "floats", lambda module: "FLOAT")[1].rename(path)
    text = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid."
    tokens = AutoTokenizer.from_pretrained(MODEL_DIR)(text)["input_ids"]
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return path, tokens, calibrate(network, tokens)


def scores(driver, prompt):
    driver.admit(1, prompt, sampling=SCORED)
    found = np.frombuffer(driver.step([(1, len(prompt))]).prompt_logprobs, np.float32)
    driver.generate(1, len(prompt) + 4)
    return found


def called(operators):
    return [active().engine.calls.get(f"npu.{name}.default", 0) for name in operators]


@pytest.mark.parametrize(
    ("kind", "group", "operators"),
    [
        ("W8A8", 0, (ROUNDS, PRODUCT, NORM_ROUNDS)),
        ("W8A8_DYNAMIC", 0, (SCALES, PRODUCT, NORM_SCALES)),
        ("W8A16", 0, (WEIGHT_ONLY,)),
        ("W4A16", 32, (WEIGHT_ONLY, PACKS)),
    ],
)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_layers_run_by_the_operators_of_their_kind(kind, group, operators, graphs, model, drive, tmp_path, caplog):
    path, tokens, ranges = model
    checkpoint, floats = write(path, tmp_path, lambda module: kind, ranges, group=group)
    before = called(operators)
    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        driver = drive(checkpoint, disable_graphs=not graphs, **OPTIONS)
    assert bool(driver.info.graph_rows) == graphs
    off = np.abs(scores(driver, tokens) - scores(drive(floats, dtype="float32"), tokens))
    assert off.mean() < 0.35
    assert not [record for record in caplog.records if "dequantized" in record.getMessage()]
    assert all(now > then for now, then in zip(called(operators), before, strict=True))


@pytest.mark.parametrize(
    ("kind", "norm", "alone"), [("W8A8", NORM_ROUNDS, ROUNDS), ("W8A8_DYNAMIC", NORM_SCALES, SCALES)]
)
def test_every_norm_that_adds_rounds_too(kind, norm, alone, model, drive, tmp_path):
    """Alone are rounded what goes into the first projection, and into those of attention's and MLPs' results."""
    if torch_npu.npu.get_soc_version() >= 260:
        pytest.skip("the vendor has them for A2 and A3")
    path, tokens, ranges = model
    driver = drive(write(path, tmp_path, lambda module: kind, ranges)[0], disable_graphs=True, **OPTIONS)
    layers = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    driver.admit(1, tokens)
    before = called((norm, alone))
    driver.step([(1, len(tokens))])
    calls = [now - then for now, then in zip(called((norm, alone)), before, strict=True)]
    assert calls == [2 * layers - 1, 2 * layers + 1]


def test_mxfp8_is_widened_where_the_device_has_no_floats_of_eight_bits(model, drive, tmp_path, caplog):
    """On the host, once and for all layers; on_a5.py has what A5 does."""
    if torch_npu.npu.get_soc_version() >= 260:
        pytest.skip("A5 multiplies it")
    path, tokens, _ = model
    checkpoint, floats = write(path, tmp_path, lambda module: "W8A8_MXFP8")
    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        driver = drive(checkpoint, **OPTIONS)
    reported = [record for record in caplog.records if "Fp8Weight is dequantized" in record.getMessage()]
    assert len(reported) == 1
    np.testing.assert_allclose(scores(driver, tokens), scores(drive(floats, **OPTIONS), tokens), atol=1e-4)
    eighths = torch.ones(4, 64).to(torch.float8_e4m3fn)
    with pytest.raises(ConstraintError, match="8-bit floats cannot be computed with"):
        eighths.npu().float()
    with pytest.raises(ConstraintError, match="only A5 computes with 8-bit floats"):
        torch_npu.npu_quant_matmul(eighths.npu(), eighths.npu().t(), torch.ones(4).npu(), output_dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="the vendor has it for A5 only"):
        torch_npu.npu_dynamic_mx_quant(torch.ones(4, 64).npu(), dst_type=torch_npu.float8_e4m3fn)


def test_weights_may_be_rounded_to_fp8_at_the_start(drive):
    """On the host too: as a device that rounds and widens them itself says it."""
    options = {"quantization": "fp8", "dtype": "bfloat16", "page_size": PAGE}
    tokens = list(range(30, 70))
    on_cpu, found = (scores(drive(MODEL_DIR, **options | more), tokens) for more in ({"threads": 1}, OPTIONS))
    assert np.abs(on_cpu - found).mean() < 0.4


def test_static_layers_of_float16_models_keep_their_biases(model, drive, tmp_path, caplog):
    path, tokens, ranges = model
    tensors = shifted(load_file(path / "model.safetensors"))
    source = tmp_path / "shifted"
    write(path, tmp_path / "plain", lambda module: "FLOAT")[1].rename(source)
    save_file(tensors, source / "model.safetensors")
    ranges = {module: (low - 4.0, high + 4.0) for module, (low, high) in ranges.items()}
    checkpoint, _ = write(source, tmp_path, lambda module: "W8A8", ranges, half=True)
    plain = scores(drive(path, dtype="float32"), tokens)
    for dtype in ("float16", "bfloat16"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "troupe.kernels"):
            found = scores(drive(checkpoint, **OPTIONS | {"dtype": dtype}), tokens)
        assert np.abs(found - plain).mean() < 0.8
        reported = [record for record in caplog.records if "dequantized" in record.getMessage()]
        assert len(reported) == (dtype == "float16")


def test_what_the_operators_do_not_take():
    x, whole = torch.ones(3, 64, dtype=torch.bfloat16).npu(), torch.ones(64, 16, dtype=torch.int8).npu()
    scales = torch.ones(1, 16, dtype=torch.bfloat16).npu()
    product = torch_npu.npu_weight_quant_batchmatmul
    with pytest.raises(ConstraintError, match="antiquant_scale: must be bfloat16"):
        product(x, whole, scales.float())
    with pytest.raises(ConstraintError, match="16 must be divisible by 32"):
        product(x, whole, scales, antiquant_group_size=16)
    with pytest.raises(ConstraintError, match="bias: must be float32"):
        product(x, whole, scales, bias=torch.ones(16, dtype=torch.bfloat16).npu())
    packed = torch_npu.npu_convert_weight_to_int4pack(whole.to(torch.int32))
    assert tuple(packed.shape) == (64, 2)
    with pytest.raises(ConstraintError, match="pass zeros"):
        product(x, packed, scales)
    found = product(x, packed, scales, torch.zeros_like(scales))
    torch.testing.assert_close(found.cpu(), torch.full((3, 16), 64, dtype=torch.bfloat16))
    with pytest.raises(ConstraintError, match="pass False"):
        torch_npu.npu_quantize(x, torch.ones(64).npu(), None, torch.qint8, -1, True)
    with pytest.raises(ConstraintError, match="shape and dtype"):
        torch_npu.npu_quantize(x.float(), torch.ones(64).npu(), torch.zeros(1).npu(), torch.qint8, -1, False)
    with pytest.raises(ConstraintError, match="scales: must be bfloat16"):
        torch_npu.npu_quantize(x, torch.ones(64).npu(), None, torch.qint8, -1, False)
