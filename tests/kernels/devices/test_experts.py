"""Layers of experts: who is chosen, what they give, and how such a model is described, divided and run."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.errors import ConfigError, LoadError
from kernels.devices import experts as expert_layers
from kernels.devices.elementwise import Elementwise
from kernels.devices.experts import ExpertInputs, ExpertLayers, ExpertsInTurn, ExpertWeights, Routing, choose
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.linear import LinearLayers
from kernels.models.config import ExpertsConfig
from kernels.models.config_loader import parse_config, read_config
from kernels.models.layers import moe
from kernels.models.registry import tensors
from kernels.weights.loading import stored_shapes
from kernels.weights.quantization.tokens import fake_quantize_tokens
from kernels.weights.quantization.weights import Fp8Weight, StaticActivation, quantize_fp8, quantize_int8
from kernels.weights.safetensors_checkpoint import SafetensorsCheckpoint
from kernels.weights.tensors import Role, table_of
from tests.kernels.distributed.ranks import run_ranks

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
}


def test_top_experts_are_chosen_with_weights_of_a_softmax_over_all():
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]], dtype=torch.bfloat16)
    over_all = logits.float().softmax(-1)[0]
    weights, experts = choose(logits, Routing(2, False))
    assert experts.tolist() == [[1, 2]]
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights[0], over_all[[1, 2]])
    torch.testing.assert_close(choose(logits, Routing(2, True))[0][0], over_all[[1, 2]] / over_all[[1, 2]].sum())


def test_corrections_choose_experts_and_do_not_weight_them():
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    routing = Routing(2, False, "sigmoid", scale=2.0, correction=torch.tensor([0.0, -9.0, 0.0, 9.0]))
    weights, experts = choose(logits, routing)
    assert experts.tolist() == [[3, 2]]
    torch.testing.assert_close(weights, 2.0 * logits[:, [3, 2]].sigmoid())


@pytest.mark.parametrize(("pair_sum", "expected"), [(False, [[3, 2]]), (True, [[0, 1]])])
def test_experts_are_taken_from_the_best_groups(pair_sum, expected):
    """The second group has the best expert, the first the best pair."""
    logits = torch.tensor([[2.0, 1.9, -5.0, 2.1]])
    routing = Routing(2, True, "sigmoid", groups=2, pair_sum=pair_sum)
    assert choose(logits, routing)[1].tolist() == expected


def test_each_expert_that_is_chosen_runs_once_over_its_tokens():
    calls = []

    def expert(number):
        return (lambda x: (calls.append((number, len(x))), x)[1], lambda x: x * (number + 1))

    router = torch.tensor([[9.0, 8.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0], [9.0, 0.0, 0.0, 8.0]])
    layer = ExpertsInTurn(lambda x: router, [expert(number) for number in range(4)], Routing(2, True))
    x = torch.randn(3, 5)
    weights, experts = choose(router, Routing(2, True))
    expected = x * (weights * (experts + 1)).sum(1, keepdim=True)
    torch.testing.assert_close(layer(x), expected)
    counts = experts.flatten().bincount(minlength=4).tolist()
    assert calls == [(number, count) for number, count in enumerate(counts) if count]


def test_inputs_are_prepared_in_blocks(monkeypatch):
    """In the orders of their experts, clipped and rounded: whatever is made on the way is no larger than a block."""
    orders = torch.stack([torch.randperm(8) for _ in range(3)])
    before = ExpertInputs(orders, torch.tensor([[0.5], [0.9], [0.7]]), True)
    rows, owners = torch.randn(21, 8, dtype=torch.bfloat16), torch.randint(3, (21,))
    whole = before(rows, owners)
    sizes = []

    def fake_quantize(x):
        sizes.append(len(x))
        return fake_quantize_tokens(x)

    monkeypatch.setattr(expert_layers, "_BLOCK", 5 * 8 + 1)
    monkeypatch.setattr(expert_layers, "fake_quantize_tokens", fake_quantize)
    assert torch.equal(before(rows, owners), whole)
    assert sizes == [5, 5, 5, 5, 1]
    assert torch.equal(ExpertInputs(orders, None, False)(rows, owners), rows.gather(1, orders[owners]))


class OneKind(ExpertLayers):
    """Takes floats and int8."""

    def __init__(self):
        fallbacks = Fallbacks()
        super().__init__(LinearLayers(Elementwise(torch.device("cpu")), fallbacks), fallbacks)

    def stacked(self, experts):
        return self.stackable(experts, lambda w: None if isinstance(w, Fp8Weight) else (type(w),))


def test_experts_are_dequantized_only_where_all_can_be_stacked():
    weight, bias = torch.randn(8, 8, dtype=torch.bfloat16), torch.zeros(8)
    whole, narrow = quantize_int8(weight), quantize_fp8(weight)
    static = dataclasses.replace(whole, activation=StaticActivation(torch.ones(1)))
    first = ExpertWeights(narrow, None, (narrow, whole), None)
    platform = OneKind()
    for other in (
        ExpertWeights(narrow, bias, narrow, None),
        ExpertWeights(narrow, None, narrow, bias),
        ExpertWeights(whole, None, narrow, None),
        ExpertWeights(narrow, None, (static, static), None),
    ):
        found = platform.stacked([first, other])
        assert [(one.gate_up, one.down) for one in found] == [(one.gate_up, one.down) for one in (first, other)]
    assert platform.linear.dequantized_bytes == 0
    [found, *_] = platform.stacked([first, ExpertWeights(weight, None, narrow, None)])
    assert torch.equal(found.gate_up, narrow.dequantize(torch.bfloat16))
    assert found.down.shape == (16, 8)
    assert platform.linear.dequantized_bytes > 0


def test_which_layers_have_experts():
    assert parse_config(MIXTURE).experts.layers == set(range(6))
    assert parse_config(MIXTURE | {"decoder_sparse_step": 2}).experts.layers == {1, 3, 5}
    assert parse_config(MIXTURE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}).experts.layers == {1, 5}
    assert parse_config(MIXTURE | {"architectures": ["Qwen3ForCausalLM"]}).experts is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_experts": None}, "num_experts must be a whole number"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_experts 8"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers must be a list of layers"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "shared_expert_intermediate_size must be"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        parse_config(MIXTURE | change)


def test_which_layers_of_qwen2_moe_have_windows_and_biases():
    family = MIXTURE | {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 48}
    windows = {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 3}
    assert parse_config(family | windows).windows == (21, 0, 21, 0, 0, 0)  # as transformers has it
    assert parse_config(family).qkv_bias
    assert not parse_config(family | {"qkv_bias": False}).qkv_bias


def test_what_chooses_experts_is_no_projection():
    declared = tensors(parse_config(MIXTURE))
    assert declared["model.layers.0.mlp.gate.weight"].role is Role.ROUTER
    assert not declared["model.layers.0.mlp.gate.weight"].quantizable
    assert sum(spec.quantizable for spec in declared.values()) == 6 * (4 + 3 * 8) + 1


def test_an_expert_that_is_missing_is_named(reference, drive):
    path = reference("parallel-moe").path
    with pytest.raises(LoadError, match=r"model\.layers\.0\.mlp\.experts\.7\.gate_proj\.weight is missing"):
        drive(path, config_overrides=json.dumps({"num_local_experts": 8}))


@pytest.mark.parametrize("name", ["parallel-moe", "parallel-shared"])
def test_experts_may_be_kept_in_one_tensor_a_layer(name, reference, drive, tmp_path, prompts):
    """As transformers has them in memory; two ranks read their parts of them, and they are quantized as others are."""
    model, texts = reference(name), prompts(5, 23)
    model.model.save_pretrained(tmp_path, save_original_format=False)
    held = stored_shapes(tmp_path)
    assert held["model.layers.0.mlp.experts.gate_up_proj"] == (7, 64, 64)
    assert "model.layers.0.mlp.experts.6.up_proj.weight" not in held
    (reported,), _ = run_ranks([{"model": str(tmp_path), "prompts": texts, "length": 40}])
    assert reported["tokens"] == [model.greedy(text, 40) for text in texts]
    weights = [drive(path, quantization="int8").info.weight_bytes for path in (tmp_path, model.path)]
    assert weights[0] == weights[1]


def test_mixtrals_experts_may_be_kept_so_too(reference, drive, tmp_path):
    """Whose checkpoints call the block and its projections otherwise."""
    model, prompt = reference("mixtral"), list(range(3, 12))
    model.model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in stored_shapes(tmp_path)
    driver = drive(tmp_path)
    driver.admit(1, prompt)
    assert driver.generate(1, 20) == model.greedy(prompt, 20)
    with pytest.raises(LoadError, match=r"block_sparse_moe\.experts\.5\.w1\.weight is missing"):
        drive(tmp_path, config_overrides=json.dumps({"num_local_experts": 6}))


def test_one_tensor_of_too_few_experts_is_reported_by_name(reference, drive, tmp_path):
    reference("parallel-moe").model.save_pretrained(tmp_path, save_original_format=False)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.experts.down_proj"
    tensors[name] = tensors[name][:6].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"layers\.2\.mlp\.experts\.6\.down_proj\.weight is missing"):
        drive(tmp_path)


@pytest.mark.parametrize("shape", [(4097, 2, 1), (9, 2, 0), (9, 0, 2), (0, 2, 2)])
def test_a_header_makes_no_more_experts_than_models_have(shape, tmp_path):
    """A tensor without elements may have any number of them, in a file of a few bytes."""
    name = "model.layers.0.mlp.experts.down_proj"
    save_file({name: torch.empty(shape, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert stored_shapes(tmp_path) == {name: shape}
    expected = table_of(moe.tensors(ExpertsConfig(frozenset((0,)), 9, 2, 2, True), 2, "model.layers.0", "blk.0"))
    with pytest.raises(
        LoadError, match=rf"config.json: {re.escape(name)} has shape {re.escape(str(list(shape)))}, which"
    ):
        SafetensorsCheckpoint(tmp_path, expected).check()


@pytest.mark.parametrize("name", ["parallel-moe", "parallel-shared"])
def test_half_precision_stays_close(name, reference, drive, prompts):
    model = reference(name)
    driver = drive(model.path, dtype="bfloat16")
    (prompt,) = prompts(40)
    driver.admit(1, prompt)
    assert not driver.step([(1, len(prompt))]).failed
    tokens = driver.generate(1, 60)
    wide = model.logprobs(tokens)
    chosen = wide[torch.arange(39, 59), tokens[40:]]
    assert (wide[39:59].amax(-1) - chosen).mean() < 0.5  # what it says is likely to the model in float32


def test_two_ranks_generate_what_one_generates(reference, drive, prompts):
    model, texts = reference("parallel-moe"), prompts(5, 23, 40)
    (reported,), (also,) = run_ranks([{"model": str(model.path), "prompts": texts, "length": 60}])
    assert reported["tokens"] == also["tokens"] == [model.greedy(text, 60) for text in texts]
    alone = drive(model.path).info
    assert reported["parameters"] == alone.parameters == model.model.num_parameters()
    assert alone.weight_bytes / 2 < reported["weight_bytes"] < 0.6 * alone.weight_bytes


def test_ranks_that_do_not_divide_an_expert_are_refused(reference, drive):
    override = json.dumps({"shared_expert_intermediate_size": 33})
    with pytest.raises(ConfigError, match=r"shared_expert_intermediate_size 33 .* this model takes 1"):
        drive(reference("parallel-shared").path, tp_size=2, rendezvous="127.0.0.1:1", config_overrides=override)
    override = json.dumps({"moe_intermediate_size": 33})
    with pytest.raises(ConfigError, match=r"moe_intermediate_size 33 .* --tensor-parallel-size 2; this model takes 1"):
        drive(reference("parallel-moe").path, tp_size=2, rendezvous="127.0.0.1:1", config_overrides=override)


def test_weights_may_be_made_up(reference, drive):
    driver = drive(reference("parallel-moe").path, load_format="dummy")
    driver.admit(1, [3, 5, 7])
    assert len(driver.generate(1, 9)) == 9
    assert read_config(reference("parallel-moe").path).experts.count == 7
