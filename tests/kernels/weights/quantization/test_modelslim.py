"""ModelSlim checkpoints: what every kind of layer stands for, mixed ones, parts of them, and those that are refused."""

from __future__ import annotations

import difflib
import json
import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from app.understudy import MODEL_DIR
from kernels.contract.errors import ConfigError, LoadError
from kernels.contract.step import SlotSampling
from kernels.weights.quantization.detect import detect_scheme
from kernels.weights.quantization.int8 import Int8Linear
from kernels.weights.quantization.modelslim import ModelSlim
from kernels.weights.quantization.weights import GroupedWeight, Int8Weight, StaticActivation
from kernels.weights.tensors import Part
from tests.kits.declared import declared, spec_of
from tests.kits.modelslim import calibrate, shifted, write

PROMPT = [7, 19, 101, 33, 54, 2, 90, 61, 17, 44, 5, 12]
SCORED = SlotSampling(temperature=0.0, prompt_logprobs=0)
NAME = "parallel-llama"  # with biases, and a head of its own
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def scores(driver, prompt=PROMPT):
    driver.admit(1, prompt, sampling=SCORED)
    return np.frombuffer(driver.step([(1, len(prompt))]).prompt_logprobs, np.float32)


@pytest.fixture
def made(reference, tmp_path):
    """Checkpoint and floats of a kind."""
    model = reference(NAME)

    def make(kind, **options):
        choose = kind if callable(kind) else lambda module: kind
        return write(model.path, tmp_path, choose, calibrate(model.model, PROMPT), **options)

    return make


class Tensors:
    """Files of one checkpoint."""

    def __init__(self, directory):
        self.tensors = load_file(directory / "model.safetensors")

    def has(self, name):
        return name in self.tensors

    def read(self, name):
        return self.tensors[name]


def read(directory, module):
    files = Tensors(directory)
    scheme = ModelSlim(json.loads((directory / "quant_model_description.json").read_text()))
    shape = tuple(load_file(directory.parent / "floats" / "model.safetensors")[f"{module}.weight"].shape)
    assert scheme.tensors(spec_of(module, shape))
    return scheme.read(files, spec_of(module, shape))


KINDS = [
    ("W8A8_DYNAMIC", 0, 0.08),
    ("W4A4_DYNAMIC", 0, 0.08),
    ("W4A8_DYNAMIC", 0, 0.08),
    ("W4A8_DYNAMIC", 16, 0.08),
    ("W8A16", 0, 1e-4),
    ("W8A16", 16, 1e-4),
    ("W4A16", 16, 1e-4),
    ("W4A16", 0, 1e-4),
    ("W8A8_MIX", 0, 0.08),
    ("W8A8", 0, 0.3),
]


@pytest.mark.parametrize(("kind", "group", "near"), KINDS)
def test_a_checkpoint_runs_as_the_floats_that_it_stands_for(kind, group, near, made, drive, caplog):
    checkpoint, floats = made(kind, group=group)
    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        driver = drive(checkpoint)
    off = np.abs(scores(driver) - scores(drive(floats)))
    assert off.mean() < near
    reported = {"W8A16": 1, "W4A16": 1, "W4A8_DYNAMIC": 2 if group else 0}.get(kind, 0)
    assert len(caplog.records) == reported  # once, whatever the number of layers


def test_weights_in_eighths_share_a_power_of_two(tmp_path, drive):
    from tests.kits.tiny_model import make_tiny_model

    checkpoint, floats = write(make_tiny_model(tmp_path / "model"), tmp_path, lambda module: "W8A8_MXFP8")
    np.testing.assert_allclose(scores(drive(checkpoint)), scores(drive(floats)), atol=1e-4)


@pytest.mark.parametrize("half", [False, True])
def test_a_static_layer_multiplies_as_the_vendor_says(half, made):
    checkpoint, floats = made("W8A8", half=half)
    tensors = Tensors(checkpoint).tensors
    linear = Int8Linear(read(checkpoint, Q), None)
    x = torch.randn(5, 48)
    whole = (x / tensors[f"{Q}.input_scale"] + tensors[f"{Q}.input_offset"]).round().clamp(-128, 127)
    sums = whole.double() @ tensors[f"{Q}.weight"].double().t() + tensors[f"{Q}.quant_bias"]
    deq = tensors[f"{Q}.deq_scale"]
    deq = deq.to(torch.int32).view(torch.float32) if half else deq
    torch.testing.assert_close(linear(x).double(), sums * deq.double(), rtol=1e-5, atol=1e-5)
    stored = load_file(floats / "model.safetensors")
    exact = torch.nn.functional.linear(x, stored[f"{Q}.weight"], stored[f"{Q}.bias"])
    assert (linear(x) - exact).abs().mean() < 0.05 * exact.abs().mean()  # the offset and the bias are in it


def test_the_sums_of_ranks_hold_offset_and_bias_once(made):
    checkpoint, _ = made("W8A8")
    weight = read(checkpoint, DOWN)
    x = torch.randn(4, 80)
    halves = [Int8Linear(weight.part(part), None)(part.narrow(x)) for part in (Part(1, 0, 40), Part(1, 40, 80))]
    torch.testing.assert_close(halves[0] + halves[1], Int8Linear(weight, None)(x), rtol=1e-4, atol=1e-4)
    outputs = [Int8Linear(weight.part(part), None)(x) for part in (Part(0, 0, 24), Part(0, 24, 48))]
    torch.testing.assert_close(torch.cat(outputs, 1), Int8Linear(weight, None)(x))


@pytest.mark.parametrize(("kind", "group"), [("W8A16", 0), ("W8A16", 8), ("W4A16", 8), ("W4A16", 0)])
def test_parts_of_weights_in_groups(kind, group, made):
    checkpoint, floats = made(kind, group=group)
    weight = read(checkpoint, DOWN)
    exact = load_file(floats / "model.safetensors")[f"{DOWN}.weight"]
    for part in (Part(1, 0, 40), Part(1, 40, 80), Part(0, 24, 48)):
        torch.testing.assert_close(weight.part(part).dequantize(torch.float32), part.narrow(exact))


def test_symmetric_weights_of_eight_bits_need_no_groups(made):
    def centre(description, tensors):
        tensors.update({name: torch.zeros_like(tensor) for name, tensor in tensors.items() if "weight_offset" in name})

    checkpoint, _ = made("W8A16", edit=centre)
    weight = read(checkpoint, Q)
    assert isinstance(weight, Int8Weight)
    assert weight.activation is None


def test_layers_of_many_kinds_in_one_model(made, drive):
    """q is rounded as calibrated, k token by token, v not at all; so fused projections are of three kinds."""
    kinds = {"q_proj": "W8A8", "k_proj": "W8A8_DYNAMIC", "v_proj": "FLOAT", "up_proj": "W8A16", "down_proj": "W4A16"}
    checkpoint, floats = made(lambda module: kinds.get(module.rpartition(".")[2], "FLOAT"), group=16)
    scheme = detect_scheme(checkpoint, "")
    assert scheme.name == "modelslim W4A16, W8A16, W8A8, W8A8_DYNAMIC"
    assert isinstance(read(checkpoint, Q).activation, StaticActivation)
    assert isinstance(read(checkpoint, DOWN), GroupedWeight)
    assert np.abs(scores(drive(checkpoint)) - scores(drive(floats))).mean() < 0.15


@pytest.mark.parametrize("name", ["qwen3", "parallel-llama"])
@pytest.mark.parametrize("kind", ["FLOAT", "W8A16", "W8A8"])
def test_biases_against_outliers_are_applied(kind, name, reference, drive, tmp_path):
    model = reference(name)
    source = tmp_path / "shifted"
    write(model.path, tmp_path / "plain", lambda module: "FLOAT")[1].rename(source)
    tensors = shifted(load_file(source / "model.safetensors"))
    save_file(tensors, source / "model.safetensors")
    ranges = None
    if kind == "W8A8":
        ranges = {module: (low - 4.0, high + 4.0) for module, (low, high) in calibrate(model.model, PROMPT).items()}
    checkpoint, _ = write(source, tmp_path, lambda module: kind, ranges)
    plain = scores(drive(model.path))
    off = np.abs(scores(drive(checkpoint)) - plain)
    assert off.mean() < {"FLOAT": 1e-4, "W8A16": 0.2, "W8A8": 0.8}[kind]


def prefixed(prefix):
    def edit(description, tensors):
        for name in [name for name in description if "." in name]:
            description[prefix(name)] = description.pop(name)

    return edit


@pytest.mark.parametrize(
    "prefix",
    [
        lambda name: f"language_model.{name}",
        lambda name: name.replace("model.", "model.language_model.", 1),
    ],
)
def test_keys_may_have_the_prefixes_of_larger_models(prefix, made, drive):
    checkpoint, floats = made("W8A8_DYNAMIC", edit=prefixed(prefix))
    assert np.abs(scores(drive(checkpoint)) - scores(drive(floats))).mean() < 0.1


def test_scales_of_a_cache_of_keys_alone_are_refused(made, drive):
    def edit(description, tensors):
        tensors["model.layers.0.self_attn.k_proj.kv_cache_scale"] = torch.ones(12)

    path = made("W8A8_DYNAMIC", edit=edit)[0]
    with pytest.raises(LoadError, match=r"model\.layers\.0\.self_attn\.v_proj\.kv_cache_scale"):
        drive(path)


def unknown(description, tensors):
    description[f"{Q}.weight"] = "W4A4_FLATQUANT_DYNAMIC"


def unnamed(description, tensors):
    del description[f"{Q}.weight"]


def unscaled(description, tensors):
    del tensors[f"{Q}.deq_scale"]


def in_floats(description, tensors):
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].float()


def called_float(description, tensors):
    for name in [name for name in description if name.startswith(f"{Q}.")]:
        description[name] = "FLOAT"


def moved(description, tensors):
    tensors[f"{Q}.input_scale"] = torch.zeros(1)


def displaced(description, tensors):
    tensors[f"{Q}.input_offset"] = torch.tensor([0.5])


def broken(description, tensors):
    tensors[f"{Q}.deq_scale"][3] = float("nan")


def grouped(description, tensors):
    description["group_size"] = "many"


@pytest.mark.parametrize(
    ("edit", "error", "says"),
    [
        (unknown, ConfigError, rf"{Q}\.weight is W4A4_FLATQUANT_DYNAMIC, which is not read; .*W8A8_DYNAMIC"),
        (unnamed, ConfigError, rf"{Q}\.weight is not named; the nearest keys are .*q_proj\.weight"),
        (unscaled, LoadError, rf"{Q}\.deq_scale is missing"),
        (in_floats, LoadError, rf"{Q}\.weight is stored as F32, not as one of I8"),
        (called_float, LoadError, rf"{Q}\.weight is stored as I8, not as one of F16"),
        (moved, LoadError, rf"{Q}\.input_scale must be above 0"),
        (displaced, LoadError, rf"{Q}\.input_offset must be a whole number"),
        (broken, LoadError, rf"{Q}\.deq_scale has scales that are not finite"),
        (grouped, ConfigError, "group_size must be a whole number, and is 'many'"),
    ],
)
def test_a_mixed_up_checkpoint_is_refused_by_the_tensors_name(edit, error, says, made, drive):
    with pytest.raises(error, match=says):
        drive(made("W8A8", edit=edit)[0])


def test_rows_that_are_missing_are_no_pairs(made, drive):
    """Bytes of one output each, for half of the outputs."""

    def halved(description, tensors):
        tensors[f"{Q}.weight"] = torch.full_like(tensors[f"{Q}.weight"], -3)

    with pytest.raises(LoadError, match=rf"{Q}\.weight has rows for half of its \d+ outputs"):
        drive(made("W4A8_DYNAMIC", edit=halved)[0])


def test_the_description_of_another_model_is_reported_at_once(made, monkeypatch):
    """Names near to one are looked for among thousands: only for those that the error lists."""
    near, calls = difflib.get_close_matches, []
    monkeypatch.setattr(difflib, "get_close_matches", lambda *args: (calls.append(args[0]), near(*args))[1])

    def edit(description, tensors):
        for name in [name for name in description if name.endswith("_proj.weight")]:
            description[name.replace("model.", "other.")] = description.pop(name)

    checkpoint, _ = made("W8A8_DYNAMIC", edit=edit)
    with pytest.raises(ConfigError, match=r"is it the description of another model.*; and 17 more"):
        detect_scheme(checkpoint, "").adapt(declared(checkpoint))
    assert len(calls) == 4


def test_offsets_of_dynamic_layers_must_be_zeros(made, drive):
    def edit(description, tensors):
        tensors[f"{Q}.weight_offset"] += 1

    with pytest.raises(LoadError, match=rf"{Q}\.weight_offset must be zeros"):
        drive(made("W8A8_DYNAMIC", edit=edit)[0])


def test_groups_that_do_not_fit_are_refused(made, drive):
    def edit(description, tensors):
        description["group_size"] = 32

    with pytest.raises(LoadError, match=r"group_size 32 does not divide the 48 inputs of model\.layers\.0"):
        drive(made("W4A16", group=16, edit=edit)[0])


def test_what_the_flag_asks_for_must_agree(made, drive):
    checkpoint, _ = made("W8A8_DYNAMIC")
    assert detect_scheme(checkpoint, "modelslim") is not None
    with pytest.raises(ConfigError, match="quantized by modelslim, and --quantization asks for int8"):
        detect_scheme(checkpoint, "int8")
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="says by fp8"):
        detect_scheme(checkpoint, "")
    (checkpoint / "quant_model_description_w8a8.json").write_text("{}")
    with pytest.raises(ConfigError, match="keep the one that was written with the weights"):
        detect_scheme(checkpoint, "")


@pytest.mark.parametrize("kind", ["W8A8", "W8A8_DYNAMIC", "W8A16"])
def test_the_model_in_the_box_by_native_operators(kind, drive, tmp_path):
    """In bfloat16, with norms' biases, which no recorded program has: decodes say what prompts do."""
    source = tmp_path / "shifted"
    write(MODEL_DIR, tmp_path / "plain", lambda module: "FLOAT")[1].rename(source)
    save_file(shifted(load_file(source / "model.safetensors")), source / "model.safetensors")
    prompt = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).encode("The capital of France is Paris.").ids
    network = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    ranges = {module: (low - 4.0, high + 4.0) for module, (low, high) in calibrate(network, prompt).items()}
    checkpoint, _ = write(source, tmp_path, lambda module: kind, ranges)
    driver = drive(checkpoint, dtype="bfloat16")
    assert np.abs(scores(driver, prompt) - scores(drive(MODEL_DIR, dtype="float32"), prompt)).mean() < 0.6
    tokens = driver.generate(1, len(prompt) + 8)
    driver.admit(2, tokens, sampling=SCORED)
    found = np.frombuffer(driver.step([(2, len(tokens))]).prompt_logprobs, np.float32)
    assert found[len(prompt) - 1 :].min() > -3.0  # what it said itself is likely to it
