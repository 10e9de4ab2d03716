"""Files that are no whole model of a known kind say what is wrong with them, before anything is allocated."""

from __future__ import annotations

import contextlib
import random
import struct
import sys

import gguf
import numpy as np
import pytest

from kernels.contract.errors import ConfigError, GgufError, LoadError
from kernels.models.config_loader import parse_config, read_config
from kernels.models.gguf_description import describe
from kernels.models.registry import tensors
from kernels.weights.gguf.checkpoint import GgufCheckpoint
from kernels.weights.gguf.header import read_header
from tests.kits.gguf_families import write_family
from tests.kits.gguf_writer import write_gguf
from tests.kits.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return write_gguf(make_tiny_model(directory / "model"), directory / "model.gguf").read_bytes()


@pytest.fixture
def broken(tmp_path):
    def write(data: bytes):
        (tmp_path / "broken.gguf").write_bytes(data)
        return tmp_path / "broken.gguf"

    return write


def load(file):
    """Everything but the weights."""
    header = read_header(file)
    GgufCheckpoint(header, tensors(read_config(file))).check()


def entry(data: bytes, name: str) -> int:
    """Where a tensor's count of dimensions is."""
    return data.rindex(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


def changed(data: bytes, name: str, *, kind: int | None = None, offset: int | None = None, rows: int | None = None):
    at = entry(data, name)
    (dimensions,) = struct.unpack_from("<I", data, at)
    edited = bytearray(data)
    if rows is not None:
        struct.pack_into("<Q", edited, at + 4 + 8 * (dimensions - 1), rows)
    if kind is not None:
        struct.pack_into("<I", edited, at + 4 + 8 * dimensions, kind)
    if offset is not None:
        struct.pack_into("<Q", edited, at + 8 + 8 * dimensions, offset)
    return bytes(edited)


def test_the_whole_file_is_fine(whole, broken):
    load(broken(whole))


@pytest.mark.parametrize("part", [0.0001, 0.001, 0.01, 0.05, 0.5, 0.99])
def test_a_file_cut_short_is_reported(part, whole, broken):
    file = broken(whole[: max(5, int(len(whole) * part))])
    with pytest.raises(GgufError, match=r"broken\.gguf.*(download|whole)"):
        load(file)


def test_no_byte_of_a_head_is_believed(whole, broken):
    """Any byte may be any other: a file is read or refused, and never crashes or takes the memory."""
    seeded = random.Random(3)
    for _ in range(150):
        edited = bytearray(whole)
        for _ in range(3):
            edited[seeded.randrange(4, 9000)] = seeded.choice((0, 1, 7, 127, 128, 255))
        with contextlib.suppress(ConfigError):
            load(broken(bytes(edited)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": 4242}, r"blk\.1\.ffn_up\.weight is of type 4242, which is none that is read: F32, F16"),
        ({"kind": 9}, r"blk\.1\.ffn_up\.weight is of type 9"),
        ({"offset": 64}, r"blk\.1\.ffn_up\.weight begins at byte \d+, and not at \d+, where the one before it ends"),
        ({"offset": 1 << 60}, r"blk\.1\.ffn_up\.weight ends at byte \d+, and the file at \d+"),
        ({"rows": 1 << 61}, r"blk\.1\.ffn_up\.weight has shape \[\d+, 32\], the metadata asks for \[64, 32\]"),
        ({"kind": 12}, r"rows of 32, no multiple of Q4_K's blocks of 256"),
    ],
)
def test_a_wrong_tensor_is_named(change, says, whole, broken):
    with pytest.raises(GgufError, match=says):
        load(broken(changed(whole, "blk.1.ffn_up.weight", **change)))


def test_a_missing_and_a_foreign_tensor_are_named(whole, broken):
    renamed = whole.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xp.weight")
    with pytest.raises(
        GgufError, match=r"blk\.1\.ffn_up\.weight is missing; blk\.1\.ffn_xp\.weight is in the file and"
    ):
        load(broken(renamed))


def test_a_tensor_beside_the_layers_that_no_model_has_is_named(tiny_model, tmp_path):
    def file(*names):
        def add(writer):
            for name in names:
                writer.add_tensor(name, np.zeros(8, np.float32))

        return write_gguf(tiny_model, tmp_path / "broken.gguf", tensors=add)

    load(file("v.patch_embd.weight", "mm.0.weight"))
    with pytest.raises(GgufError, match=r"output_norm\.bias is in the file and not in the model"):
        load(file("output_norm.bias"))


def test_a_factor_of_zero_stretches_no_positions(tiny_model, tmp_path):
    file = write_gguf(
        tiny_model,
        tmp_path / "model.gguf",
        change=lambda writer: writer.add_float32("qwen3.rope.scaling.factor", 0.0),
    )
    assert parse_config(describe(read_header(file))).rope.kind == "default"


def test_joined_tensors_that_do_not_fit_are_named(whole, broken, tmp_path):
    renamed = whole.replace(b"blk.1.ffn_gate.weight", b"blk.1.attn_qkv.weight")
    with pytest.raises(GgufError, match=r"blk\.1\.attn_qkv\.weight, of shape \[64, 32\], is none of attn_q and attn_k"):
        load(broken(renamed))
    joined = write_gguf(make_tiny_model(tmp_path / "joined"), tmp_path / "joined.gguf", joined=True).read_bytes()
    load(broken(joined))
    for rows, says in (
        (66, r"attn_k\.weight has shape \[17, 32\], the metadata asks for \[16, 32\]"),
        (65, "is none of"),
    ):
        with pytest.raises(GgufError, match=says):
            load(broken(changed(joined, "blk.1.attn_qkv.weight", rows=rows)))
    with pytest.raises(GgufError, match=r"blk\.1\.ffn_gate\.weight is missing; blk\.1\.ffn_up\.weight has shape \[127"):
        load(broken(changed(joined, "blk.1.ffn_up.weight", rows=127)))


def test_counts_are_held_against_the_file(whole, broken):
    for at in (8, 16):
        edited = bytearray(whole)
        struct.pack_into("<Q", edited, at, 1 << 62)
        with pytest.raises(GgufError, match="cut short or damaged"):
            load(broken(bytes(edited)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda writer: writer.add_uint16("split.count", 3), "join them with llama-gguf-split --merge"),
        (
            lambda writer: writer.add_uint32("qwen3.expert_count", 8),
            r"of experts of qwen3 \(qwen3.expert_count\); those that are read",
        ),
        (lambda writer: writer.add_string("qwen3.rope.scaling.type", "longrope"), "'longrope' is not supported"),
        (lambda writer: writer.add_uint32("qwen3.block_count", 1 << 31), "the last of qwen3.block_count 2147483648"),
        (lambda writer: writer.add_uint32("qwen3.rope.dimension_count", 999), r"at most the \d+ numbers of a head"),
        (lambda writer: writer.add_string("qwen3.context_length", "long"), "must be a whole number of at least 1"),
        (lambda writer: writer.add_uint64("qwen3.context_length", 1 << 40), "must be at most 2147483648"),
        (lambda writer: writer.add_float32("qwen3.rope.freq_base", -1.0), r"qwen3.rope.freq_base must be above 0"),
        (
            lambda writer: writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 0.0),
            r"qwen3.attention.layer_norm_rms_epsilon must be above 0",
        ),
        (lambda writer: writer.add_bool("qwen3.attention.causal", False), r"later tokens \(attention.causal\)"),
    ],
)
def test_what_is_not_read_is_reported(change, says, tmp_path, tiny_model):
    file = write_gguf(tiny_model, tmp_path / "broken.gguf", change=change)
    with pytest.raises(GgufError, match=says):
        load(file)


def changed_experts(number):
    return lambda writer: writer.add_uint32("qwen3moe.expert_count", number)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (changed_experts(1 << 31), "expert_count must be at most 4096"),
        (changed_experts(0), "expert_count must be a whole number of at least 1"),
        (changed_experts(8), r"ffn_gate_exps.weight has shape \[7, 32, 64\], the metadata asks for \[8, 32, 64\]"),
        (changed_experts(2), "than num_experts 2; num_experts_per_tok is qwen3moe.expert_used_count in the file"),
        (
            lambda writer: writer.add_uint32("qwen3moe.expert_shared_count", 1),
            r"expert that all tokens take \(qwen3moe",
        ),
    ],
)
def test_experts_that_are_not_those_that_are_described_are_reported(change, says, tmp_path, reference):
    file = write_gguf(reference("parallel-moe").path, tmp_path / "broken.gguf", change=change)
    with pytest.raises(ConfigError, match=says):
        load(file)


def test_no_more_layers_are_counted_than_there_are_tensors(tmp_path, tiny_model):
    count = 100_000_000

    def change(writer):
        writer.add_uint32("qwen3.block_count", count)

    file = write_gguf(tiny_model, tmp_path / "broken.gguf", change=change)
    names = [f"blk.{layer}.attn_norm.weight".encode() for layer in (1, count - 1)]
    old, new = (struct.pack("<Q", len(name)) + name for name in names)
    file.write_bytes(file.read_bytes().replace(old, new))
    with pytest.raises(GgufError, match=f"the last of qwen3.block_count {count}"):
        describe(read_header(file))


@pytest.mark.parametrize("count", [100_000_000, 1 << 63])
@pytest.mark.parametrize("name", ["gguf-gemma2", "gguf-qwen3.5", "gguf-llama4"])
def test_no_family_counts_up_to_layers_that_are_not_there(name, count, reference, tmp_path):
    header = read_header(write_family(reference(name).path, tmp_path / "broken.gguf"))
    family = header.metadata["general.architecture"]
    for key in ("recurrent_layers", "sliding_window_pattern"):
        header.metadata.pop(f"{family}.attention.{key}", None)
    header.metadata[f"{family}.block_count"] = count
    if family == "llama4":
        header.metadata["llama4.attention.sliding_window"] = 0
    with pytest.raises(GgufError, match=rf"{family}\.block_count"):
        describe(header)


def test_more_layers_than_models_have_are_reported_by_their_key(tmp_path, tiny_model):
    header = read_header(write_gguf(tiny_model, tmp_path / "broken.gguf"))
    header.metadata["qwen3.block_count"] = 5000
    norm = header.tensors["blk.0.attn_norm.weight"]
    header.tensors.update({f"blk.{layer}.attn_norm.weight": norm for layer in range(5000)})
    with pytest.raises(GgufError, match=r"qwen3\.block_count must be at most 4096, and is '5000'"):
        describe(header)


def test_no_more_experts_are_named_than_models_have(tmp_path, reference):
    file = write_gguf(reference("parallel-moe").path, tmp_path / "broken.gguf")
    header = read_header(file)
    header.metadata.update({"qwen3moe.block_count": 257, "qwen3moe.expert_count": 4096})
    norm = header.tensors["blk.0.attn_norm.weight"]
    header.tensors.update({f"blk.{layer}.attn_norm.weight": norm for layer in range(257)})
    with pytest.raises(
        GgufError, match=r"qwen3moe.expert_count must be at most 4080 in each of 257 layers, and is '4096'"
    ):
        describe(header)


def test_unknown_architectures_are_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "broken.gguf", "mamba")
    writer.add_tensor("x", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        GgufError,
        match=r"architecture .mamba. .*; those that are read from GGUF are afmoe, .*, deepseek2, .*, llama, ",
    ):
        load(tmp_path / "broken.gguf")


def test_other_files_and_versions_are_reported(whole, broken):
    with pytest.raises(GgufError, match="is not a GGUF file"):
        load(broken(b"PK\3\4" + whole[4:]))
    with pytest.raises(GgufError, match="GGUF version 99; versions 2 and 3 are read"):
        load(broken(whole[:4] + struct.pack("<I", 99) + whole[8:]))
    with pytest.raises(GgufError, match="the other byte order"):
        load(broken(whole[:4] + struct.pack(">I", 3) + whole[8:]))


def test_load_formats_insist(whole, broken, drive, tiny_model):
    file = broken(whole)
    for wrong in ("safetensors", "dummy"):
        with pytest.raises(LoadError, match="is a GGUF file"):
            drive(file, load_format=wrong)
    with pytest.raises(LoadError, match=r"is for one \.gguf file"):
        drive(tiny_model, load_format="gguf")
    with pytest.raises(ConfigError, match="is a GGUF file, and --quantization asks for awq"):
        drive(file, quantization="awq")
    with pytest.raises(ConfigError, match="--quantization gguf is for a checkpoint that was quantized so"):
        drive(tiny_model, quantization="gguf")
    drive(file, load_format="gguf", quantization="gguf")
    drive(file, quantization="int8")


def test_without_the_package_the_extra_is_named(whole, broken, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(GgufError, match=r"pip install 'troupe-llm\[gguf\]'"):
        load(broken(whole))
