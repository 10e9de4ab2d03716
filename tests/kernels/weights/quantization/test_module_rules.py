"""What readers of quantized checkpoints say of one module, without a model."""

from __future__ import annotations

import pytest
import torch

from kernels.contract.errors import ConfigError, LoadError
from kernels.weights.quantization.detect import METHODS
from kernels.weights.quantization.modelslim import ModelSlim
from tests.kits.declared import spec_of

GATE, EXPERT = "model.layers.0.mlp.gate", "model.layers.0.mlp.experts.0.gate_proj"
Q = "model.layers.1.self_attn.q_proj"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16}
GPTQ = {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True}
FP8 = {"quant_method": "fp8"}


class Files(dict):
    has = dict.__contains__
    read = dict.__getitem__


def test_modules_that_awq_skips_are_whole_names():
    scheme = METHODS["awq"](AWQ | {"modules_to_not_convert": ["gate", ".self_attn."]})
    assert scheme.tensors(spec_of(GATE, (8, 32))) is None
    assert scheme.tensors(spec_of(Q, (8, 32))) is None
    assert scheme.tensors(spec_of("lm_head", (8, 32))) is None
    assert set(scheme.tensors(spec_of(EXPERT, (8, 32)))) == {
        f"{EXPERT}.{part}" for part in ("qweight", "qzeros", "scales")
    }


@pytest.mark.parametrize("zeros", [True, False])
def test_zeros_may_be_missing_where_awq_says_that_there_are_none(zeros):
    scheme = METHODS["awq"]({"quant_method": "awq", "w_bit": 4, "q_group_size": 16, "zero_point": zeros})
    assert scheme.tensors(spec_of(Q, (8, 32)))[f"{Q}.qzeros"].optional is not zeros


@pytest.mark.parametrize("field", ["modules_to_not_convert", "ignored_layers"])
def test_modules_that_fp8_skips_are_named_whole_by_their_end_or_by_a_part(field):
    scheme = METHODS["fp8"](FP8 | {field: ["gate", "model.layers.1.self_attn.q_proj", "model.layers.2"]})
    for skipped in (GATE, Q, "model.layers.2.mlp.down_proj", "lm_head"):
        assert scheme.tensors(spec_of(skipped, (8, 32))) is None
    for read in (EXPERT, "model.layers.21.mlp.down_proj", "model.layers.1.self_attn.k_proj"):
        assert set(scheme.tensors(spec_of(read, (8, 32)))) == {f"{read}.weight", f"{read}.weight_scale"}


def test_the_last_block_of_fp8_may_be_a_part():
    scheme = METHODS["fp8"](FP8 | {"weight_block_size": [16, 32]})
    assert scheme.tensors(spec_of(Q, (40, 65)))[f"{Q}.weight_scale_inv"].shapes == ((3, 3),)


def test_blocks_of_fp8_have_no_scales_of_inputs():
    with pytest.raises(ConfigError, match="blocks of weights go with activation_scheme dynamic, not static"):
        METHODS["fp8"](FP8 | {"weight_block_size": [16, 32], "activation_scheme": "static"})


def test_scales_that_nothing_is_made_of_are_passed_over():
    scheme = METHODS["fp8"](FP8)
    for name, ignored in (("k_scale", True), ("v_scale", True), ("input_scale", True), ("bias", False)):
        assert scheme.ignores(f"{Q}.{name}", {}) is ignored


def test_an_order_of_one_group_is_none():
    """GPTQ's act-order with a scale an output: all inputs are in the first group."""
    words = torch.arange(8 * 6, dtype=torch.int32).reshape(8, 6)
    files = Files(
        {
            f"{Q}.qweight": words,
            f"{Q}.qzeros": torch.zeros(1, 2, dtype=torch.int32),
            f"{Q}.scales": torch.ones(1, 8),
            f"{Q}.g_idx": torch.zeros(32, dtype=torch.int32),
        }
    )
    scheme = METHODS["gptq"](GPTQ)
    assert scheme.read(files, spec_of(Q, (6, 32))).order is None
    files[f"{Q}.g_idx"][5] = 1
    with pytest.raises(LoadError, match=rf"{Q}\.g_idx does not put 32 inputs into each group"):
        scheme.read(files, spec_of(Q, (6, 32)))


@pytest.mark.parametrize(("offset", "zero"), [(-127.0, 255), (128.0, 0), (-128.0, None), (129.0, None), (0.5, None)])
def test_offsets_of_modelslim_are_zeros_of_a_byte(offset, zero):
    files = Files(
        {
            f"{Q}.weight": torch.full((4, 32), -3, dtype=torch.int8),
            f"{Q}.weight_scale": torch.ones(4, 1),
            f"{Q}.weight_offset": torch.full((4, 1), offset),
        }
    )
    scheme = ModelSlim({f"{Q}.weight": "W8A16"})
    if zero is None:
        with pytest.raises(LoadError, match=rf"{Q}\.weight_offset must be integers of -127 to 128"):
            scheme.read(files, spec_of(Q, (4, 32)))
    else:
        assert scheme.read(files, spec_of(Q, (4, 32))).zeros.unique().tolist() == [zero]


def test_extra_modelslim_tensors_are_skipped_where_their_kind_allows():
    scheme = ModelSlim({f"{Q}.weight": "W8A8", f"{EXPERT}.weight": "W8A8_MIX", f"{GATE}.weight": "FLOAT"})
    ignored = {
        (module, name)
        for module in (Q, EXPERT, GATE)
        for name in ("bias", "deq_scale", "kv_cache_scale")
        if scheme.ignores(f"{module}.{name}", {})
    }
    scales = {(module, "kv_cache_scale") for module in (Q, EXPERT, GATE)}
    assert ignored == {(Q, "bias"), (EXPERT, "deq_scale")} | scales
