"""What only A5 has; test_npu_a5.py runs it in a process whose simulated NPUs are of that generation."""

from __future__ import annotations

import dataclasses
import json
import logging

import numpy as np
import pytest
import torch
import torch_npu

from app.understudy import MODEL_DIR
from kernels.contract.config import RunnerConfig
from kernels.contract.step import SlotSampling
from kernels.core.tree import chain
from kernels.devices.elementwise import BiasedNorm
from kernels.devices.experts import ExpertsInTurn, ExpertWeights, Routing
from kernels.devices.linear import NormThenLinear
from kernels.devices.npu.device import NpuDevice
from kernels.devices.npu.experts import NpuExperts
from kernels.devices.npu.microscaling import NpuMxLinear, mx_fits, mx_scales, round_mx
from kernels.devices.npu.norm_quant import NpuGated, NpuNormThenLinear
from kernels.devices.npu.operators import NpuNorm, swiglu
from kernels.devices.npu.soc import Soc
from kernels.devices.npu_simulator.activate import active
from kernels.devices.npu_simulator.constraints import ConstraintError
from kernels.speculation.verify import walk, walk_here
from kernels.weights.quantization.weights import Fp8Weight, quantize_fp8
from kernels.weights.tensors import Part
from tests.kits.modelslim import write
from tests.kits.tiny_model import make_tiny_model

BF16, E4M3, E8M0 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu
A5 = Soc("A5", "Ascend950PR_9599")
PAGE = 128
OPTIONS = {"dtype": "bfloat16", "device": "npu", "page_size": PAGE, "max_step_tokens": 256}
NORM_ROUNDS = "npu_add_rms_norm_dynamic_mx_quant"
ROUNDS, PRODUCT, EXPERTS = "npu_dynamic_mx_quant", "npu_quant_matmul", "npu_grouped_matmul"
SAID = {"scale_dtype": torch_npu.float8_e8m0fnu, "pertoken_scale_dtype": torch_npu.float8_e8m0fnu}
GROUPED = {"split_item": 2, "group_type": 0, "group_list_type": 1, "output_dtype": BF16}


def rounded(x):
    """``x`` as the OCP's specification rounds it, a block of 32 at a time, in floats and as e4m3 with exponents."""
    wide = x.float()
    values, exponents = torch.zeros_like(wide), torch.zeros(len(x), x.shape[1] // 32)
    for row in range(len(x)):
        for block in range(x.shape[1] // 32):
            here = slice(32 * block, 32 * block + 32)
            most = float(wide[row, here].abs().max())
            exponents[row, block] = np.floor(np.log2(most)) - 8 if most else -127.0
            values[row, here] = wide[row, here] / 2.0 ** float(exponents[row, block])
    eighths = values.clamp(-448, 448).to(E4M3)
    return eighths, exponents, eighths.float() * torch.exp2(exponents).repeat_interleave(32, 1)


def mx(outputs, inputs, seed, dtype=BF16):
    """A weight of MXFP8, and the floats it stands for."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) / inputs**0.5
    values, exponents, floats = rounded(weight)
    scales = (exponents + 127).to(torch.uint8).view(E8M0)
    return Fp8Weight(values, scales, (1, 32), dtype=dtype), floats


def tokens(count, inputs, dtype=BF16):
    """Values whose sizes differ from block to block, with a block of zeros."""
    generator = torch.Generator().manual_seed(count)
    sizes = torch.exp2(torch.randint(-9, 9, (count, inputs // 32), generator=generator)).repeat_interleave(32, 1)
    x = torch.randn(count, inputs, generator=generator) * sizes
    x[0, :32] = 0
    return x.to(dtype)


def called(operators):
    return [active().engine.calls.get(f"npu.{name}.default", 0) for name in operators]


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_tokens_are_rounded_in_blocks_that_share_a_power_of_two(dtype):
    x = tokens(7, 192, dtype)
    eighths, exponents, _ = rounded(x)
    found, scales = (tensor.cpu() for tensor in round_mx(x.npu()))
    assert scales.shape == (7, 3, 2)
    np.testing.assert_array_equal(scales.flatten(1), exponents + 127)
    np.testing.assert_array_equal(found.float(), eighths.float())
    nonfinite = x.clone()
    nonfinite[2, 40] = torch.inf
    assert round_mx(nonfinite.npu())[1].cpu()[2].flatten().tolist()[1] == 255  # what is no number stays none


def test_rows_of_other_lengths_have_pairs_of_scales_too():
    x = tokens(3, 96)
    found, scales = (tensor.cpu() for tensor in round_mx(x.npu()))
    assert (found.shape, scales.shape) == ((3, 96), (3, 2, 2))
    np.testing.assert_array_equal(scales.flatten(1)[:, :3], rounded(x)[1] + 127)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_what_tokens_and_weights_stand_for(dtype, bias):
    weight, floats = mx(33, 192, 5, dtype)
    x, added = tokens(7, 192, dtype) / 512, torch.arange(33).to(dtype) / 16 if bias else None
    assert mx_fits(weight, A5)
    before = called((ROUNDS, PRODUCT))
    found = NpuMxLinear(weight.to(torch.device("npu")), None if added is None else added.npu())(x.npu()).cpu()
    assert all(now == then + 1 for now, then in zip(called((ROUNDS, PRODUCT)), before, strict=True))
    sums = rounded(x)[2].double() @ floats.double().t()
    expected = sums.to(dtype) if added is None else sums.to(dtype) + added
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
    assert found.dtype == dtype


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("count", [1, 9])
def test_grouped_products_are_those_of_experts_one_by_one(normalized, count):
    """Gates of one kind and down projections of another work, too."""
    device = torch.device("npu")
    router = torch.randn(6, 128, generator=torch.Generator().manual_seed(9)).to(BF16)
    both = [(mx(128, 128, 2 * expert)[0], mx(128, 64, 2 * expert + 1)[0]) for expert in range(6)]
    given = [ExpertWeights(first.to(device), None, second.to(device), None) for first, second in both]
    x = torch.randn(count, 128, generator=torch.Generator().manual_seed(count)).to(BF16)
    onto = router.npu()
    before = called((ROUNDS, EXPERTS))
    found = NpuExperts(lambda x: x @ onto.t(), given, Routing(2, normalized), A5)(x.npu()).cpu()
    assert all(now == then + 2 for now, then in zip(called((ROUNDS, EXPERTS)), before, strict=True))

    def plain(weight):
        floats = weight.dequantize(torch.float32)
        return lambda x: (rounded(x)[2] @ floats.t()).to(BF16)

    def gated(weight):
        def run(x):
            gate, up = plain(weight)(x).float().chunk(2, -1)
            return (torch.nn.functional.silu(gate) * up).to(x.dtype)

        return run

    linears = [(gated(first), plain(second)) for first, second in both]
    expected = ExpertsInTurn(lambda x: x @ router.t(), linears, Routing(2, normalized))(x)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=5e-2)


@pytest.mark.parametrize("biased", [False, True])
def test_the_norm_before_a_product_rounds_its_tokens(biased):
    """As one after the other do, but for the rounding of the norm to 16 bits between them."""
    device = torch.device("npu")
    weight, gamma = mx(32, 128, 4)[0].to(device), (1 + tokens(1, 128)[0] / 512).npu()
    norm = NpuNorm(gamma, 1e-6)
    if biased:
        norm = BiasedNorm(NpuDevice(RunnerConfig(model_path="")).elementwise, norm, (tokens(2, 128)[1] / 256).npu())
    linear = NpuGated(NpuMxLinear(weight, None), swiglu)
    assert NpuNormThenLinear.fits(norm, linear, A5)
    assert not NpuNormThenLinear.fits(norm, lambda x: x, A5)
    both = tokens(6, 128).npu(), (tokens(6, 128) / 3).npu()
    before = called((NORM_ROUNDS, ROUNDS))
    found, total = NpuNormThenLinear(norm, linear).add(*both)
    assert [now - then for now, then in zip(called((NORM_ROUNDS, ROUNDS)), before, strict=True)] == [1, 0]
    expected, theirs = NormThenLinear(norm, linear).add(*both)
    assert total.cpu().equal(theirs.cpu())
    off = found.cpu().float() - expected.cpu().float()
    assert off.norm() < 0.05 * expected.cpu().float().norm()
    with pytest.raises(ConstraintError, match="dst_type: 296 is not simulated"):
        torch_npu.npu_add_rms_norm_dynamic_mx_quant(*both, gamma)
    with pytest.raises(NotImplementedError, match="the vendor has it for A2 and A3 only"):
        torch_npu.npu_add_rms_norm_dynamic_quant(*both, gamma)


def test_which_weights_the_device_multiplies_itself():
    weight, _ = mx(32, 128, 1)
    assert mx_fits(weight, A5)
    assert not mx_fits(weight, Soc("A3", "Ascend910_9391"))
    assert not mx_fits(mx(32, 96, 1)[0], A5)  # scales come in pairs
    assert not mx_fits(dataclasses.replace(weight, dtype=torch.float32), A5)
    assert not mx_fits(dataclasses.replace(weight, scales=weight.scales.float()), A5)
    assert not mx_fits(dataclasses.replace(weight, activation=None), A5)
    assert not mx_fits(dataclasses.replace(weight, block=(1, 64)), A5)
    rows = dataclasses.replace(weight, values=weight.values[:1].expand(65536, -1))  # of a vocabulary, say
    assert not mx_fits(rows, A5)
    assert mx_fits(dataclasses.replace(rows, values=rows.values[1:]), A5)
    assert not mx_fits(quantize_fp8(torch.randn(32, 128)), A5)
    assert NpuExperts.kind(weight, A5) is not None
    assert NpuExperts.kind(weight, Soc("A2", "Ascend910B3")) is None


def test_what_the_operators_do_not_take():
    weight = mx(16, 128, 3)[0].to(torch.device("npu"))
    values, scales = weight.values.t(), mx_scales(weight).transpose(0, 1)
    x, powers = round_mx(tokens(4, 128).npu())
    right = SAID | {"pertoken_scale": powers, "group_sizes": [1, 1, 32], "output_dtype": BF16}

    def multiply(x=x, values=values, scales=scales, **other):
        return torch_npu.npu_quant_matmul(x, values, scales, **right | other)

    assert multiply().shape == (4, 16)
    assert multiply(values=values.contiguous(), scales=scales.contiguous()).cpu().equal(multiply().cpu())
    with pytest.raises(ConstraintError, match="must both be transposed views"):
        multiply(scales=scales.contiguous())
    with pytest.raises(ConstraintError, match=r"scale: must be \[2, 16, 2\]"):
        multiply(scales=scales.flatten(0, 1))
    with pytest.raises(ConstraintError, match=r"pertoken_scale: must be \[4, 2, 2\]"):
        multiply(pertoken_scale=powers.flatten(1))
    with pytest.raises(ConstraintError, match="scale: must be uint8, float8_e8m0fnu"):
        multiply(scales=scales.float())
    with pytest.raises(ConstraintError, match=r"scale_dtype: must be torch_npu\.float8_e8m0fnu"):
        multiply(scale_dtype=None)
    with pytest.raises(ConstraintError, match=r"group_sizes: must be \[1, 1, 32\]"):
        multiply(group_sizes=None)
    with pytest.raises(ConstraintError, match="bias: with e4m3"):
        multiply(bias=torch.ones(16).npu())
    with pytest.raises(ConstraintError, match="weight: must be float8_e4m3fn"):
        multiply(values=values.view(torch.uint8))
    odd, pairs = round_mx(tokens(4, 96).npu())
    with pytest.raises(ConstraintError, match="inputs that 64 divides, has 96"):
        multiply(x=odd, values=values[:96], pertoken_scale=pairs)
    with pytest.raises(ConstraintError, match="dst_type: 296 is not simulated: 292"):
        torch_npu.npu_dynamic_mx_quant(tokens(4, 64).npu())
    with pytest.raises(ConstraintError, match="input: must be float16"):
        torch_npu.npu_dynamic_mx_quant(torch.ones(4, 64, dtype=torch.int8).npu(), dst_type=torch_npu.float8_e4m3fn)


def test_what_grouped_products_do_not_take():
    weights = [mx(16, 128, seed)[0].to(torch.device("npu")) for seed in range(3)]
    values = torch.stack([weight.values.view(torch.uint8) for weight in weights]).view(E4M3).transpose(1, 2)
    scales = torch.stack([mx_scales(weight) for weight in weights]).transpose(1, 2)
    x, powers = round_mx(tokens(4, 128).npu())
    right = GROUPED | {"scale": [scales], "per_token_scale": [powers], "group_list": torch.tensor([1, 0, 3]).npu()}
    right |= dict.fromkeys(("scale_dtype", "per_token_scale_dtype"), torch_npu.float8_e8m0fnu)
    assert torch_npu.npu_grouped_matmul([x], [values], **right)[0].shape == (4, 16)
    for change, says in (
        ({"scale": [scales.contiguous()]}, "must both be transposed views"),
        ({"scale": [scales[:2]]}, r"scale: must be \[3, 2, 16, 2\]"),
        ({"per_token_scale": [powers.flatten(1)]}, r"per_token_scale: must be \[4, 2, 2\]"),
        ({"per_token_scale": None}, r"per_token_scale: must be \[4, 2, 2\]"),
        ({"per_token_scale_dtype": None}, "per_token_scale_dtype: must be torch_npu.float8_e8m0fnu"),
        ({"output_dtype": None}, "output_dtype: must be float16 or bfloat16"),
    ):
        with pytest.raises(ConstraintError, match=says):
            torch_npu.npu_grouped_matmul([x], [values], **right | change)


def test_floats_of_eight_bits_are_moved_and_not_computed_in():
    x = torch.ones(4, 32).to(E4M3).npu()
    assert x.clone().t().contiguous().cpu().float().sum() == 128
    for wrong in (lambda: x.float(), lambda: torch.ones(4, 32).npu().to(E4M3), lambda: torch.cat([x, x])):
        with pytest.raises(ConstraintError, match="8-bit floats cannot be computed with"):
            wrong()


def scores(driver, prompt):
    driver.admit(1, prompt, sampling=SlotSampling(temperature=0.0, prompt_logprobs=0))
    found = np.frombuffer(driver.step([(1, len(prompt))]).prompt_logprobs, np.float32)
    driver.generate(1, len(prompt) + 8)
    return found


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_the_model_in_the_box_in_mxfp8(graphs, drive, tmp_path, caplog):
    """As near to the floats its weights stand for as the rounding of tokens allows."""
    from transformers import AutoTokenizer

    checkpoint, floats = write(MODEL_DIR, tmp_path, lambda module: "W8A8_MXFP8")
    text = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid."
    prompt = AutoTokenizer.from_pretrained(MODEL_DIR)(text)["input_ids"]
    kinds = (ROUNDS, PRODUCT, NORM_ROUNDS)
    before = called(kinds)
    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        driver = drive(checkpoint, disable_graphs=not graphs, **OPTIONS)
    assert bool(driver.info.graph_rows) == graphs
    off = np.abs(scores(driver, prompt) - scores(drive(floats, dtype="float32"), prompt))
    assert off.mean() < 0.25
    assert not [record for record in caplog.records if "dequantized" in record.getMessage()]
    assert all(now > then for now, then in zip(called(kinds), before, strict=True))
    if not graphs:  # every norm that adds rounds too; the first one does not
        layers = json.loads((MODEL_DIR / "config.json").read_text())["num_hidden_layers"]
        driver.admit(2, prompt)
        before = called(kinds)
        driver.step([(2, len(prompt))])
        calls = [now - then for now, then in zip(called(kinds), before, strict=True)]
        assert calls == [2 * layers + 1, 4 * layers, 2 * layers - 1]
    bytes_of = drive(MODEL_DIR, disable_graphs=True, **OPTIONS).info.weight_bytes
    assert driver.info.weight_bytes < 0.75 * bytes_of


def test_experts_in_mxfp8(drive, prompts, tmp_path, caplog):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    sizes |= {"hidden_size": 64, "num_attention_heads": 8, "architectures": ["Qwen3MoeForCausalLM"]}
    source = make_tiny_model(tmp_path / "model", **sizes)
    checkpoint, floats = write(source, tmp_path, lambda module: "W8A8_MXFP8")
    (prompt,) = prompts(40)
    before = called((EXPERTS,))
    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        driver = drive(checkpoint, **OPTIONS)
    assert driver.info.graph_rows
    assert np.corrcoef(scores(driver, prompt), scores(drive(floats), prompt))[0, 1] > 0.95  # of random weights
    assert called((EXPERTS,))[0] > before[0]
    assert not [record for record in caplog.records if "dequantized" in record.getMessage()]


def test_inputs_of_half_a_pair_are_widened_on_the_host(drive, prompts, tmp_path, caplog):
    """For the device has no cast that is sure to work. They are the floats they stand for, to the bit."""
    source = make_tiny_model(tmp_path / "model", hidden_size=96, num_attention_heads=12)
    checkpoint, floats = write(source, tmp_path, lambda module: "W8A8_MXFP8" if "down" not in module else "FLOAT")
    (prompt,) = prompts(40)
    before = called((PRODUCT,))
    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        driver = drive(checkpoint, **OPTIONS)
    reported = [record.getMessage() for record in caplog.records if "Fp8Weight is dequantized" in record.getMessage()]
    assert len(reported) == 1
    np.testing.assert_allclose(scores(driver, prompt), scores(drive(floats, **OPTIONS), prompt), atol=1e-4)
    assert called((PRODUCT,)) == before


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_weights_of_ranks_and_joined_ones_are_the_same_numbers(device):
    one, other = (mx(32, 128, seed)[0].to(torch.device(device)) for seed in (1, 2))
    whole = one.join([other])
    assert whole is not None
    expected = torch.cat([weight.to(torch.device("cpu")).dequantize(BF16) for weight in (one, other)])
    assert whole.to(torch.device("cpu")).dequantize(BF16).equal(expected)
    half = whole.part(Part(1, 64, 128))
    assert mx_fits(half, A5)
    assert half.to(torch.device("cpu")).dequantize(BF16).equal(expected[:, 64:])


def test_chains_are_walked_without_a_cumulative_product():
    """Which the vendor has for A2 and A3 alone."""
    generator = torch.Generator().manual_seed(3)
    tokens, sampled = (torch.randint(3, (7, 5), generator=generator) for _ in range(2))
    nodes = torch.tensor([5, 4, 3, 2, 1, 5, 5])
    tokens[5, 1:] = sampled[5, :-1]
    found = walk(chain(tokens.npu()), nodes.npu(), sampled.npu(), 4)
    expected = walk_here(chain(tokens), nodes.numpy(), sampled, 4)
    for name in ("path", "counts", "tokens"):
        assert getattr(found, name).cpu().equal(getattr(expected, name))
    with pytest.raises(ConstraintError, match="no such kernel for A5"):
        tokens.npu().cumprod(1)
