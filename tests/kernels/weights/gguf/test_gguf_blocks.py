"""The blocks of GGUF files: what is opened is what the package makes of them, and native products keep them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kernels.devices.cpu.capture import CpuCapture
from kernels.devices.cpu.quantized import CpuBlocksLinear
from kernels.weights.quantization.detect import detect_scheme
from kernels.weights.quantization.gguf_weight import GgufWeight
from kernels.weights.quantization.weights import PartError
from kernels.weights.tensors import Part
from tests.kits.declared import declared, open_gguf
from tests.kits.gguf_blocks import KIND, weight_of
from tests.kits.gguf_writer import kind_of, write_gguf
from tests.kits.native import compiled, needs_native, platform
from tests.kits.rounded_once import assert_only_rounded_once, assert_weights_rounded_once
from tests.kits.tiny_model import make_tiny_model

__all__ = ["compiled", "platform"]


@pytest.mark.parametrize("name", KIND)
def test_blocks_are_opened_as_the_package_does(name):
    weight = weight_of(name, 5, 512)
    kind, found = KIND[name], KIND[name].open(weight.pieces[0].data)
    assert (kind.block, kind.size) == gguf.GGML_QUANT_SIZES[kind_of(name)]
    assert found.codes.shape == (5, 512 // kind.block, kind.block)
    assert (found.zeros is not None) == kind.zeros
    groups = kind.block // kind.group
    scales, zeros = (found.scales.float()[:, :, None], torch.zeros(5, 512 // kind.block, groups))
    if found.whole is not None:
        scales = scales * found.whole
    if found.zeros is not None:
        zeros = zeros + found.zeros.float()[:, :, None] * (1 if found.whole_zeros is None else found.whole_zeros)
    values = torch.tensor(kind.values, dtype=torch.float32)[found.codes.long()].unflatten(-1, (groups, kind.group))
    floats = (values * scales[..., None] - zeros[..., None]).view(5, 512)
    expected = gguf.quants.dequantize(weight.pieces[0].data.flatten(1).numpy(), kind_of(name))
    np.testing.assert_array_equal(floats.numpy(), expected)
    assert weight.dequantize(torch.float32).equal(torch.from_numpy(expected))


@needs_native
@pytest.mark.parametrize("name", KIND)
def test_products_round_no_weight_or_as_bf16_does(name, platform):
    for outputs, inputs in ((100, 512), (33, 256), (64, 160 if KIND[name].block == 32 else 768)):
        weight, bias = weight_of(name, outputs, inputs), torch.randn(outputs).bfloat16()
        linear = platform.linear.make_quantized(weight, bias)
        assert isinstance(linear, CpuBlocksLinear)
        for rows in (1, 2, 4, 5, 8, 16, 17, 33, 140):
            x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).bfloat16()
            found = linear(x)
            close = assert_only_rounded_once if rows <= 4 else assert_weights_rounded_once
            close(found, x, weight.dequantize(torch.float32), bias)
            if outputs == 64:
                assert linear.gated(x).equal(platform.elementwise.silu_and_mul(found))
            fewest = 1 if rows <= 4 else 5 if rows <= 32 else 33
            assert found[:1].equal(linear(x[:fewest])[:1])


@needs_native
@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "Q6_K"])
def test_a_token_that_is_not_finite_leaves_the_others_alone(name, platform):
    linear = platform.linear.make_quantized(weight_of(name, 64, 512), None)
    for rows in (4, 12, 20, 40):
        x = torch.randn(rows, 512).bfloat16()
        x[2] = 0
        others, expected = [0, *range(2, rows)], linear(x)
        assert (expected[2] == 0).all()
        for wrong in (torch.nan, -torch.inf):
            x[1, 300] = wrong
            found = linear(x)
            assert not found[1].isfinite().any()
            assert found[others].equal(expected[others])


@needs_native
@pytest.mark.parametrize(("name", "pruned"), [*((name, slice(None)) for name in KIND), ("Q6_K", slice(192, 208))])
def test_what_becomes_of_pruned_blocks_and_groups_does_not_add_up(name, pruned, platform):
    """Most have scales of zero, or whole ones; inputs are of one sign."""
    weight = weight_of(name, 64, 4096)
    (rows,) = weight.pieces
    of = rows.data[:, :, pruned]
    of[torch.rand(of.shape if pruned.stop else (*of.shape[:2], 1)).expand(of.shape) < 0.95] = 0
    for tokens in (20, 40):
        x = torch.randn(tokens, 4096).abs().bfloat16()
        assert_weights_rounded_once(
            platform.linear.make_quantized(weight, None)(x), x, weight.dequantize(torch.float32), None
        )


@needs_native
def test_a_fused_projection_may_mix_types(platform):
    pieces = [weight_of("Q4_K", 70, 256), weight_of("Q4_K", 30, 256, 1), weight_of("Q6_K", 40, 256)]
    whole = pieces[0].join(pieces[1:])
    assert [(piece.kind.name, len(piece.data)) for piece in whole.pieces] == [("Q4_K", 100), ("Q6_K", 40)]
    assert whole.nbytes == sum(piece.nbytes for piece in pieces)
    floats = torch.cat([piece.dequantize(torch.bfloat16) for piece in pieces])
    assert whole.dequantize(torch.bfloat16).equal(floats)
    x, bias = torch.randn(40, 256).bfloat16(), torch.randn(140).bfloat16()
    linear = platform.linear.make_quantized(whole, bias)
    assert_weights_rounded_once(linear(x), x, whole.dequantize(torch.float32), bias)
    assert_only_rounded_once(linear(x[:3]), x[:3], whole.dequantize(torch.float32), bias)
    assert whole.part(Part(0, 60, 120)).dequantize(torch.bfloat16).equal(floats[60:120])


@needs_native
@pytest.mark.parametrize("name", KIND)
def test_blocks_stay_as_small_as_in_the_file(name, platform):
    weight = weight_of(name, 128, 1024)
    linear = platform.linear.make_quantized(weight, None)
    assert linear.nbytes == weight.nbytes + platform.linear.dequantized_bytes
    assert linear.nbytes < (1.2 if name == "Q2_K" else 1.06) * weight.nbytes  # of which two whole numbers share a byte


def test_inputs_are_divided_between_blocks_only():
    weight = weight_of("Q4_K", 3, 512)
    half = weight.part(Part(1, 256, 512))
    assert half.dequantize(torch.float32).equal(weight.dequantize(torch.float32)[:, 256:])
    with pytest.raises(PartError, match="cut a block of 256 of Q4_K"):
        weight.part(Part(1, 128, 384))


@pytest.mark.parametrize("name", KIND)
def test_projections_of_a_file_stay_in_blocks(name, tmp_path):
    model = make_tiny_model(tmp_path, hidden_size=256, intermediate_size=256)
    data = weight_of(name, 256, 256).pieces[0].data.flatten(1).numpy()
    file = write_gguf(model, tmp_path / "model.gguf", replaced={"blk.0.ffn_up.weight": (data, kind_of(name))})
    scheme, checkpoint = detect_scheme(file, ""), open_gguf(file)
    weight = scheme.read(checkpoint, declared(file)["model.layers.0.mlp.up_proj.weight"])
    assert isinstance(weight, GgufWeight)
    assert weight.nbytes == data.nbytes
    assert weight.dequantize(torch.float32).equal(checkpoint.floats("model.layers.0.mlp.up_proj.weight"))


@needs_native
@pytest.mark.parametrize("name", KIND)
def test_rows_are_looked_up_in_blocks(name, platform):
    weight = weight_of(name, 70, 512)
    floats = weight.dequantize(torch.bfloat16)
    ids = torch.tensor([0, 69, 31, 32, 15, 16, 32, 8])
    x = torch.randn(40, 512).bfloat16()
    lookup, head = platform.linear.make_tied(weight)
    assert lookup(ids).equal(floats[ids])
    assert_weights_rounded_once(head(x), x, weight.dequantize(torch.float32), None)
    assert platform.linear.make_lookup(weight)(ids).equal(floats[ids])
    with pytest.raises(IndexError, match="70 rows"):
        lookup(torch.tensor([70]))


@needs_native
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("tied", [True, False])
def test_decodes_run_as_one_program(tied, drive, monkeypatch, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 32, "tie_word_embeddings": tied}
    model = make_tiny_model(tmp_path / "tiny", **sizes)
    table = weight_of("Q6_K", 384, 256, 77).pieces[0].data.flatten(1).numpy()
    replaced = {"token_embd.weight": (table, kind_of("Q6_K"))}
    for layer in range(2):
        for part, (name, rows) in {
            "attn_q": ("Q4_K", 128),
            "attn_k": ("Q4_K", 64),
            "attn_v": ("Q6_K", 64),
            "ffn_down": ("Q5_K", 256),
        }.items():
            data = weight_of(name, rows, 256, layer).pieces[0].data.flatten(1).numpy()
            replaced[f"blk.{layer}.{part}.weight"] = (data, kind_of(name))
    file = write_gguf(model, tmp_path / "model.gguf", "BF16", replaced=replaced)
    prompt = list(range(5, 25))
    kept = drive(file, dtype="bfloat16")
    kept.admit(1, prompt)
    tokens = kept.generate(1, 40)
    assert kept.info.graph_rows
    floats = drive(file, dtype="bfloat16", quantization="unquant")
    monkeypatch.setattr(CpuCapture, "decodes", lambda *args, **options: None)
    monkeypatch.setattr(CpuCapture, "native_pass", lambda *args, **options: None)
    one_by_one = drive(file, dtype="bfloat16")
    assert not one_by_one.info.graph_rows
    one_by_one.admit(1, prompt)
    assert one_by_one.generate(1, 40) == tokens
    # An output layer of its own stays in bf16 in this file, and nothing else that is large.
    assert kept.info.weight_bytes < (0.7 if tied else 0.85) * floats.info.weight_bytes
