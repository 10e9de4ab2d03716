"""The references of the fused operators, against plain PyTorch, the vendor's schema and the vendor's meta function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from kernels.devices.npu_simulator.activate import Simulator
from kernels.devices.npu_simulator.aten import overload_of
from kernels.devices.npu_simulator.checking import CheckedOperator, MetaMismatch, SchemaMismatch
from kernels.devices.npu_simulator.constraints import ConstraintError
from kernels.devices.npu_simulator.operators.reference import REFERENCES, Reference
from kernels.devices.npu_simulator.takeover import hold_to_schema

BF16 = torch.bfloat16
PAGE = 128


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to(dtype)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(5)


# ---- norms, rotary, activation ----


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_norms(dtype: torch.dtype) -> None:
    x, other, weight = random(6, 64, dtype=dtype), random(6, 64, dtype=dtype), random(64, dtype=dtype)
    expected = F.rms_norm(x.float(), (64,), weight.float(), 1e-5).to(dtype)
    y, rstd = torch_npu.npu_rms_norm(x.npu(), weight.npu(), 1e-5)
    torch.testing.assert_close(y.cpu(), expected)
    assert rstd.shape == (6, 1)
    torch.testing.assert_close(rstd.cpu(), (x.float().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt())
    total = x + other
    y, _, residual = torch_npu.npu_add_rms_norm(x.npu(), other.npu(), weight.npu(), 1e-5)
    assert torch.equal(residual.cpu(), total)
    torch.testing.assert_close(y.cpu(), F.rms_norm(total.float(), (64,), weight.float(), 1e-5).to(dtype))
    a, b = x.npu(), other.npu()
    torch_npu.npu_add_rms_norm_v2(a, b, weight.npu(), 1e-5)
    assert torch.equal(a.cpu(), y.cpu())
    assert torch.equal(b.cpu(), total)
    gemma, _ = torch_npu.npu_gemma_rms_norm(x.npu(), weight.npu(), 1e-5)
    torch.testing.assert_close(gemma.cpu(), F.rms_norm(x.float(), (64,), weight.float() + 1, 1e-5).to(dtype))


def test_swiglu() -> None:
    x = random(5, 12, dtype=torch.float32)
    torch.testing.assert_close(torch_npu.npu_swiglu(x.npu()).cpu(), F.silu(x[:, :6]) * x[:, 6:])


def test_rotary() -> None:
    x, key, angle = random(1, 7, 4, 64), random(1, 7, 2, 64), torch.randn(1, 7, 1, 32)
    cos, sin = (f(torch.cat((angle, angle), -1)).to(BF16) for f in (torch.cos, torch.sin))
    a, b = x.float().chunk(2, -1)
    expected = torch.cat(
        (a * cos.float()[..., :32] - b * sin.float()[..., :32], b * cos.float()[..., 32:] + a * sin.float()[..., 32:]),
        -1,
    )
    torch.testing.assert_close(torch_npu.npu_rotary_mul(x.npu(), cos.npu(), sin.npu()).cpu(), expected.to(BF16))
    with pytest.raises(ConstraintError, match="dtypes must be equal"):
        torch_npu.npu_rotary_mul(x.npu(), cos.float().npu(), sin.float().npu())
    q, k = torch_npu.npu_apply_rotary_pos_emb(x.npu(), key.npu(), cos.npu(), sin.npu())
    torch.testing.assert_close(q.cpu(), expected.to(BF16))
    assert k.shape == key.shape
    pairs = torch_npu.npu_rotary_mul(x.npu(), cos.npu(), sin.npu(), "interleave").cpu().float()
    e, o = x.float()[..., ::2], x.float()[..., 1::2]
    torch.testing.assert_close(
        pairs[..., ::2].to(BF16), (e * cos.float()[..., ::2] - o * sin.float()[..., ::2]).to(BF16)
    )


# ---- cache ----


def test_scatter_writes_slots() -> None:
    key, value = random(3, 2, 16), random(3, 2, 16)
    keys, values = (
        torch.zeros(4, PAGE, 2, 16, dtype=BF16, device="npu"),
        torch.zeros(4, PAGE, 2, 16, dtype=BF16, device="npu"),
    )
    slots = torch.tensor([130, 3, 511], dtype=torch.int32, device="npu")
    torch_npu.npu_scatter_pa_kv_cache(key.npu(), value.npu(), keys, values, slots, cache_mode="Norm")
    assert torch.equal(keys.cpu().view(-1, 2, 16)[[130, 3, 511]], key)
    assert torch.equal(values.cpu()[[1, 0, 3], [2, 3, 127]], value)
    assert int((keys != 0).any(-1).any(-1).sum()) == 3


@pytest.mark.parametrize(
    ("slots", "mode", "rule"),
    [
        ([130, 512], "Norm", "130 to 512 must be in 0 to 511"),
        ([-1, 3], "Norm", "must be in 0 to 511"),
        ([200, 200], "Norm", "must differ"),
        ([1, 2], "PA_NZ", "NZ caches"),
        ([1], "Norm", r"must be \[2\]"),
    ],
)
def test_scatter_rules(slots: list[int], mode: str, rule: str) -> None:
    rows = random(2, 2, 16).npu()
    cache = torch.zeros(4, PAGE, 2, 16, dtype=BF16, device="npu")
    with pytest.raises(ConstraintError, match=rule) as caught:
        torch_npu.npu_scatter_pa_kv_cache(
            *(rows, rows, cache, torch.zeros_like(cache), torch.tensor(slots, dtype=torch.int32, device="npu")),
            cache_mode=mode,
        )
    assert caught.value.operator == "npu_scatter_pa_kv_cache"


def test_scatter_may_dump_twice_in_block_0() -> None:
    cache = torch.zeros(4, PAGE, 2, 16, dtype=BF16, device="npu")
    rows = random(2, 2, 16).npu()
    slots = torch.zeros(2, dtype=torch.int64, device="npu")
    torch_npu.npu_scatter_pa_kv_cache(rows, rows, cache, torch.zeros_like(cache), slots, cache_mode="Norm")


def test_scatter_has_no_float32() -> None:
    rows, cache = (torch.zeros(*shape, 2, 16, device="npu") for shape in ((2,), (4, PAGE)))
    with pytest.raises(ConstraintError, match="key: must be float16, bfloat16, int8"):
        torch_npu.npu_scatter_pa_kv_cache(
            *(rows, rows, cache, torch.zeros_like(cache), torch.arange(2, device="npu")), cache_mode="Norm"
        )


def test_scatter_requires_contiguous_rows() -> None:
    cache = torch.zeros(4, PAGE, 2, 16, dtype=BF16, device="npu")
    rows = random(2, 3, 16).npu()[:, :2]
    with pytest.raises(ConstraintError, match="key: must be contiguous"):
        torch_npu.npu_scatter_pa_kv_cache(
            *(rows, rows, cache, torch.zeros_like(cache), torch.arange(2, device="npu")), cache_mode="Norm"
        )


# ---- attention ----


def expected_attention(q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
    """[tokens, heads, dim] over [seen, kv heads, dim], causal from the right, in float32."""
    group, shift = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
    i, j = torch.arange(q.shape[0]).unsqueeze(1) + shift, torch.arange(k.shape[0]).unsqueeze(0)
    mask = (j <= i) & ((j >= i - window) if window else True)
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(
        *(t.transpose(0, 1) for t in (q.float(), k, v)), attn_mask=mask, scale=q.shape[-1] ** -0.5
    )
    return out.transpose(0, 1)


class Paged:
    """Three requests over a cache of pages, as fused attention takes them."""

    counts, lengths = [3, 1, 5], [130, 7, 5]
    table = torch.tensor([[3, 5], [1, 0], [7, 0]], dtype=torch.int32)

    def __init__(self) -> None:
        self.q = random(9, 4, 128)
        self.k, self.v = random(8, PAGE, 2, 128), random(8, PAGE, 2, 128)

    def arguments(self) -> dict[str, Any]:
        return {
            "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu(),
            "actual_seq_lengths": [3, 4, 9],
            "actual_seq_lengths_kv": list(self.lengths),
            "block_table": self.table.npu(),
            "num_heads": 4,
            "num_key_value_heads": 2,
            "scale": 128**-0.5,
            "input_layout": "TND",
            "sparse_mode": 3,
            "block_size": PAGE,
        }

    def run(self, **changes: Any) -> Tensor:
        caches = (self.k.npu().view(8, PAGE, -1), self.v.npu().view(8, PAGE, -1))
        return torch_npu.npu_fused_infer_attention_score(self.q.npu(), *caches, **(self.arguments() | changes))[0].cpu()

    def rows(self, cache: Tensor, request: int) -> Tensor:
        return cache[self.table[request].long()].flatten(0, 1)[: self.lengths[request]]

    def expected(self, window: int = 0) -> Tensor:
        parts, start = [], 0
        for request, count in enumerate(self.counts):
            q = self.q[start : start + count]
            parts.append(expected_attention(q, self.rows(self.k, request), self.rows(self.v, request), window))
            start += count
        return torch.cat(parts).to(BF16)


def test_paged_attention() -> None:
    paged = Paged()
    torch.testing.assert_close(paged.run(), paged.expected())
    torch.testing.assert_close(paged.run(sparse_mode=4, pre_tokens=4, next_tokens=0), paged.expected(window=4))


def test_attention_layouts_agree() -> None:
    """One batch of three rows of two tokens over five keys: BSND, BSH, BNSD and TND without pages."""
    q, k, v = random(3, 2, 4, 128), random(3, 5, 2, 128), random(3, 5, 2, 128)
    expected = torch.stack([expected_attention(*row) for row in zip(q, k, v, strict=True)]).to(BF16)
    mask = torch.ones(2048, 2048, dtype=torch.int8).triu(1).npu()
    common = {"num_heads": 4, "num_key_value_heads": 2, "scale": 128**-0.5, "sparse_mode": 3, "atten_mask": mask}
    fia = torch_npu.npu_fused_infer_attention_score
    bsnd = fia(q.npu(), k.npu(), v.npu(), input_layout="BSND", **common)[0].cpu()
    torch.testing.assert_close(bsnd, expected)
    bsh = fia(*(t.flatten(2).npu() for t in (q, k, v)), input_layout="BSH", **common)[0].cpu()
    assert torch.equal(bsh.view(bsnd.shape), bsnd)
    bnsd = fia(*(t.transpose(1, 2).contiguous().npu() for t in (q, k, v)), input_layout="BNSD", **common)[0].cpu()
    assert torch.equal(bnsd.transpose(1, 2), bsnd)
    lengths = {"actual_seq_lengths": [2, 4, 6], "actual_seq_lengths_kv": [5, 10, 15]}
    tnd, lse = fia(
        *(t.flatten(0, 1).npu() for t in (q, k, v)), input_layout="TND", softmax_lse_flag=True, **lengths, **common
    )
    assert torch.equal(tnd.cpu().view(bsnd.shape), bsnd)
    assert lse.shape == (6, 4, 1)


def test_attention_second_version_and_sinks() -> None:
    paged = Paged()
    names = {
        "actual_seq_lengths": "actual_seq_qlen",
        "actual_seq_lengths_kv": "actual_seq_kvlen",
        "num_heads": "num_query_heads",
        "scale": "softmax_scale",
    }
    arguments = {names.get(name, name): value for name, value in paged.arguments().items()}
    caches = (paged.k.npu().view(8, PAGE, -1), paged.v.npu().view(8, PAGE, -1))
    second = torch_npu.npu_fused_infer_attention_score_v2(paged.q.npu(), *caches, **arguments)[0].cpu()
    assert torch.equal(second, paged.run())
    low = torch.full((4,), -1e4, dtype=BF16, device="npu")
    without = torch_npu.npu_fused_infer_attention_score_v2(paged.q.npu(), *caches, learnable_sink=low, **arguments)[0]
    torch.testing.assert_close(without.cpu(), second)
    high = torch.full((4,), 1e4, dtype=BF16, device="npu")
    drained = torch_npu.npu_fused_infer_attention_score_v2(paged.q.npu(), *caches, learnable_sink=high, **arguments)[0]
    assert float(drained.abs().max()) == 0


def test_attention_out_and_workspace() -> None:
    paged = Paged()
    q, caches = paged.q.npu(), (paged.k.npu().view(8, PAGE, -1), paged.v.npu().view(8, PAGE, -1))
    arguments = paged.arguments()
    workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace(q, *caches, **arguments)
    out = [torch.empty_like(q), torch.empty(0, device="npu")]
    torch_npu.npu_fused_infer_attention_score.out(q, *caches, **arguments, workspace=workspace, out=out)
    assert torch.equal(out[0].cpu(), paged.run())
    with pytest.raises(ConstraintError, match="workspace"):
        torch_npu.npu_fused_infer_attention_score.out(q, *caches, **arguments, workspace=workspace[:8], out=out)
    wrong = [torch.empty(9, 4, 64, dtype=BF16, device="npu"), out[1]]
    with pytest.raises((ConstraintError, RuntimeError)):
        torch_npu.npu_fused_infer_attention_score.out(q, *caches, **arguments, workspace=workspace, out=wrong)


@pytest.mark.parametrize(
    ("changes", "argument", "rule"),
    [
        ({"actual_seq_lengths": [3, 4, 8]}, "actual_seq_lengths", "last actualSeqQ: 9 tokens, last entry 8"),
        ({"actual_seq_lengths": [3, 1, 5]}, "actual_seq_lengths", "cumulative"),
        ({"actual_seq_lengths": None}, "actual_seq_lengths", "needs the cumulative"),
        ({"actual_seq_lengths_kv": [130, 7]}, "actual_seq_lengths_kv", "needs 3 entries"),
        ({"actual_seq_lengths_kv": [300, 7, 5]}, "block_table", "the longest needs 3"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int32)}, "block_table", "a row for each of 3"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int64)}, "block_table", "must be int32"),
        ({"block_table": torch.full((3, 2), 8, dtype=torch.int32)}, "block_table", "must be in 0 to 7"),
        ({"block_size": 16}, "block_size", "silently wrong"),
        ({"atten_mask": None}, "atten_mask", "2048 x 2048"),
        ({"atten_mask": torch.zeros(2048, 2048, dtype=torch.bool)}, "atten_mask", "above the diagonal"),
        ({"atten_mask": torch.zeros(2048, 2048)}, "atten_mask", "must be bool, int8, uint8"),
        ({"num_heads": 8}, "num_heads", "must be the query's 4"),
        ({"input_layout": "NTD"}, "input_layout", "not simulated"),
        ({"sparse_mode": 9}, "sparse_mode", "not simulated"),
        ({"pse_shift": torch.zeros(1)}, "pse_shift", "not simulated"),
    ],
)
def test_attention_rules(changes: dict[str, Any], argument: str, rule: str) -> None:
    moved = {name: value.npu() if isinstance(value, Tensor) else value for name, value in changes.items()}
    with pytest.raises(ConstraintError, match=rule) as caught:
        Paged().run(**moved)
    assert caught.value.argument == argument


def test_attention_head_dims_and_dtypes() -> None:
    paged = Paged()
    paged.q, paged.k, paged.v = random(9, 4, 64), random(8, PAGE, 2, 64), random(8, PAGE, 2, 64)
    with pytest.raises(ConstraintError, match="use BSND or pad the heads"):
        paged.run()
    paged = Paged()
    paged.q, paged.k, paged.v = (t.float() for t in (paged.q, paged.k, paged.v))
    with pytest.raises(ConstraintError, match="must be float16, bfloat16"):
        paged.run()


# ---- sampling ----


def test_top_k_top_p(simulator: Simulator) -> None:
    if simulator.spec.generation == "A5":
        pytest.skip("the vendor has npu_top_k_top_p for A2 and A3 only")
    logits = torch.tensor([[1.0, 2, 3, 4], [1, 3, 3, 5], [0, 0, 0, 9]])
    k, p = torch.tensor([2, 2, 4], dtype=torch.int32), torch.tensor([1.0, 1.0, 0.5])
    cut = torch_npu.npu_top_k_top_p(logits.npu(), p.npu(), k.npu()).cpu()
    assert (cut > float("-inf")).tolist() == [
        [False, False, True, True],
        [False, True, True, True],
        [False] * 3 + [True],
    ]
    assert torch.equal(cut[cut > float("-inf")], logits[cut > float("-inf")])
    for bad in (0, 5):
        with pytest.raises(ConstraintError, match="1 to 4: pass None"):
            torch_npu.npu_top_k_top_p(logits.npu(), None, torch.full((3,), bad, dtype=torch.int32, device="npu"))
    with pytest.raises(ConstraintError, match="must be int32"):
        torch_npu.npu_top_k_top_p(logits.npu(), None, k.long().npu())
    with pytest.raises(ConstraintError, match="not both be None"):
        torch_npu.npu_top_k_top_p(logits.npu(), None, None)


# ---- formats ----


def test_nz_weights(simulator: Simulator) -> None:
    torch_npu.npu.config.allow_internal_format = True
    weight, x = random(64, 32), random(3, 32)
    cast = torch_npu.npu_format_cast(weight.npu(), 29)
    if simulator.spec.generation == "A5":
        assert torch_npu.get_npu_format(cast) == 2
        return
    assert torch_npu.get_npu_format(cast) == 29
    assert torch.equal(F.linear(x.npu(), cast).cpu(), F.linear(x, weight))
    with pytest.raises(ConstraintError, match="cannot be sliced"):
        cast[:16] + 1
    assert torch.equal(torch_npu.npu_format_cast(cast, 2)[:16].cpu(), weight[:16])
    with pytest.raises(ConstraintError, match="keep this weight in ND"):
        torch_npu.npu_format_cast(random(40, 40).npu(), 29)
    with pytest.raises(ConstraintError, match="NZ takes"):
        torch_npu.npu_format_cast(torch.zeros(16, 16, device="npu"), 29)


# ---- the vendor's word ----


def test_every_reference_has_the_vendors_schema(simulator: Simulator) -> None:
    generation = simulator.spec.generation
    here = {name for name, entry in REFERENCES.items() if generation in entry.generations}
    assert here <= set(simulator.simulated)
    before_a5 = {"npu_top_k_top_p", "npu_add_rms_norm_dynamic_quant", "npu_add_rms_norm_quant"}
    since_a5 = {"npu_dynamic_mx_quant", "npu_add_rms_norm_dynamic_mx_quant"}
    assert set(REFERENCES) - here == (before_a5 if generation == "A5" else since_a5)
    for name, entry in REFERENCES.items():
        hold_to_schema(overload_of(f"npu::{name}"), entry)


def test_a_wrong_schema_is_found() -> None:
    def renamed(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Any: ...

    def other_default(input: Tensor, gamma: Tensor, epsilon: float = 1e-5) -> Any: ...

    for wrong in (renamed, other_default):
        with pytest.raises(SchemaMismatch, match="npu_rms_norm"):
            hold_to_schema(overload_of("npu::npu_rms_norm"), Reference(wrong, None, None, False, ("A2",)))


def test_a_wrong_result_is_found_by_the_vendors_meta(simulator: Simulator) -> None:
    def narrow(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
        return input, torch.ones(input.shape[:-1])  # the reciprocal deviation keeps a last dimension of 1

    entry = Reference(narrow, None, None, False, ("A2",))
    operator = CheckedOperator(simulator.engine, overload_of("npu::npu_rms_norm"), entry)
    with pytest.raises(MetaMismatch, match=r"result 1 is \(6,\)"):
        operator(torch.ones(6, 8, device="npu"), torch.ones(8, device="npu"))


def test_which_operators_the_vendor_checks(simulator: Simulator) -> None:
    unchecked = {
        name
        for name, entry in REFERENCES.items()
        if not CheckedOperator(simulator.engine, overload_of(f"npu::{name}"), entry).checked_by_vendor
    }
    unchecked.discard("npu_convert_weight_to_int4pack")  # for which the vendor has no shapes
    assert all(name.startswith("_npu_fused_infer") for name in unchecked)
