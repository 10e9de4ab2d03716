"""What compressed-tensors itself writes stands here for what it makes of it again; which of its settings mean what."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.utils import match
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.contract.errors import ConfigError, LoadError
from kernels.contract.step import SlotSampling
from kernels.weights.quantization.compressed import Compressed
from kernels.weights.quantization.microscaling import from_e2m1, from_e2m3
from tests.kits.declared import spec_of
from tests.kits.quantized import rewrite

PROMPT = [7, 19, 101, 33, 54, 2, 90, 61, 17, 44, 5, 12]
SHAPE = (64, 128)
TOKENS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
INT, FLOAT = {"type": "int", "symmetric": True}, {"type": "float", "symmetric": True, "num_bits": 8}
GROUPS = {"strategy": "group", "group_size": 32}
FOURS = INT | GROUPS | {"num_bits": 4}
STATIC = {"strategy": "tensor", "dynamic": False}
MX = {"type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
NV = {"type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16, "num_bits": 4}
NV |= {"scale_dtype": "torch.float8_e4m3fn"}
LAYOUTS = [
    *(
        ("pack-quantized", {"type": "int", "num_bits": bits, "symmetric": symmetric} | strategy, None)
        for bits in (4, 8)
        for symmetric in (True, False)
        for strategy in (GROUPS, {"strategy": "channel"})
    ),
    ("pack-quantized", FOURS | {"actorder": "static"}, None),
    ("pack-quantized", FOURS, INT | TOKENS),
    ("int-quantized", INT | {"num_bits": 8, "strategy": "channel"}, INT | TOKENS),
    ("int-quantized", INT | {"num_bits": 8, "strategy": "tensor"}, INT | TOKENS),
    ("int-quantized", FOURS, INT | TOKENS),
    ("naive-quantized", INT | {"num_bits": 8, "strategy": "channel"}, INT | TOKENS),
    ("float-quantized", FLOAT | {"strategy": "channel"}, FLOAT | TOKENS),
    ("float-quantized", FLOAT | {"strategy": "tensor"}, FLOAT | STATIC),
    ("float-quantized", FLOAT | {"strategy": "block", "block_structure": [32, 32]}, FLOAT | GROUPS | {"dynamic": True}),
    ("mxfp8-quantized", MX | {"num_bits": 8}, None),
    ("mxfp8-quantized", MX | {"num_bits": 8}, MX | {"num_bits": 8, "dynamic": True}),
    ("mxfp6-pack-quantized", MX | {"num_bits": 6}, MX | {"num_bits": 8, "dynamic": True}),
    ("mxfp4-pack-quantized", MX | {"num_bits": 4}, MX | {"num_bits": 4, "dynamic": True}),
    ("nvfp4-pack-quantized", NV, NV | {"dynamic": "local"}),
    ("nvfp4-pack-quantized", NV, None),
]


class Files(dict):
    has = dict.__contains__
    read = dict.__getitem__


def ranges(weights, weight):
    """The least and the largest of what shares a scale."""
    if weights["strategy"] == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if weights["strategy"] == "block":
        rows, columns = weights["block_structure"]
        blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, weights.get("group_size", weight.shape[1])))
    return groups.amin(2), groups.amax(2)


@pytest.mark.parametrize(("form", "weights", "inputs"), LAYOUTS)
def test_what_the_tool_writes_is_read_as_it_reads_it(form, weights, inputs):
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    given = None if inputs is None else QuantizationArgs(**inputs)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=given)
    whole = generate_gparam(weight.min(), weight.max()) if weights["strategy"] == "tensor_group" else None
    scale, zero = calculate_qparams(*ranges(weights, weight), scheme.weights, whole)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    if whole is not None:
        state["weight_global_scale"] = whole
    if inputs is not None and inputs["dynamic"] == "local":
        state["input_global_scale"] = torch.tensor([30.0])
    if inputs is not None and not inputs["dynamic"]:
        state["input_scale"] = torch.tensor([0.02])
    tool = BaseCompressor.get_value_from_registry(form)
    written = tool.compress(state, scheme)
    settings = QuantizationConfig(config_groups={"group_0": scheme}, format=form, quantization_status="compressed")
    read = Compressed(json.loads(settings.model_dump_json()) | {"quant_method": "compressed-tensors"})
    files, expected = (
        Files({f"m.{name}": tensor for name, tensor in written.items()}),
        read.tensors(spec_of("m", SHAPE)),
    )
    assert expected is not None
    assert files.keys() <= expected.keys()
    for name, stored in expected.items():
        assert stored.optional or tuple(files[name].shape) in stored.shapes, name
    found = read.read(files, spec_of("m", SHAPE))
    assert (found.activation is None) == (inputs is None)
    back = tool.decompress(dict(written), scheme)["weight"].float()
    # The tool makes numbers of bf16 of what a scale in e4m3 and another in float32 come to.
    torch.testing.assert_close(found.dequantize(torch.float32), back, rtol=0.01 if whole is not None else 0, atol=0)


@pytest.mark.parametrize(
    ("form", "weights"),
    [
        ("mxfp8-quantized", MX | {"num_bits": 8}),
        ("mxfp6-pack-quantized", MX | {"num_bits": 6}),
        ("mxfp4-pack-quantized", MX | {"num_bits": 4}),
        ("nvfp4-pack-quantized", NV),
    ],
)
def test_a_model_of_experts_in_small_floats(form, weights, reference, drive, tmp_path):
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    tool, source = BaseCompressor.get_value_from_registry(form), reference("parallel-moe").path

    def change(module, weight):
        whole = generate_gparam(weight.min(), weight.max()) if weights is NV else None
        scale, zero = calculate_qparams(*ranges(weights, weight), scheme.weights, whole)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero, "weight_global_scale": whole}
        written = tool.compress({name: tensor for name, tensor in state.items() if tensor is not None}, scheme)
        return {f"{module}.{name}": tensor for name, tensor in written.items()}

    def floats(module, weight):
        written = {name.removeprefix(f"{module}."): tensor for name, tensor in change(module, weight).items()}
        return {f"{module}.weight": tool.decompress(written, scheme)["weight"].float()}

    settings = settings_of(all=(["Linear"], weights)) | {"format": form, "ignore": ["lm_head"]}
    found, expected, plain = (
        scores(drive(path))
        for path in (
            rewrite(source, tmp_path / "small", change, settings),
            rewrite(source, tmp_path / "floats", floats),
            source,
        )
    )
    off = np.abs(found - expected).mean()
    assert off < (0.1 if weights is NV else 1e-3)
    assert off < 0.1 * np.abs(expected - plain).mean()  # it was rounded


def scores(driver):
    driver.admit(1, PROMPT, sampling=SlotSampling(temperature=0.0, prompt_logprobs=0))
    return np.frombuffer(driver.step([(1, len(PROMPT))]).prompt_logprobs, np.float32)


def settings_of(**groups):
    """Checkpoints: targets and weights of each group."""
    described = {name: {"targets": targets, "weights": weights} for name, (targets, weights) in groups.items()}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": described}


EIGHTS = INT | {"num_bits": 8, "strategy": "channel"}


def bits_of(scheme, module):
    """None: floats."""
    expected = scheme.tensors(spec_of(module, SHAPE))
    return None if expected is None else expected[f"{module}.weight_packed"].shapes[0][1] * 32 // SHAPE[1]


def test_a_module_is_meant_by_its_most_particular_target():
    scheme = Compressed(
        settings_of(all=(["Linear"], FOURS), some=(["re:.*mlp.*"], EIGHTS), one=(["model.layers.0.mlp.up_proj"], FOURS))
        | {"ignore": ["re:.*lm_head", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.experts"]}
    )
    assert bits_of(scheme, "model.layers.0.self_attn.q_proj") == 4
    assert bits_of(scheme, "model.layers.0.mlp.down_proj") == 8
    assert bits_of(scheme, "model.layers.0.mlp.up_proj") == 4
    for module in ("lm_head", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.experts.3.up_proj"):
        assert bits_of(scheme, module) is None, module


def test_lists_of_names_are_looked_up(monkeypatch):
    """Tools list thousands of modules one by one: none of these is compared with each module."""
    compared = []
    monkeypatch.setattr(match, "match_name", lambda name, target, fused=None: compared.append(target) or False)
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(8) for expert in range(16)]
    some, left, ignored = names[:60], names[60:100], names[100:]
    scheme = Compressed(settings_of(all=(["Linear"], EIGHTS), some=(some, FOURS)) | {"ignore": ["lm_head", *ignored]})
    assert {bits_of(scheme, module) for module in some} == {4}
    assert {bits_of(scheme, module) for module in left} == {8}
    assert {bits_of(scheme, module) for module in ignored} == {None}
    assert set(compared) <= {"lm_head", "Linear"}


def test_settings_that_are_nested_deep_are_read():
    nested: dict[str, object] = {}
    for _ in range(900):
        nested = {"a": nested}
    scheme = Compressed(settings_of(all=(["Linear"], EIGHTS)) | {"of_another_tool": nested})
    assert bits_of(scheme, "m") == 8


@pytest.mark.parametrize("block", [[10**12, 10**12], [32, 10**20], [10**20, 128]])
def test_a_block_that_is_larger_than_the_weight_takes_no_memory(block):
    scheme = Compressed(
        settings_of(all=(["Linear"], FLOAT | {"strategy": "block", "block_structure": block}))
        | {"format": "float-quantized"}
    )
    ((rows, columns),) = scheme.tensors(spec_of("m", SHAPE))["m.weight_scale"].shapes
    weight, scale = torch.ones(SHAPE).to(torch.float8_e4m3fn), torch.arange(1.0, rows * columns + 1).view(rows, columns)
    found = scheme.read(Files({"m.weight": weight, "m.weight_scale": scale}), spec_of("m", SHAPE)).dequantize(
        torch.float32
    )
    torch.testing.assert_close(found, scale.repeat_interleave(SHAPE[0] // rows, 0).expand(SHAPE))


def test_ascend_s_name_of_experts_comes_before_linear():
    scheme = Compressed(settings_of(all=(["Linear"], EIGHTS), experts=(["MoEGMM"], FOURS)))
    assert bits_of(scheme, "model.layers.0.mlp.experts.5.up_proj") == 4
    assert bits_of(scheme, "model.layers.0.self_attn.o_proj") == 8


def test_a_preset_s_name_may_stand_for_a_group():
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"W4A16": ["Linear"]},
    }
    scheme = Compressed(settings)
    assert scheme.tensors(spec_of("m", (8, 256)))["m.weight_scale"].shapes == ((8, 2),)  # groups of 128
    assert scheme.name == "compressed-tensors int4 group"


def test_a_strategy_that_is_left_out_is_what_the_group_size_says():
    fours = {field: value for field, value in FOURS.items() if field != "strategy"}
    scheme = Compressed(settings_of(all=(["Linear"], fours)))
    assert scheme.tensors(spec_of("m", SHAPE))["m.weight_scale"].shapes == ((64, 4),)
    assert scheme.name == "compressed-tensors int4 group"


@pytest.mark.parametrize("order", ["group", "dynamic", "GROUP", True])
def test_an_order_of_inputs_that_newer_packages_refuse_is_read(order):
    scheme = Compressed(settings_of(all=(["Linear"], FOURS | {"actorder": order})))
    assert not scheme.tensors(spec_of("m", SHAPE))["m.weight_g_idx"].optional


@pytest.mark.parametrize("order", ["weight", "static"])
def test_an_order_that_was_only_of_the_rounding(order):
    scheme = Compressed(settings_of(all=(["Linear"], FOURS | {"actorder": order})))
    assert scheme.tensors(spec_of("m", SHAPE))["m.weight_g_idx"].optional


def test_a_checkpoint_of_scales_for_the_cache_alone_is_in_floats():
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    scheme = Compressed(settings_of() | {"kv_cache_scheme": cache})
    assert scheme.tensors(spec_of("m", SHAPE)) is None
    assert scheme.ignores("model.layers.0.self_attn.k_scale", {})


class Largest(TorchDispatchMode):
    """``bytes``: of the largest tensor that an operator gives."""

    bytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.bytes = max(self.bytes, found.nbytes)
        return found


@pytest.mark.parametrize(("numbers", "bits"), [(from_e2m1, 4), (from_e2m3, 6)])
def test_small_floats_are_widened_in_bytes(numbers, bits):
    packed = torch.arange(SHAPE[0] * SHAPE[1] * bits // 8).remainder_(256).to(torch.uint8).view(SHAPE[0], -1)
    with Largest() as largest:
        found = numbers(packed)
    assert found.shape == SHAPE
    assert largest.bytes == found.nbytes


def test_a_power_of_two_that_is_no_number_is_refused():
    scheme = Compressed(settings_of(all=(["Linear"], MX | {"num_bits": 8})) | {"format": "mxfp8-quantized"})
    weight = torch.zeros(SHAPE).to(torch.float8_e4m3fn)
    files = Files({"m.weight": weight, "m.weight_scale": torch.full((SHAPE[0], 4), 255, dtype=torch.uint8)})
    with pytest.raises(LoadError, match=r"m\.weight_scale contains NaN"):
        scheme.read(files, spec_of("m", SHAPE))


@pytest.mark.parametrize(("whole", "scale"), [(0.0, 1.0), (float("nan"), 1.0), (1.0, float("nan"))])
def test_scales_of_nvfp4_that_are_none_are_refused(whole, scale):
    scheme = Compressed(settings_of(all=(["Linear"], NV)) | {"format": "nvfp4-pack-quantized"})
    files = Files(
        {
            "m.weight_packed": torch.zeros(SHAPE[0], SHAPE[1] // 2, dtype=torch.uint8),
            "m.weight_scale": torch.full((SHAPE[0], SHAPE[1] // 16), scale).to(torch.float8_e4m3fn),
            "m.weight_global_scale": torch.tensor([whole]),
        }
    )
    with pytest.raises(LoadError, match=r"m\.weight_(global_)?scale "):
        scheme.read(files, spec_of("m", SHAPE))


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "compressed_tensors.quantization", None)
    with pytest.raises(ConfigError, match=r"pip install 'troupe-llm\[compressed-tensors\]'"):
        Compressed(settings_of(all=(["Linear"], FOURS)))


def test_an_extra_brings_what_is_tested():
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for name in ("compressed-tensors", "gguf", "otlp"):
        assert set(extras[name]) <= set(extras["test"]), name


def test_a_worker_imports_only_the_package_its_checkpoint_needs(tmp_path):
    """A checkpoint in floats, of gptq and of compressed-tensors, and so a draft; "": draft tokens are made without one.
    Each case is a fork of one process."""
    for method in ("none", "gptq", "compressed-tensors"):
        settings = {} if method == "none" else {"quantization_config": settings_of() | {"quant_method": method}}
        (tmp_path / method).mkdir()
        (tmp_path / method / "config.json").write_text(json.dumps(settings))
    packed, plain = str(tmp_path / "compressed-tensors"), str(tmp_path / "none")
    gptq = str(tmp_path / "gptq")
    cases = [(packed, plain), (plain, packed), (plain, ""), (gptq, gptq), (plain, plain)]
    code = (
        "import json, os, sys, kernels.execution.runner\n"
        "from actors.protocol import WorkerConfig\n"
        "from actors.workers.worker import Worker\n"
        "from kernels.contract.speculation import SpeculativeSettings\n"
        "from kernels.contract.config import RunnerConfig\n"
        "for target, draft in json.loads(sys.argv[1]):\n"
        "    if os.fork():\n"
        "        assert not os.wait()[1]\n"
        "        continue\n"
        "    drafts = SpeculativeSettings('EAGLE3', draft) if draft else SpeculativeSettings('NGRAM')\n"
        "    Worker.prepare(WorkerConfig(RunnerConfig(target, speculation=drafts)))\n"
        "    found = [name for name in ('compressed_tensors', 'transformers') if name in sys.modules]\n"
        "    print(json.dumps(found), flush=True)\n"
        "    os._exit(0)\n"
    )
    command = [sys.executable, "-c", code, json.dumps(cases)]
    reported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for case, line in zip(cases, reported, strict=True):
        assert json.loads(line) == (["compressed_tensors", "transformers"] if packed in case else []), case
