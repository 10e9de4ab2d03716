"""Two ranks that run one GGUF file say what one says, whether a rank's inputs are whole blocks or not."""

from __future__ import annotations

import pytest
import torch

from kernels.contract.errors import GgufError
from kernels.weights.loading import CheckpointFiles, Placement, open_weights
from kernels.weights.quantization.detect import detect_scheme
from kernels.weights.tensors import Shard
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.declared import declared, open_gguf
from tests.kits.gguf_blocks import KIND, weight_of
from tests.kits.gguf_writer import kind_of, write_gguf
from tests.kits.tiny_model import make_tiny_model

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


def k_types(model, file, inner):
    """Every projection of layer 0 in blocks of 256 but the one whose inputs are divided, which has blocks of 32."""
    names = {"attn_q": (256, 256), "attn_output": (256, 256), "ffn_up": (inner, 256), "ffn_gate": (inner, 256)}
    replaced = {}
    for seed, (part, (rows, columns)) in enumerate(names.items()):
        data = weight_of("Q4_K", rows, columns, seed).pieces[0].data.flatten(1).numpy()
        replaced[f"blk.0.{part}.weight"] = (data, kind_of("Q4_K"))
    data = weight_of("Q5_0", 256, inner, 9).pieces[0].data.flatten(1).numpy()
    replaced["blk.0.ffn_down.weight"] = (data, kind_of("Q5_0"))
    return write_gguf(model, file, "Q8_0", replaced=replaced)


@pytest.mark.long
def test_two_ranks_generate_what_one_generates(drive, tmp_path):
    model = make_tiny_model(tmp_path / "model", intermediate_size=512, **SIZES)
    files = [write_gguf(model, tmp_path / "whole.gguf", "Q8_0"), k_types(model, tmp_path / "k.gguf", 512)]
    files.append(write_gguf(model, tmp_path / "joined.gguf", "Q8_0", joined=True))
    prompts = [list(range(5, 17)), list(range(40, 63))]
    jobs = [{"model": str(file), "prompts": prompts, "length": 24} for file in files]
    first, second = run_ranks(jobs)
    for file, reported, also in zip(files, first, second, strict=True):
        alone = drive(file)
        for slot, text in enumerate(prompts, start=1):
            alone.admit(slot, text)
            alone.generate(slot, 24)
        assert reported["tokens"] == also["tokens"] == [alone.tokens[slot] for slot in sorted(alone.tokens)]
        assert alone.info.weight_bytes / 2 < reported["weight_bytes"] < 0.7 * alone.info.weight_bytes


@pytest.mark.parametrize("name", KIND)
def test_scales_that_are_not_finite_are_refused_by_name(name, drive, tmp_path):
    model = make_tiny_model(tmp_path / "model", intermediate_size=256, **SIZES)
    for at in KIND[name].halves[-1:]:
        data = weight_of(name, 256, 256).pieces[0].data.clone()
        data[17, 0, at : at + 2] = torch.tensor([float("nan")], dtype=torch.float16).view(torch.uint8)
        replaced = {"blk.1.ffn_up.weight": (data.flatten(1).numpy(), kind_of(name))}
        file = write_gguf(model, tmp_path / "model.gguf", replaced=replaced)
        with pytest.raises(GgufError, match=r"blk\.1\.ffn_up\.weight has scales that are not finite"):
            drive(file)


def test_inputs_that_cut_a_block_become_floats(tmp_path, caplog):
    model = make_tiny_model(tmp_path / "model", intermediate_size=256, **SIZES)
    file = k_types(model, tmp_path / "model.gguf", 256)
    module = "model.layers.0.self_attn.o_proj"
    placement = Placement(torch.bfloat16, torch.device("cpu"), Shard(1, 2))
    weights = open_weights(CheckpointFiles(str(file)), declared(file), placement, detect_scheme(file, ""))
    found = weights.projection([module])
    whole = open_gguf(file).floats(f"{module}.weight")
    assert found.equal(whole[:, 128:].bfloat16())
    assert weights.weight_bytes == found.nbytes
    assert "cut a block of 256 of Q4_K" in caplog.text
