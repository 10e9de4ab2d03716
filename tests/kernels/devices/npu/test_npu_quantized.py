"""Quantized models on simulated NPUs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch_npu
from tokenizers import Tokenizer

from app.understudy import MODEL_DIR
from kernels.contract.step import SlotSampling
from kernels.devices.npu_simulator.activate import active
from kernels.devices.npu_simulator.constraints import ConstraintError
from kernels.weights.quantization.int8 import Int8Linear
from kernels.weights.quantization.weights import quantize_int8

PAGE = 128
OPTIONS = {"device": "npu", "page_size": PAGE, "max_step_tokens": 256, "max_total_tokens": 16 * PAGE}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs", [64, 33])
def test_products_of_rounded_tokens(dtype, outputs):
    torch.manual_seed(3)
    weight = quantize_int8(torch.randn(outputs, 96))
    x, bias = torch.randn(7, 96).to(dtype), torch.randn(outputs)
    whole, scales = torch_npu.npu_dynamic_quant(x.npu())
    found = torch_npu.npu_quant_matmul(
        whole, weight.values.t().contiguous().npu(), weight.scales.npu(), pertoken_scale=scales, bias=bias.npu(),
        output_dtype=dtype,
    )  # fmt: skip
    torch.testing.assert_close(found.cpu(), Int8Linear(weight, bias)(x), rtol=1e-2, atol=1e-3)


def test_what_the_device_does_not_take():
    whole, weight = torch.ones(3, 4, 32, dtype=torch.int8).npu(), torch.ones(32, 16, dtype=torch.int8).npu()
    scales, out = torch.ones(16).npu(), torch.bfloat16
    with pytest.raises(ConstraintError, match="flatten the tokens"):
        torch_npu.npu_quant_matmul(whole, weight, scales, output_dtype=out)
    flat = whole.view(12, 32)
    with pytest.raises(ConstraintError, match="one per token"):
        torch_npu.npu_quant_matmul(flat, weight, scales, pertoken_scale=torch.ones(4).npu(), output_dtype=out)
    with pytest.raises(ConstraintError, match="bias: must be int32"):
        torch_npu.npu_quant_matmul(flat, weight, scales, bias=torch.ones(16).npu(), output_dtype=out)
    with pytest.raises(ConstraintError, match="input: must be float16, bfloat16"):
        torch_npu.npu_dynamic_quant(torch.ones(2, 32).npu())


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_the_model_in_the_box_in_whole_numbers(graphs, drive):
    """As near to the CPU's as bfloat16 around products whose sums are exact allows."""
    text = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid."
    prompt = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).encode(text).ids
    simulator = active()
    assert simulator is not None
    cpu = drive(MODEL_DIR, dtype="bfloat16", quantization="int8", page_size=PAGE, threads=1)
    before = simulator.engine.calls.get("npu.npu_quant_matmul.default", 0)
    npu = drive(MODEL_DIR, dtype="bfloat16", quantization="int8", disable_graphs=not graphs, **OPTIONS)
    assert bool(npu.info.graph_rows) == graphs
    assert npu.info.weight_bytes == cpu.info.weight_bytes
    found = []
    for driver in (cpu, npu):
        driver.admit(1, prompt, sampling=SlotSampling(temperature=0.0, prompt_logprobs=0))
        found.append(np.frombuffer(driver.step([(1, len(prompt))]).prompt_logprobs, np.float32))
        driver.generate(1, len(prompt) + 8)
    assert np.abs(found[0] - found[1]).mean() < 0.1
    assert simulator.engine.calls.get("npu.npu_quant_matmul.default", 0) > before
