"""A GGUF file computes what the floats it stands for compute, whatever its types, its family and the ranks."""

from __future__ import annotations

import dataclasses
import json
import math

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kernels.contract.adapters import AdapterSettings
from kernels.contract.errors import ConfigError, GgufError
from kernels.models.config_loader import read_config
from kernels.weights.gguf.checkpoint import READ
from kernels.weights.loading import CheckpointFiles, Placement, open_weights
from kernels.weights.quantization.detect import detect_scheme
from kernels.weights.quantization.weights import GroupedWeight
from kernels.weights.tensors import Part, Role
from tests.kits.adapters import adapted_modules, save_adapter
from tests.kits.declared import declared, open_gguf
from tests.kits.gguf_checkpoints import floats, greedy
from tests.kits.gguf_writer import kind_of, write_gguf
from tests.kits.native import compiled, needs_native
from tests.kits.tiny_model import make_tiny_model

__all__ = ["compiled"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose rows hold whole blocks of every type."""
    return make_tiny_model(tmp_path_factory.mktemp("wide"), hidden_size=256, intermediate_size=256)


def stored(file):
    """What the package itself makes of each tensor, float32 [rows, columns]."""
    reader = gguf.GGUFReader(file)
    return {one.name: np.array(gguf.quants.dequantize(one.data, one.tensor_type)) for one in reader.tensors}


@pytest.mark.parametrize("kind", READ)
def test_every_type_is_read(kind, wide, tmp_path):
    """Types that the package does not write are made of any bytes."""
    rows, columns = 256, 256
    generator = np.random.default_rng(len(kind))
    values = generator.standard_normal((rows, columns)).astype(np.float32)
    try:
        data = gguf.quants.quantize(values, kind_of(kind))
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind_of(kind)]
        data = generator.integers(0, 64, (rows, columns // block * size), np.uint8)
    file = write_gguf(wide, tmp_path / "model.gguf", replaced={"blk.0.ffn_up.weight": (data, kind_of(kind))})
    checkpoint = open_gguf(file)
    found = checkpoint.floats("model.layers.0.mlp.up_proj.weight")
    np.testing.assert_array_equal(found.numpy(), gguf.quants.dequantize(data, kind_of(kind)).reshape(rows, columns))
    rows_part, columns_part = torch.empty(64, columns), torch.empty(rows, 64)
    checkpoint.fill("model.layers.0.mlp.up_proj.weight", rows_part, Part(0, 64, 128))
    checkpoint.fill("model.layers.0.mlp.up_proj.weight", columns_part, Part(1, 128, 192))
    assert rows_part.equal(found[64:128])
    assert columns_part.equal(found[:, 128:192])


def test_no_type_of_the_package_is_forgotten():
    known = set()
    for kind in gguf.GGMLQuantizationType:
        try:
            block, size = gguf.GGML_QUANT_SIZES[kind]
            gguf.quants.dequantize(np.zeros((1, 256 // min(block, 256) * size), np.uint8), kind)
            known.add(kind.name)
        except (NotImplementedError, ValueError):
            continue
    assert known == set(READ)


@pytest.mark.parametrize("kind", ["NVFP4", "Q8_0"])
def test_a_matrix_may_have_a_factor_beside_it(kind, reference, wide, drive, tmp_path):
    """As converters of NVFP4 checkpoints write it; of stacked experts each has one."""

    def factors(names):
        def change(writer):
            for name, numbers in names.items():
                writer.add_tensor(name, np.array(numbers, np.float32))

        return change

    given = {"blk.0.ffn_up.scale": [0.37], "blk.0.ffn_up.input_scale": [7.0]}
    block, size = gguf.GGML_QUANT_SIZES[kind_of(kind)]
    data = np.random.default_rng(2).integers(0, 48, (256, 256 // block * size), np.uint8)
    replaced = {"blk.0.ffn_up.weight": (data, kind_of(kind))}
    files = [
        write_gguf(wide, tmp_path / f"{bool(names)}.gguf", replaced=replaced, tensors=factors(names))
        for names in ({}, given)
    ]
    plain, scaled = (open_gguf(file) for file in files)
    name = "model.layers.0.mlp.up_proj.weight"
    assert scaled.floats(name).equal(plain.floats(name) * np.float32(0.37))
    assert (
        detect_scheme(files[1], "").tensors(declared(files[1])["model.layers.0.mlp.up_proj.weight"]) is None
    )  # blocks have no place for it
    assert greedy(drive, files[1], [5, 6, 7]) == greedy(drive, floats(wide, tmp_path / "floats", files[1]), [5, 6, 7])
    given = {"blk.1.ffn_down_exps.scale": [1, 2, 3, 4, 5, 6, 7]}
    file = write_gguf(reference("parallel-moe").path, tmp_path / "experts.gguf", "Q8_0", tensors=factors(given))
    name = "model.layers.1.mlp.experts.{}.down_proj.weight"
    expected = torch.from_numpy(stored(file)["blk.1.ffn_down_exps.weight"])
    for expert in (0, 6):
        assert open_gguf(file).floats(name.format(expert)).equal(expected[expert] * (expert + 1))
    for wrong, says in (
        ([1.0] * 6, r"must be 7 float32, and is of type 0 and shape \[6\]"),
        ([np.nan] * 7, "not finite"),
    ):
        given = {"blk.1.ffn_down_exps.scale": wrong}
        file = write_gguf(reference("parallel-moe").path, tmp_path / "wrong.gguf", "Q8_0", tensors=factors(given))
        with pytest.raises(GgufError, match=rf"blk\.1\.ffn_down_exps\.scale .*{says}"):
            drive(file)


def test_numbers_that_are_not_finite_are_refused_where_types_become_floats(wide, drive, tmp_path):
    """As they are where they stay in blocks."""
    block, size = gguf.GGML_QUANT_SIZES[kind_of("IQ3_S")]
    data = np.zeros((256, 256 // block * size), np.uint8)
    data[77, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    file = write_gguf(wide, tmp_path / "model.gguf", replaced={"blk.1.ffn_up.weight": (data, kind_of("IQ3_S"))})
    with pytest.raises(GgufError, match=r"blk\.1\.ffn_up\.weight has scales that are not finite"):
        drive(file)


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8), ("Q4_0", 4)])
def test_types_that_stay_quantized_stand_for_the_same(kind, bits, wide, tmp_path):
    file = write_gguf(wide, tmp_path / "model.gguf", kind)
    scheme, checkpoint = detect_scheme(file, ""), open_gguf(file)
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"):
        spec = declared(file)[f"{module}.weight"]
        shape, weight = spec.shape, scheme.read(checkpoint, spec)
        assert isinstance(weight, GroupedWeight)
        assert (weight.bits, weight.group, weight.shape) == (bits, 32, shape)
        assert weight.nbytes < 1.1 * bits / 8 * shape[0] * shape[1] + 2 * shape[0] * shape[1] / 32
        assert weight.dequantize(torch.float32).equal(checkpoint.floats(f"{module}.weight"))
    assert detect_scheme(file, "unquant") is None


@pytest.mark.parametrize(("kind", "most"), [("Q8_0", 0.6), ("Q4_0", 0.35)])
def test_a_tied_table_stays_quantized(kind, most, drive, tmp_path):
    model = make_tiny_model(tmp_path / "tiny", tie_word_embeddings=True)
    file = write_gguf(model, tmp_path / "model.gguf", kind)
    table = next(spec for spec in declared(file).values() if spec.role is Role.EMBEDDING)
    scheme = detect_scheme(file, "")
    assert scheme.keeps_table(table)
    read = scheme.read(open_gguf(file), table)
    assert read.nbytes < most * 2 * math.prod(table.shape)


@pytest.mark.parametrize(
    "family",
    [
        *("llama2", "llama3.1", "llama-biased", "llama-linear", "llama-yarn", "mistral-full", "qwen2", "qwen3"),
        *("mixtral", "parallel-moe", "parallel-shared", "deepseek-v2", "deepseek-v2-lite", "parallel-deepseek-v3"),
        "hunyuan",
    ],
)
def test_families_compute_what_their_directories_do(family, reference, drive, prompts, tmp_path):
    model = reference(family)
    file = write_gguf(model.path, tmp_path / "model.gguf")
    (prompt,) = prompts(12)
    assert greedy(drive, file, prompt, 20) == model.greedy(prompt, 20)  # no longer than Mixtral's window
    own, theirs = read_config(file), read_config(model.path)
    for field in (
        "heads",
        "kv_heads",
        "head_dim",
        "layers",
        "vocab_size",
        "tied_embeddings",
        "qkv_bias",
        "max_positions",
        "experts",
    ):
        assert getattr(own, field) == getattr(theirs, field), field


@pytest.mark.parametrize("apart_kv", [False, True])
def test_keys_and_values_of_latent_vectors_may_be_apart(apart_kv, reference, drive, prompts, tmp_path):
    model = reference("deepseek-v2-lite")
    file = write_gguf(model.path, tmp_path / "model.gguf", apart_kv=apart_kv)
    (prompt,) = prompts(12)
    assert read_config(file).latent == dataclasses.replace(read_config(model.path).latent, apart=apart_kv)
    assert greedy(drive, file, prompt, 20) == model.greedy(prompt, 20)


def test_keys_and_values_that_are_apart_take_no_adapters(reference, drive, tmp_path):
    path = reference("deepseek-v2-lite").path
    file = write_gguf(path, tmp_path / "model.gguf", apart_kv=True)
    modules = {module: shape for module, shape in adapted_modules(path).items() if module.endswith("kv_b_proj")}
    driver = drive(file, adapters=AdapterSettings(max_rank=4, max_batch=2, targets=("kv_b_proj",)))
    with pytest.raises(ConfigError, match="kv_b_proj takes no adapters: this file stores keys and values as separate"):
        driver.runner.load_adapter(1, str(save_adapter(tmp_path / "one", modules, 1)))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_quantized_models_compute_what_their_floats_do(kind, wide, drive, tmp_path):
    file = write_gguf(wide, tmp_path / "model.gguf", kind)
    prompt = list(range(5, 17))
    found = greedy(drive, file, prompt)
    assert found == greedy(drive, floats(wide, tmp_path / "floats", file), prompt)
    assert found == greedy(drive, file, prompt, quantization="unquant")


@pytest.mark.parametrize(
    ("family", "kind"), [("mixtral", "F32"), ("parallel-moe", "Q8_0"), ("parallel-shared", "Q5_1")]
)
def test_experts_may_be_tensors_of_their_own(family, kind, reference, drive, tmp_path):
    """As files of early 2024 have them: they say what a file of stacked ones says."""
    path, prompt = reference(family).path, list(range(5, 17))
    files = [write_gguf(path, tmp_path / f"{apart}.gguf", kind, apart=apart) for apart in (False, True)]
    stacked, apart = (open_gguf(file) for file in files)
    assert all(apart.has(name) and stacked.has(name) for name in declared(files[0]))
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    name = name if family == "mixtral" else "model.layers.1.mlp.experts.3.down_proj.weight"
    assert apart.floats(name).equal(stacked.floats(name))
    found, other = (drive(file, dtype="float32") for file in files)
    for driver in (found, other):
        driver.admit(1, prompt)
    assert found.generate(1, 24) == other.generate(1, 24)
    assert found.info.weight_bytes == other.info.weight_bytes


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1"])
def test_experts_stay_quantized(kind, reference, drive, tmp_path):
    """And stand for the floats that the package makes of them, by the names of each one."""
    model = reference("parallel-moe")
    file = write_gguf(model.path, tmp_path / "model.gguf", kind)
    name, foreign = "model.layers.2.mlp.experts.5.up_proj", "blk.2.ffn_up_exps.weight"
    checkpoint, scheme = open_gguf(file), detect_scheme(file, "")
    assert set(declared(file)) == set(load_file(model.path / "model.safetensors"))
    expected = torch.from_numpy(stored(file)[foreign])[5]
    assert checkpoint.floats(f"{name}.weight").equal(expected)
    assert scheme.read(checkpoint, declared(file)[f"{name}.weight"]).dequantize(torch.float32).equal(expected)
    assert not declared(file)["model.layers.2.mlp.gate.weight"].quantizable
    found = greedy(drive, file, list(range(5, 17)))
    assert found == greedy(drive, floats(model.path, tmp_path / "floats", file), list(range(5, 17)))


@needs_native
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1"])
def test_quantized_experts_take_less_memory_than_floats(kind, reference, drive, tmp_path):
    file = write_gguf(reference("parallel-moe").path, tmp_path / "model.gguf", kind)
    kept, made_floats = (drive(file, dtype="bfloat16", quantization=flag).info.weight_bytes for flag in ("", "unquant"))
    assert kept < 0.9 * made_floats  # rows are filled up to 128 inputs


def test_rows_of_queries_and_keys_come_back_in_order(reference, tmp_path):
    model = reference("llama2")
    checkpoint = open_gguf(write_gguf(model.path, tmp_path / "model.gguf"))
    for name, tensor in load_file(model.path / "model.safetensors").items():
        assert checkpoint.floats(name).equal(tensor), name


def test_one_tensor_of_a_file_may_be_wanted_alone(wide, tmp_path):
    """As token maps of drafts want the output's."""
    file = write_gguf(wide, tmp_path / "model.gguf", "Q8_0")
    name = "lm_head.weight"
    alone = {name: declared(file)[name]}
    loader = open_weights(CheckpointFiles(str(file)), alone, Placement(torch.float32, torch.device("cpu")))
    assert loader.take([name]).equal(open_gguf(file).floats(name))


def test_the_numbers_of_floats_follow_the_file(wide, tmp_path):
    for kind, dtype in {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "Q8_0": "bfloat16"}.items():
        assert read_config(write_gguf(wide, tmp_path / f"{kind}.gguf", kind)).dtype == dtype


def test_a_window_that_llama_cpp_ignores_is_ignored(reference, tmp_path):
    def windowed(writer):
        writer.add_uint32("llama.attention.sliding_window", 21)

    file = write_gguf(reference("mixtral").path, tmp_path / "model.gguf", change=windowed)
    assert set(read_config(file).windows) == {0}


def test_sizes_may_be_given_over_the_file(wide, tmp_path):
    file = write_gguf(wide, tmp_path / "model.gguf")
    assert read_config(file, json.dumps({"max_position_embeddings": 77})).max_positions == 77
