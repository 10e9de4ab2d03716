"""A GGUF file of a family, written as llama.cpp's converter writes it, computes what the checkpoint computes."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.errors import GgufError
from kernels.models import baichuan, glm_moe_dsa
from kernels.models.config import ConfigReader
from kernels.models.config_loader import read_config
from kernels.models.gguf_description import describe
from kernels.weights.gguf.header import read_header
from kernels.weights.quantization.detect import detect_scheme
from kernels.weights.quantization.gguf_files import GgufScheme
from kernels.weights.quantization.mxfp4 import Mxfp4Weight
from tests.kits.declared import declared, open_gguf
from tests.kits.driver import LLAMA3_ROPE
from tests.kits.gguf_checkpoints import greedy
from tests.kits.gguf_families import write_family
from tests.kits.gguf_writer import llama3_factors, write_gguf

FAMILIES = (
    *("arcee", "cohere", "cohere-normed", "gguf-cohere2", "ernie4.5-moe", "ernie4.5-moe-biased"),
    *("exaone4", "exaone4-full", "exaone-moe", "gemma", "gguf-gemma2", "gguf-gemma3", "gguf-glm", "glm4", "glm4-moe"),
    *(
        "granite",
        "granite-moe",
        "hunyuan-moe",
        "minimax-m2",
        "gguf-minimax-m3",
        "ministral3",
        "olmo",
        "olmo3",
        "olmoe",
        "gguf-phi3-long",
    ),
    *("falcon-h1", "gguf-falcon-h1", "granite-4", "granite-4-dense", "gguf-granite-4-dense", "lfm2", "gguf-lfm2-moe"),
    *("nemotron-3", "gguf-nemotron-dense", "qwen3-next", "gguf-qwen3.5", "gguf-qwen3.5-moe"),
    *("gemma4", "gemma4-equal", "gemma4-moe", "gguf-phimoe", "baichuan"),
    *("apertus", "dbrx", "gguf-minicpm3", "grok", "ling"),
    *("cohere2-moe", "gguf-deepseek-v3.2", "glm5", "gguf-kimi-linear", "mimo-v2-flash", "gguf-mistral4", "step3p5"),
    *("gpt-oss", "gguf-afmoe", "gguf-llama4", "ling-v2"),
    *("seed-oss", "smollm3", "stablelm", "gguf-starcoder2", "xverse"),
)


def test_blocks_of_quantized_value_heads_come_back_in_order(reference, drive, prompts, tmp_path):
    """Blocks of 32 inputs are whole heads of 32 values; blocks of 256 would hold several."""
    model = reference("gguf-qwen3.5-wide")
    file, (prompt,) = write_family(model.path, tmp_path / "model.gguf", "Q8_0"), prompts(20)
    checkpoint, scheme = open_gguf(file), detect_scheme(file, "")
    specs = {name: spec for name, spec in declared(file).items() if "linear_attn" in name and spec.quantizable}
    for name in ("out_proj", "in_proj_qkv", "in_proj_z"):
        spec = specs[f"model.layers.0.linear_attn.{name}.weight"]
        assert scheme.tensors(spec) is not None
        weight = scheme.read(checkpoint, spec).dequantize(torch.float32)
        torch.testing.assert_close(weight, checkpoint.floats(spec.name))
        stored = load_file(model.path / "model.safetensors")[spec.name]
        torch.testing.assert_close(weight, stored, atol=0.02, rtol=0.0)
    assert len(greedy(drive, file, prompt, 24)) == 24
    narrow = dataclasses.replace(specs["model.layers.0.linear_attn.out_proj.weight"])
    order = dataclasses.replace(narrow.gguf.columns, counts=(2, 3, 16), strides=(16, 32, 1))
    narrow = dataclasses.replace(narrow, gguf=dataclasses.replace(narrow.gguf, columns=order))
    assert scheme.tensors(narrow) is None


@pytest.mark.parametrize("stated", [None, 0.0])
@pytest.mark.parametrize("name", ["granite", "granite-moe", "granite-4"])
def test_attention_without_a_multiplier_is_scaled_by_the_heads_size(name, stated, reference, tmp_path):
    """Bamba's files have none."""
    file = write_family(reference(name).path, tmp_path / "model.gguf", attention_multiplier=stated)
    config = read_config(file)
    assert config.attention_scale == config.head_dim**-0.5


def test_norms_of_each_head_of_stablelm_are_refused(reference, tmp_path):
    file = write_family(reference("stablelm").path, tmp_path / "model.gguf")
    header = read_header(file)
    header.tensors["blk.0.attn_q_norm.weight"] = header.tensors["blk.0.attn_norm.weight"]
    with pytest.raises(GgufError, match=r"norms of query and key heads \(attn_q_norm\), which is not read"):
        describe(header)


def test_factors_of_gemma_4_are_told_from_its_own_scales(reference, tmp_path):
    """A matrix with a factor leaves its blocks; Gemma 4's router has a tensor of that name that is none."""
    file = write_family(reference("gemma4-moe").path, tmp_path / "model.gguf", "Q8_0")
    header = read_header(file)
    (spec,) = (spec for name, spec in declared(file).items() if name.endswith("layers.0.self_attn.o_proj.weight"))
    header.tensors[spec.gguf.name] = dataclasses.replace(header.tensors[spec.gguf.name], kind=8)
    assert GgufScheme(header).tensors(spec) is not None
    header.tensors["blk.0.attn_output.scale"] = header.tensors["blk.0.attn_norm.weight"]
    assert GgufScheme(header).tensors(spec) is None


def test_exponents_in_mxfp4_that_are_no_number_are_named(reference, tmp_path):
    file = write_family(reference("gguf-gpt-oss-wide").path, tmp_path / "model.gguf", "MXFP4")
    spec = declared(file)["model.layers.1.mlp.experts.3.down_proj.weight"]
    info, data = read_header(file).tensors[spec.stacked.gguf], bytearray(file.read_bytes())
    rows, columns = spec.shape
    data[info.offset + 3 * rows * columns // 32 * 17 + 17] = 255
    file.write_bytes(data)
    scheme, checkpoint = detect_scheme(file, ""), open_gguf(file)
    scheme.read(checkpoint, declared(file)["model.layers.1.mlp.experts.2.down_proj.weight"])
    with pytest.raises(GgufError, match=r"blk\.1\.ffn_down_exps\.weight has scales that are not finite"):
        scheme.read(checkpoint, spec)


def test_glm_4_7_flash_is_read_as_deepseek(reference, drive, prompts, tmp_path):
    model, (prompt,) = reference("glm4-moe-lite"), prompts(20)
    file = write_gguf(model.path, tmp_path / "model.gguf")
    assert greedy(drive, file, prompt, 50) == model.greedy(prompt, 50)


def test_files_of_minimax_m3_without_an_indexer_have_full_attention(reference, tmp_path):
    header = read_header(write_family(reference("gguf-minimax-m3").path, tmp_path / "model.gguf"))
    assert describe(header)["layer_types"] == ["full_attention", *2 * ["minimax_m3_sparse"]]
    for name in [name for name in header.tensors if ".indexer." in name]:
        del header.tensors[name]
    for key in [key for key in header.metadata if ".indexer." in key]:
        del header.metadata[key]
    assert describe(header)["layer_types"] == 3 * ["full_attention"]
    header.metadata["minimax-m3.expert_gating_func"] = 1
    with pytest.raises(GgufError, match=r"minimax-m3.expert_gating_func must be 2, which is sigmoid"):
        describe(header)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("qwen2", "Qwen2VL"), ("qwen3", "Qwen3VL"), ("native-moe", "Qwen3VLMoe")],
)
def test_language_models_of_qwen_vl_are_read(name, architecture, reference, drive, prompts, tmp_path):
    """Their files say which parts of a head turn by which side of a picture."""
    model, (prompt,) = reference(name), prompts(20)
    shutil.copytree(model.path, tmp_path / "model")
    raw = json.loads((model.path / "config.json").read_text()) | {"architectures": [f"{architecture}ForCausalLM"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
    key = f"{architecture.lower()}.rope.dimension_sections"

    def sections(writer):
        writer.add_array(key, [2, 2, 2, 0])

    file = write_gguf(tmp_path / "model", tmp_path / "model.gguf", tensors=sections)
    assert read_header(file).metadata[key] == [2, 2, 2, 0]
    assert greedy(drive, file, prompt, 50) == model.greedy(prompt, 50)


def test_experts_in_mxfp4_stay_as_they_are(reference, drive, prompts, tmp_path):
    """Numbers of a block are halves apart in the file, and neighbors in memory."""
    model = reference("gguf-gpt-oss-wide")
    file, (prompt,) = write_family(model.path, tmp_path / "model.gguf", "Q8_0"), prompts(20)
    packed = write_family(model.path, tmp_path / "packed.gguf", "MXFP4")
    checkpoint, scheme = open_gguf(packed), detect_scheme(packed, "")
    spec = declared(packed)["model.layers.1.mlp.experts.3.down_proj.weight"]
    weight = scheme.read(checkpoint, spec)
    assert isinstance(weight, Mxfp4Weight)
    assert weight.dequantize(torch.float32).equal(checkpoint.floats(spec.name))
    assert scheme.tensors(declared(packed)["model.layers.1.self_attn.q_proj.weight"]) is None
    whole, small = drive(file, dtype="bfloat16"), drive(packed, dtype="bfloat16")
    assert small.info.weight_bytes < whole.info.weight_bytes
    small.admit(1, prompt)
    assert len(small.generate(1, 30)) == 30


def test_the_quantized_output_of_baichuan_2_is_dequantized(reference, drive, prompts, tmp_path):
    """Its rows have a length of one when they are loaded, which those of the file do not have."""
    model, (prompt,) = reference("baichuan"), prompts(20)
    file = write_family(model.path, tmp_path / "model.gguf", head="Q4_0")
    stored = load_file(model.path / "model.safetensors")
    assert detect_scheme(file, "").tensors(declared(file)["lm_head.weight"]) is not None
    shutil.copytree(model.path, tmp_path / "model")
    rounded = stored | {"lm_head.weight": open_gguf(file).floats("lm_head.weight")}
    assert not rounded["lm_head.weight"].equal(stored["lm_head.weight"])
    save_file(rounded, tmp_path / "model" / "model.safetensors")
    assert greedy(drive, file, prompt, 60) == greedy(drive, tmp_path / "model", prompt, 60)


@pytest.mark.parametrize("layers", [3, 40])
def test_baichuan_of_40_layers_is_read_without_rotation(layers, reference, tmp_path):
    """Files say nothing of it."""
    header = read_header(write_family(reference("baichuan-alibi").path, tmp_path / "model.gguf"))
    header.metadata["baichuan.block_count"] = layers
    for layer in range(layers):
        header.tensors[f"blk.{layer}.attn_norm.weight"] = header.tensors["blk.0.attn_norm.weight"]
    raw = describe(header)
    config = baichuan.config(ConfigReader(raw, raw["architectures"][0]))
    assert config.alibi == (layers == 40)
    assert (config.rope.kind == "none") == config.alibi
    assert config.max_positions == 256


def test_deepseeks_with_growing_queries_are_mistral_4(reference, tmp_path):
    """Files of Mistral Large 3 have DeepSeek's name."""
    header = read_header(write_family(reference("gguf-mistral4").path, tmp_path / "model.gguf"))
    expected = describe(header)
    metadata = {key.replace("mistral4.", "deepseek2."): value for key, value in header.metadata.items()}
    metadata |= {"general.architecture": "deepseek2", "deepseek2.attention.temperature_scale": 0.25}
    header.metadata.clear()
    header.metadata.update(metadata)
    found = describe(header)
    assert found["architectures"] == expected["architectures"] == ["Mistral4ForCausalLM"]
    assert found["rope_parameters"] == expected["rope_parameters"] | {"llama_4_scaling_beta": 0.25}
    assert found["norm_topk_prob"] is expected["norm_topk_prob"] is True


@pytest.mark.parametrize(("length", "own"), [(1 << 20, {0, 1, 2}), ((1 << 20) - 1, {0, 1, 2, 3})])
def test_early_files_of_glm_5_leave_out_which_layers_have_an_indexer(length, own, reference, tmp_path):
    header = read_header(write_family(reference("glm5").path, tmp_path / "model.gguf"))
    del header.metadata["glm-dsa.attention.indexer.types"]
    header.metadata["glm-dsa.context_length"] = length
    raw = describe(header)
    assert glm_moe_dsa.config(ConfigReader(raw, raw["architectures"][0])).latent.index.own == own


@pytest.mark.parametrize(
    ("name", "key", "value", "problem"),
    [
        ("apertus", "xielu.alpha_p", [1.0, 2.0], "a value for each of 3 layers"),
        ("apertus", "xielu.eps", [0.0, "none", 0.0], "a number for each of 3 layers"),
        ("apertus", "xielu.beta", None, r"xielu\.beta must be a number for each of 3 layers, and is missing"),
        ("cohere2-moe", "cohere2moe.attention.sliding_window_pattern", ["a"] * 4, "yes or no for each of 4 layers"),
        ("cohere2-moe", "cohere2moe.expert_gating_func", 3, "1, which is softmax, or 2, which is sigmoid"),
        ("glm5", "glm-dsa.attention.indexer.types", [1, 2, 1, 1, 1, 1], "yes or no for each of"),
        ("step3p5", "step35.swiglu_clamp_exp", "seven", "must be a number, and is 'seven'"),
        ("step3p5", "step35.attention.head_count", [4, 6, 8, 4], "one number for layers with full attention"),
        ("step3p5", "step35.expert_gating_func", 1, "2, which is sigmoid"),
    ],
)
def test_numbers_that_a_family_cannot_have_are_named(name, key, value, problem, reference, tmp_path):
    header = read_header(write_family(reference(name).path, tmp_path / "model.gguf"))
    header.metadata[key] = value
    with pytest.raises(GgufError, match=problem):
        describe(header)


def test_a_limit_of_all_layers_is_each_ones(reference, tmp_path):
    header = read_header(write_family(reference("step3p5").path, tmp_path / "model.gguf"))
    header.metadata["step35.swiglu_clamp_exp"] = 7.0
    layers = header.metadata["step35.block_count"]
    assert describe(header)["swiglu_limits"] == [7.0] * layers


def test_step_3_5_stretches_layers_with_full_attention_alone(reference, tmp_path):
    """Which rotate half a head, and so have half of the file's factors."""
    stretch = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    file = write_family(reference("step3p5").path, tmp_path / "model.gguf", rope_scaling=stretch)
    config = read_config(file)
    expected = llama3_factors(LLAMA3_ROPE | {"rope_theta": 500.0}, 8)
    assert (config.rope.kind, config.rotary_dim) == ("factors", 8)
    assert config.rope.factors == pytest.approx(expected.tolist())
    assert max(config.rope.factors) > 1.0
    assert config.layer(1).rope.kind == "default"


def test_phimoe_has_its_own_factor_behind_phi_3s(reference, drive, prompts, tmp_path):
    """Converters write Phi-3's factor of cosines and sines."""
    model, (prompt,) = reference("gguf-phimoe-long"), prompts(24)
    file = write_family(model.path, tmp_path / "model.gguf")
    assert read_config(file).rope == read_config(model.path).rope
    assert greedy(drive, file, prompt, 60) == greedy(drive, model.path, prompt, 60)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_says_what_its_directory_says(name, reference, drive, prompts, tmp_path):
    """Of Gemma's norms the file holds what they come to."""
    model = reference(name)
    file = write_family(model.path, tmp_path / "model.gguf")
    (prompt,) = prompts(24)
    assert model.continues(prompt, greedy(drive, file, prompt, 40)[24:])
    if "falcon" in name or name == "ling":  # whose weights hold the multipliers, or what the output is normed to
        return
    stored, checkpoint = load_file(model.path / "model.safetensors"), open_gguf(file)
    offset = read_config(model.path).norm_offset
    for tensor in declared(file):
        if tensor in stored:
            added = offset if tensor.endswith("norm.weight") and "linear_attn" not in tensor else 0.0
            torch.testing.assert_close(checkpoint.floats(tensor).reshape(-1), stored[tensor].reshape(-1) + added)
