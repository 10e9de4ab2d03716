"""Heads of quantized checkpoints draft what the floats that they stand for draft, whichever of them are in floats."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

from kernels.contract.errors import LoadError
from kernels.contract.speculation import SpeculativeSettings
from kernels.speculation.drafters.eagle import EagleDrafter
from kernels.speculation.drafters.mtp import MtpDrafter
from tests.kits.quantized import fp8_rows, rewrite
from tests.kits.quantized_words import dequantized, gptq, packed
from tests.kits.speculation.drafting import HIDDEN, Drafting, make_target, seeded, write
from tests.kits.speculation.layouts import DRAFT, deepseek_shapes, eagle_shapes, mimo_shapes, renamed

GROUP = 16
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
        }
    },
    "ignore": ["lm_head"],
}


def fp8_floats(module, weight):
    held = fp8_rows(module, weight)
    return {f"{module}.weight": held[f"{module}.weight"].float() * held[f"{module}.weight_scale"]}


SCHEMES = {
    "gptq": (gptq(4, GROUP), GPTQ, dequantized(4, GROUP)),
    "packed": (packed(4, GROUP), PACKED, dequantized(4, GROUP, True)),
    "fp8": (fp8_rows, {"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_floats),
}
IN_FLOATS = {
    "nothing": lambda module: False,
    "the projection": lambda module: module.endswith(("input_proj", "eh_proj")),
    "the head": lambda module: "mtp_layers" in module or "layers.6" in module,
}


def only(change, kept):
    return lambda module, weight: {f"{module}.weight": weight} if kept(module) else change(module, weight)


def draft_tokens(target, draft):
    made = Drafting(
        MtpDrafter, target, HIDDEN, algorithm="MTP", draft_model_path=str(draft), num_steps=4, num_draft_tokens=5
    )
    made.observe((0, 21), (1, 3))
    return made.draft(0, 1), made.drafter


@pytest.mark.parametrize("floats", IN_FLOATS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shapes", [mimo_shapes, deepseek_shapes])
def test_heads_draft_what_their_floats_do(shapes, scheme, floats, tmp_path):
    change, settings, stands_for = SCHEMES[scheme]
    (tmp_path / "target").mkdir()
    target, _ = make_target(tmp_path / "target", num_nextn_predict_layers=1)
    head = write(tmp_path / "head", DRAFT | {"num_nextn_predict_layers": 1}, renamed(seeded(shapes(), 25)))
    kept = IN_FLOATS[floats]
    quantized = rewrite(head, tmp_path / "quantized", only(change, kept), settings)
    found, drafter = draft_tokens(target, quantized)
    expected, _ = draft_tokens(target, rewrite(head, tmp_path / "floats", only(stands_for, kept)))
    assert found == expected
    if floats == "nothing":
        assert found != draft_tokens(target, head)[0], "nothing was rounded"
    assert drafter.weight_bytes > 0


@pytest.mark.parametrize("floats", ["nothing", "the head"])
def test_heads_in_the_models_own_checkpoint(floats, drive, tmp_path):
    (tmp_path / "model").mkdir()
    model, own = make_target(tmp_path / "model", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    write(model, json.loads((model / "config.json").read_text()), own | renamed(seeded(mimo_shapes(bias=True), 28)))
    quantized = rewrite(model, tmp_path / "quantized", only(gptq(4, GROUP), IN_FLOATS[floats]), GPTQ)
    dense = rewrite(model, tmp_path / "floats", only(dequantized(4, GROUP), IN_FLOATS[floats]))
    reported = []
    for path in (quantized, dense):
        driver = drive(path, speculation=SpeculativeSettings("MTP", num_steps=3, topk=1, num_draft_tokens=4))
        prompt = list(range(3, 15))
        driver.admit(1, prompt)
        reported.append(driver.generate(1, 40))
        assert driver.info.draft_weight_bytes > 0
    assert reported[0] == reported[1]


def test_a_head_of_which_a_tensor_is_missing_is_refused_by_name(tmp_path):
    (tmp_path / "target").mkdir()
    target, _ = make_target(tmp_path / "target")
    head = write(tmp_path / "head", DRAFT | {"num_nextn_predict_layers": 1}, renamed(seeded(mimo_shapes(), 25)))
    quantized = rewrite(head, tmp_path / "quantized", gptq(4, GROUP), GPTQ)
    tensors = load_file(quantized / "model.safetensors")
    del tensors["model.mtp_layers.0.mlp.up_proj.scales"]
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(LoadError, match=r"model\.mtp_layers\.0\.mlp\.up_proj\.scales is missing"):
        draft_tokens(target, quantized)


REFUSALS = {"gptq": "fc.weight is missing", "fp8": "fc.weight is stored as F8"}


@pytest.mark.parametrize("scheme", REFUSALS)
def test_a_quantized_projection_of_features_is_refused_by_name(scheme, tmp_path):
    (tmp_path / "target").mkdir()
    target, _ = make_target(tmp_path / "target")
    head = write(tmp_path / "head", DRAFT, seeded(eagle_shapes(), 21))
    change, settings, _ = SCHEMES[scheme]
    quantized = rewrite(head, tmp_path / "quantized", change, settings)
    tensors = load_file(quantized / "model.safetensors")
    tensors |= change("fc", tensors.pop("fc.weight").float())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, quantized / "model.safetensors")
    with pytest.raises(LoadError, match=REFUSALS[scheme]):
        Drafting(EagleDrafter, target, HIDDEN, algorithm="EAGLE", draft_model_path=str(quantized))
