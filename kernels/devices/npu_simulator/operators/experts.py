"""Mixture of experts: routing, sorting of tokens by expert, grouped products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.devices.npu_simulator.constraints import contiguous, dtypes, require
from kernels.devices.npu_simulator.operators.microscaling import E4M3, mx_product, mx_rules
from kernels.devices.npu_simulator.operators.quantization import quantize_tokens
from kernels.devices.npu_simulator.operators.reference import reference
from kernels.weights.quantization.int8 import exact_products

__all__: list[str] = []

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_HALVES = (torch.float16, torch.bfloat16)
_OUT = {5: torch.float16, 15: torch.bfloat16}
"""``output_dtype``, by PyTorch's numbers of dtypes."""
_MAX_DIM = 65535


def _only(name: str, options: dict[str, Any], allowed: tuple[str, ...]) -> None:
    """Raise for arguments other than ``allowed``, which are not simulated."""
    for argument, value in options.items():
        require(argument in allowed or value is None, name, argument, "is not simulated: leave it out")


def gating_rules(
    x: Tensor,
    finished: Tensor | None = None,
    k: int = 1,
    renorm: int = 0,
    output_softmax: bool = False,
) -> None:
    """Vendor: floats of two dimensions or three, k of up to 1024 and of up to the experts."""
    name = "npu_moe_gating_top_k_softmax_v2"
    require(renorm in (0, 1), name, "renorm", f"must be 0 or 1, is {renorm}")
    require(not output_softmax, name, "output_softmax", "is not simulated: leave it out")
    dtypes(name, _FLOATS, x=x)
    require(x.dim() == 2, name, "x", f"must be [tokens, experts], has shape {tuple(x.shape)}")
    require(finished is None, name, "finished", "is not simulated: leave it out")
    require(1 <= k <= min(1024, x.shape[-1]), name, "k", f"must be 1 to {min(1024, x.shape[-1])}, is {k}")


@reference("npu_moe_gating_top_k_softmax_v2", rules=gating_rules)
def npu_moe_gating_top_k_softmax_v2(
    x: Tensor,
    *,
    k: int = 1,
    finished: Tensor | None = None,
    renorm: int = 0,
    output_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights in x's dtype: of a softmax over all experts, or with ``renorm`` over those chosen; experts int32, both
    [tokens, k]; and with ``output_softmax`` the softmax float32."""
    logits = x.float()
    chosen, experts = (logits if renorm else logits.softmax(-1)).topk(k, -1)
    weights = chosen.softmax(-1) if renorm else chosen
    return weights.to(x.dtype), experts.to(torch.int32), torch.empty(0)


def biased_gating_rules(x: Tensor, k: int, **options: Any) -> None:
    """Documented: at most 2,048 experts in groups of more than two, of which k or more remain; a bias of x's
    dtype. Simulated is the sigmoid, whose weights are always divided by their sum, with a bias: the documents of A2 and
    A3 have no other."""
    name = "npu_moe_gating_top_k"
    dtypes(name, _FLOATS, x=x)
    require(x.dim() == 2, name, "x", f"must be [tokens, experts], has shape {tuple(x.shape)}")
    count, groups = x.shape[1], options.get("group_count", 1)
    taken, bias = options.get("k_group", 1), options.get("bias")
    require(count <= 2048, name, "x", f"has {count} experts: at most 2048 are supported")
    require(groups >= 1 and count % groups == 0, name, "group_count", f"must divide {count}, is {groups}")
    require(count // groups > 2, name, "group_count", "leaves groups of two experts or fewer")
    require(1 <= taken <= groups, name, "k_group", f"must be 1 to {groups}, is {taken}")
    require(1 <= k <= count // groups * taken, name, "k", f"must be 1 to {count // groups * taken}, is {k}")
    require(isinstance(bias, Tensor) and bias.shape == (count,), name, "bias", f"must be [{count}]")
    assert bias is not None
    dtypes(name, (x.dtype,), bias=bias)
    require(options.get("norm_type", 0) == 1, name, "norm_type", "is not simulated but for 1, the sigmoid")
    for argument in ("renorm", "out_flag"):
        require(not options.get(argument, 0), name, argument, "is not simulated: leave it out")
    allowed = ("bias", "k_group", "group_count", "group_select_mode", "norm_type", "renorm", "out_flag")
    _only(name, options, (*allowed, "routed_scaling_factor", "eps"))


@reference("npu_moe_gating_top_k", rules=biased_gating_rules)
def npu_moe_gating_top_k(x: Tensor, k: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Weights in x's dtype and experts int32 [tokens, k]: the best by score and bias, of the best groups alone. A group
    is as good as its best expert, or with ``group_select_mode`` 1 as the sum of its two best. Without ``out_flag`` the
    third result has no meaning."""
    scores = x.float().sigmoid()
    ranked = scores + options["bias"].float()
    groups = options.get("group_count", 1)
    if groups > 1:
        members = ranked.unflatten(-1, (groups, -1))
        best = members.topk(2, -1).values.sum(-1) if options.get("group_select_mode", 0) else members.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(options["k_group"], -1).indices, True)
        ranked = members.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    experts = ranked.topk(k, -1).indices
    weights = scores.gather(1, experts)
    weights = weights / (weights.sum(-1, keepdim=True) + options.get("eps", 1e-20))
    weights = weights * options.get("routed_scaling_factor", 1.0)
    return weights.to(x.dtype), experts.to(torch.int32), torch.full(x.shape, float("nan"))


def finalize_rules(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int = 0,
    k: int = 1,
) -> None:
    """Facts: with drop_pad_mode 2 rows [tokens * k, hidden] and where each pair's is, int32 in the order of pairs, as
    npu_moe_init_routing_v2 gives them; scales [tokens, k] of the rows' dtype, experts int32 [tokens, k]."""
    name, rows, index = "npu_moe_finalize_routing", expanded_permuted_rows, expanded_src_to_dst_row
    dtypes(name, _FLOATS, expanded_permuted_rows=rows)
    dtypes(name, (torch.int32,), expanded_src_to_dst_row=index)
    require(drop_pad_mode == 2, name, "drop_pad_mode", "is not simulated but for 2")
    for argument, value in (("skip1", skip1), ("skip2", skip2), ("bias", bias)):
        require(value is None, name, argument, "is not simulated: leave it out")
    require(rows.dim() == 2 and index.shape == (len(rows),), name, "expanded_src_to_dst_row", f"must be [{len(rows)}]")
    require(scales is not None and export_for_source_row is not None, name, "scales", "and experts are missing")
    assert scales is not None
    assert export_for_source_row is not None
    dtypes(name, (rows.dtype,), scales=scales)
    dtypes(name, (torch.int32,), export_for_source_row=export_for_source_row)
    fits = scales.dim() == 2 and scales.numel() == len(rows) and scales.shape == export_for_source_row.shape
    require(fits, name, "scales", f"must be [tokens, k] of {len(rows)} pairs, has shape {tuple(scales.shape)}")


@reference("npu_moe_finalize_routing", rules=finalize_rules)
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int = 0,
    k: int = 1,
) -> Tensor:
    """Each token's sum [tokens, hidden] of its experts' rows by their scales."""
    assert scales is not None
    require(
        bool((expanded_src_to_dst_row >= 0).all()), "npu_moe_finalize_routing", "expanded_src_to_dst_row", "below 0"
    )
    rows = expanded_permuted_rows[expanded_src_to_dst_row.long()].float().view(*scales.shape, -1)
    return (rows * scales.float().unsqueeze(2)).sum(1).to(expanded_permuted_rows.dtype)


def routing_rules(x: Tensor, expert_idx: Tensor, **options: Any) -> None:
    """Documented: experts int32 [tokens, k]; simulated are the forms that drop no tokens, count the tokens of the
    active experts, and quantize tokens to int8 (quant_mode 1) or not (-1)."""
    name = "npu_moe_init_routing_v2"
    dtypes(name, _FLOATS, x=x)
    dtypes(name, (torch.int32,), expert_idx=expert_idx)
    contiguous(name, x=x, expert_idx=expert_idx)
    fits = x.dim() == 2 and expert_idx.dim() == 2 and len(expert_idx) == len(x)
    require(fits, name, "expert_idx", f"must be [{len(x)}, k], has shape {tuple(expert_idx.shape)}")
    count = options.get("expert_num", -1)
    wanted = {
        "active_num": (expert_idx.numel(), -1),
        "expert_tokens_num_type": (1, 0),
        "expert_tokens_num_flag": (True, False),
    }
    for argument, (value, default) in wanted.items():
        given = options.get(argument, default)
        require(given == value, name, argument, f"{given} is not simulated: {value} is")
    require(count >= 1, name, "expert_num", f"must be the number of experts, is {count}")
    active = options.get("active_expert_range", [])
    fits = len(active) == 2 and 0 <= active[0] < active[1] <= count
    require(fits, name, "active_expert_range", f"{active} must be the first expert and the end, up to {count}")
    require(options.get("quant_mode", -1) in (-1, 1), name, "quant_mode", "must be -1 or 1: others are not simulated")
    for argument, default in (("expert_capacity", -1), ("drop_pad_mode", 0), ("row_idx_type", 0)):
        require(options.get(argument, default) == default, name, argument, f"is not simulated but for {default}")
    others = ("active_expert_range", "expert_num", "quant_mode")
    _only(name, options, (*wanted, *others, "expert_capacity", "drop_pad_mode", "row_idx_type"))


@reference("npu_moe_init_routing_v2", rules=routing_rules)
def npu_moe_init_routing_v2(x: Tensor, expert_idx: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tokens [tokens * k, hidden] in the order of their experts, where each pair's is, int32, tokens of each expert
    int64, and with quant_mode 1 what each row was divided by. Of experts outside of the active range: rows at the end
    without a meaning, and -1 for where they are."""
    experts = expert_idx.flatten().long()
    require(
        bool((experts < options["expert_num"]).all()), "npu_moe_init_routing_v2", "expert_idx", "has no such expert"
    )
    begin, end = options["active_expert_range"]
    here = (experts >= begin) & (experts < end)
    order = torch.where(here, experts, options["expert_num"]).argsort(stable=True)
    rows = x[order // expert_idx.shape[1]]
    index = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order))).to(torch.int32)
    index = torch.where(here, index, -1)
    counts = experts.bincount(minlength=options["expert_num"])[begin:end]
    rows[int(counts.sum()) :] = float("nan")
    if options.get("quant_mode", -1) == -1:
        return rows, index, counts, torch.full((len(rows),), float("nan"))
    whole, scales = quantize_tokens(rows.nan_to_num())
    return whole, index, counts, scales


def grouped_rules(x: list[Tensor], weight: list[Tensor], **options: Any) -> None:
    """Documented: one tensor each, [M, K] by [experts, K, N], dimensions below 65536, groups along M that a
    device tensor int64 counts (type 1). int8 by int8 with scales [experts, N], in bfloat16 if that is what is given out
    and in float32 with float16 (A5 has float32 with both), and float32 [M]; or 16-bit floats of one dtype; or 16-bit
    floats by int8, or by eight int4 along N to an int32, whose scales and offsets are in x's dtype: [experts, N], or of
    int4 [experts, K / group, N] with groups that 32 divides; or e4m3 by e4m3 with the scales of blocks of 32 inputs,
    given out in 16 bits."""
    name = "npu_grouped_matmul"
    require(len(x) == len(weight) == 1, name, "x", "lists of one tensor alone are simulated")
    one, other = x[0], weight[0]
    fits = one.dim() == 2 and other.dim() == 3 and one.shape[1] == other.shape[1]
    require(fits, name, "weight", f"must be [experts, {one.shape[-1]}, N], has shape {tuple(other.shape)}")
    require(max(other.shape[1:]) <= _MAX_DIM, name, "weight", f"has a dimension above {_MAX_DIM}: {tuple(other.shape)}")
    contiguous(name, x=one)
    for argument, value, default in (("split_item", 2, 0), ("group_type", 0, None), ("group_list_type", 1, 0)):
        given = options.get(argument, default)
        require(given == value, name, argument, f"{given} is not simulated: {value} is")
    counts = options.get("group_list")
    require(isinstance(counts, Tensor), name, "group_list", "is missing")
    assert counts is not None
    dtypes(name, (torch.int64,), group_list=counts)
    each = f"must be [{len(other)}], has shape {tuple(counts.shape)}"
    require(tuple(counts.shape) == (len(other),), name, "group_list", each)
    others = ("split_item", "group_type", "group_list_type", "group_list", "act_type")
    eighths = one.dtype == E4M3
    _only(name, options, (*others, *_SCALES, *(_SCALE_DTYPES if eighths else _FACTORS)))
    require(options.get("act_type", 0) == 0, name, "act_type", "is not simulated: leave it out")
    if eighths:
        require(options.get("output_dtype") in _OUT, name, "output_dtype", "must be float16 or bfloat16")
        of_weight, of_tokens = (
            (argument, given[0] if given and len(given) == 1 else None, options.get(f"{argument}_dtype"))
            for argument, given in ((argument, options.get(argument)) for argument in _SCALES[:2])
        )
        return mx_rules(name, one, other, of_weight, of_tokens)
    if one.dtype != torch.int8:
        dtypes(name, _HALVES, x=one)
        for argument in _SCALES:
            require(options.get(argument) is None, name, argument, "is for whole numbers")
        if other.dtype in (torch.int8, torch.int32):
            return factor_rules(one, other, options)
        dtypes(name, (one.dtype,), weight=other)
        for argument in _FACTORS:
            require(options.get(argument) is None, name, argument, "is for weights in whole numbers")
        return
    dtypes(name, (torch.int8,), weight=other)
    require(options.get("output_dtype") in _OUT, name, "output_dtype", "must be float16 or bfloat16")
    shapes = {"scale": (len(other), other.shape[2]), "per_token_scale": (len(one),)}
    for argument, shape in shapes.items():
        held: Any = options.get(argument)
        fits = held is not None and len(held) == 1 and tuple(held[0].shape) == shape
        require(fits, name, argument, f"must be one tensor of {list(shape)}")
        half = argument == "scale" and _OUT[options["output_dtype"]] == torch.bfloat16
        dtypes(name, (torch.bfloat16 if half else torch.float32,), **{argument: held[0]})


def factor_rules(x: Tensor, weight: Tensor, options: dict[str, Any]) -> None:
    """Rules of weight-only products, which dequantize integer weights."""
    name, packed = "npu_grouped_matmul", weight.dtype == torch.int32
    contiguous(name, weight=weight)
    experts, inputs, columns = weight.shape
    outputs = columns * (8 if packed else 1)
    first = None
    for argument in _FACTORS:
        value = options.get(argument)
        require(value is not None and len(value) == 1, name, argument, "must be one tensor: pass zeros as offsets")
        assert value is not None
        shape = tuple(value[0].shape)
        groups = inputs // shape[1] if packed and len(shape) == 3 and shape[1] and not inputs % shape[1] else 0
        fits = shape == (experts, outputs) or (
            groups % 32 == 0 and shape == (experts, inputs // (groups or 1), outputs)
        )
        require(fits and first in (None, shape), name, argument, f"of shape {shape} does not fit the weight")
        dtypes(name, (x.dtype,), **{argument: value[0]})
        first = shape


_SCALES = ("scale", "per_token_scale", "output_dtype")
_SCALE_DTYPES = ("scale_dtype", "per_token_scale_dtype")
_FACTORS = ("antiquant_scale", "antiquant_offset")


@reference("npu_grouped_matmul", rules=grouped_rules)
def npu_grouped_matmul(x: list[Tensor], weight: list[Tensor], **options: Any) -> list[Tensor]:
    """The grouped product. Rows after the last group are undefined: NaN here."""
    one, other = x[0], weight[0]
    whole, eighths = one.dtype == torch.int8, one.dtype == E4M3
    dtype = _OUT[options["output_dtype"]] if whole or eighths else one.dtype
    if not whole and other.dtype in (torch.int8, torch.int32):
        other = _floats(other, *(options[name][0] for name in _FACTORS)).to(dtype)
    out = torch.full((len(one), other.shape[2]), float("nan"), dtype=dtype)
    begin = 0
    for expert, count in enumerate(options["group_list"].tolist()):
        here = slice(begin, begin + count)
        begin += count
        if not count:
            continue
        if whole:
            sums = exact_products(one[here], other[expert]).float() * options["scale"][0][expert].float()
            out[here] = (sums * options["per_token_scale"][0][here, None]).to(dtype)
        elif eighths:
            factors, powers = options["scale"][0][expert], options["per_token_scale"][0][here]
            out[here] = mx_product(one[here], powers, other[expert], factors).to(dtype)
        else:
            out[here] = one[here] @ other[expert]
    return [out]


def fused_rules(
    x: Tensor,
    weight: list[Tensor],
    weight_scale: list[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    **options: Any,
) -> None:
    """Documented, A2 and A3: int8 [M, K] by one int8 tensor [experts, K, N] in NZ tiles, scales float32 [experts,
    N] and [M], groups that a device tensor int64 counts (type 1)."""
    name = "npu_grouped_matmul_swiglu_quant_v2"
    require(len(weight) == len(weight_scale) == 1, name, "weight", "lists of one tensor alone are simulated")
    values, scales = weight[0], weight_scale[0]
    dtypes(name, (torch.int8,), x=x, weight=values)
    dtypes(name, (torch.float32,), weight_scale=scales, x_scale=x_scale)
    dtypes(name, (torch.int64,), group_list=group_list)
    fits = x.dim() == 2 and values.dim() == 3 and x.shape[1] == values.shape[1] and values.shape[2] % 2 == 0
    require(fits, name, "weight", f"must be [experts, {x.shape[-1]}, 2 N], has shape {tuple(values.shape)}")
    require(max(values.shape[1:]) <= _MAX_DIM, name, "weight", f"has a dimension above {_MAX_DIM}")
    require(tuple(scales.shape) == (len(values), values.shape[2]), name, "weight_scale", "must be [experts, 2 N]")
    require(tuple(x_scale.shape) == (len(x),), name, "x_scale", f"must be [{len(x)}]")
    require(tuple(group_list.shape) == (len(values),), name, "group_list", f"must be [{len(values)}]")
    contiguous(name, x=x)
    require(options.get("group_list_type", 0) == 1, name, "group_list_type", "is not simulated but for 1, counts")
    _only(name, options, ("group_list_type", "dequant_mode", "dequant_dtype", "quant_mode", "quant_dtype"))
    for argument, default in (("dequant_mode", 0), ("dequant_dtype", 6), ("quant_mode", 0), ("quant_dtype", 1)):
        require(options.get(argument, default) == default, name, argument, f"is not simulated but for {default}")


@reference("npu_grouped_matmul_swiglu_quant_v2", rules=fused_rules, generations=("A2", "A3"))
def npu_grouped_matmul_swiglu_quant_v2(
    x: Tensor,
    weight: list[Tensor],
    weight_scale: list[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The grouped product of gate | up, then silu(gate) * up: its tokens in int8 [M, N], their scales float32 [M]."""
    both = torch.zeros(len(x), weight[0].shape[2])
    begin = 0
    for expert, count in enumerate(group_list.tolist()):
        here = slice(begin, begin + count)
        begin += count
        sums = exact_products(x[here], weight[0][expert]).float() * weight_scale[0][expert]
        both[here] = sums * x_scale[here, None]
    gate, up = both.chunk(2, -1)
    return quantize_tokens(torch.nn.functional.silu(gate) * up)


def _floats(weight: Tensor, factors: Tensor, offsets: Tensor) -> Tensor:
    if weight.dtype == torch.int32:
        nibbles = ((weight[..., None] >> (4 * torch.arange(8))) & 15).flatten(2)
        weight = torch.where(nibbles > 7, nibbles - 16, nibbles)

    def wide(values: Tensor) -> Tensor:
        rows = values.float() if values.dim() == 3 else values.float()[:, None]
        return rows.repeat_interleave(weight.shape[1] // rows.shape[1], 1)

    return (weight.float() + wide(offsets)) * wide(factors)
