"""Tensors of a GGUF file that are several in one say what they say apart."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

from kernels.contract.errors import GgufError
from kernels.models.config_loader import read_config
from kernels.weights.gguf.blocks import KINDS
from kernels.weights.gguf.header import read_header
from kernels.weights.quantization.detect import detect_scheme
from tests.kits.declared import declared, open_gguf, shapes_of
from tests.kits.gguf_checkpoints import floats, greedy
from tests.kits.gguf_writer import kind_of, write_gguf
from tests.kits.tiny_model import make_tiny_model

PROMPT = list(range(5, 17))


def blocks(kind, rows, columns, seed):
    """Any codes, and scales that make small numbers of them."""
    generator, chosen = np.random.default_rng(seed), next(one for one in KINDS.values() if one.name == kind)
    data = generator.integers(0, 256, (rows, columns // chosen.block, chosen.size), np.uint8)
    for at in chosen.halves:
        halves = (generator.standard_normal((*data.shape[:2], 1)) * 0.0003).astype(np.float16)
        data[:, :, at : at + 2] = halves.view(np.uint8)
    return data.reshape(rows, -1)


def names(file):
    return set(read_header(file).tensors)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "mixed"])
def test_blocks_are_cut_between_their_rows(kind, drive, tmp_path):
    """Where types differ, as mixes of the K types have them, they are apart in the file."""
    source = make_tiny_model(tmp_path / "wide", hidden_size=256, intermediate_size=512, head_dim=64)
    replaced = {}
    if kind != "Q8_0":
        rows = {"attn_q": 256, "attn_k": 128, "attn_v": 128, "ffn_gate": 512, "ffn_up": 512}
        for layer in range(2):
            for seed, (part, count) in enumerate(rows.items()):
                one = "Q6_K" if kind == "Q6_K" or (kind == "mixed" and part == "attn_v") else "Q4_K"
                replaced[f"blk.{layer}.{part}.weight"] = (blocks(one, count, 256, 9 * layer + seed), kind_of(one))
    apart, joined = (
        write_gguf(source, tmp_path / f"{both}.gguf", "Q8_0", replaced=replaced, joined=both) for both in (False, True)
    )
    assert ("blk.0.attn_qkv.weight" in names(joined)) == (kind != "mixed")
    assert "blk.0.ffn_gate.weight" not in names(joined)
    first, second = (open_gguf(file) for file in (apart, joined))
    schemes = [detect_scheme(file, "") for file in (apart, joined)]
    assert shapes_of(apart) == shapes_of(joined)
    for name, spec in declared(apart).items():
        assert second.floats(name).equal(first.floats(name)), name
        stored = [scheme.tensors(spec) if spec.quantizable else None for scheme in schemes]
        assert stored[0] == stored[1]
        if stored[0] is not None:
            assert second.read(name).equal(first.read(name)), name
    found = greedy(drive, joined, PROMPT)
    assert found == greedy(drive, apart, PROMPT)
    assert found == greedy(drive, floats(source, tmp_path / "floats", apart), PROMPT)
    kept = [drive(file, dtype="bfloat16").info.weight_bytes for file in (apart, joined)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    "family", ["llama-biased", "llama2", "qwen2", "qwen3", "parallel-moe", "parallel-shared", "mixtral"]
)
def test_families_compute_what_their_directories_do(family, reference, drive, prompts, tmp_path):
    """Rows of llama's queries and keys come back in order; biases, and experts with a stride, are cut too."""
    model = reference(family)
    file = write_gguf(model.path, tmp_path / "model.gguf", joined=True)
    assert "blk.0.attn_qkv.weight" in names(file)
    assert ("blk.0.ffn_gate_up_exps.weight" in names(file)) == (
        family in ("parallel-moe", "parallel-shared", "mixtral")
    )
    assert ("blk.0.attn_qkv.bias" in names(file)) == (family in ("llama-biased", "qwen2", "parallel-shared"))
    (prompt,) = prompts(12)
    assert greedy(drive, file, prompt, 20) == model.greedy(prompt, 20)
    stored = load_file(model.path / "model.safetensors")
    checkpoint = open_gguf(file)
    for name, tensor in stored.items():
        if not (name == "lm_head.weight" and "output.weight" not in names(file)):
            assert checkpoint.floats(name).equal(tensor), name


def test_experts_of_joined_tensors_stay_quantized(reference, drive, tmp_path):
    model = reference("parallel-moe")
    apart, joined = (write_gguf(model.path, tmp_path / f"{both}.gguf", "Q8_0", joined=both) for both in (False, True))
    assert "blk.2.ffn_gate_up_exps.weight" in names(joined)
    first, second = (open_gguf(file) for file in (apart, joined))
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.2.mlp.experts.6.{part}.weight"
        assert second.read(name).equal(first.read(name))
    assert greedy(drive, joined, PROMPT) == greedy(drive, apart, PROMPT)


def test_an_end_that_is_missing_is_reported(reference, drive, tmp_path):
    """With experts in one tensor, the second part of the last one is the end of the tensor."""
    file = write_gguf(reference("parallel-moe").path, tmp_path / "model.gguf", "Q8_0", joined=True)
    last = list(read_header(file).tensors)[-1]
    assert last.endswith(".ffn_gate_up_exps.weight")
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(GgufError, match=rf"{last.replace('gate_up', 'up')} ends at byte"):
        drive(file)


def test_a_factor_counts_for_every_part(drive, tmp_path):
    def factor(writer):
        writer.add_tensor("blk.0.attn_qkv.scale", np.array([0.5], np.float32))
        writer.add_tensor("blk.0.attn_qkv.input_scale", np.array([7.0], np.float32))

    source = make_tiny_model(tmp_path / "model")
    plain, scaled = (
        write_gguf(source, tmp_path / f"{more is None}.gguf", "Q8_0", joined=True, tensors=more)
        for more in (None, factor)
    )
    first, second = (open_gguf(file) for file in (plain, scaled))
    for part in "qkv":
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        assert second.floats(name).equal(first.floats(name) * 0.5)
        assert detect_scheme(scaled, "").tensors(declared(scaled)[name]) is None
    drive(scaled)


@pytest.mark.parametrize("family", ["phi3", "phi3-full"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_phi3(family, kind, reference, drive, prompts, tmp_path):
    """Whose own layers are joined; a window of the file counts."""
    model = reference(family)
    file = write_gguf(model.path, tmp_path / "model.gguf", kind)
    assert {"blk.0.attn_qkv.weight", "blk.0.ffn_up.weight"} < names(file)
    assert not any("ffn_gate" in name or "attn_q." in name for name in names(file))
    assert read_config(file).windows == ((9,) * 3 if family == "phi3" else (0,) * 3)
    (prompt,) = prompts(24)
    if kind == "F32":
        assert greedy(drive, file, prompt, 40) == model.greedy(prompt, 40)
    else:
        assert len(greedy(drive, file, prompt, 40)) == 40


def test_what_phi3_has_that_is_not_read_is_reported(reference, tmp_path):
    def longer(writer):
        writer.add_tensor("rope_factors_long.weight", np.ones(4, np.float32))

    file = write_gguf(reference("phi3").path, tmp_path / "long.gguf", tensors=longer)
    with pytest.raises(GgufError, match=r"no tensor rope_factors_short\.weight"):
        read_config(file)


def test_the_package_knows_the_names():
    assert gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.FFN_GATE_UP_EXP] == "blk.{bid}.ffn_gate_up_exps"
    assert gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ATTN_QKV] == "blk.{bid}.attn_qkv"
