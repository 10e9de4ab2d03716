"""Mixture of experts: routing, sorting of tokens by expert, grouped products (facts 5.1 to 5.3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.devices.npu_simulator.constraints import contiguous, dtypes, require
from kernels.devices.npu_simulator.operators.microscaling import E4M3, mx_product, mx_rules
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


def gating_rules(x: Tensor, finished: Tensor | None = None, k: int = 1) -> None:
    """Vendor: floats of two dimensions or three, k of up to 1024 and of up to the experts."""
    name = "npu_moe_gating_top_k_softmax"
    dtypes(name, _FLOATS, x=x)
    require(x.dim() == 2, name, "x", f"must be [tokens, experts], has shape {tuple(x.shape)}")
    require(finished is None, name, "finished", "is not simulated: leave it out")
    require(1 <= k <= min(1024, x.shape[-1]), name, "k", f"must be 1 to {min(1024, x.shape[-1])}, is {k}")


@reference("npu_moe_gating_top_k_softmax", rules=gating_rules)
def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of a softmax over all experts in x's dtype, experts int32, and the row that each pair had when those of
    all first choices come first, all [tokens, k]."""
    weights, experts = x.float().softmax(-1).topk(k, -1)
    rows = torch.arange(x.shape[0] * k, dtype=torch.int32).view(k, -1).t().contiguous()
    return weights.to(x.dtype), experts.to(torch.int32), rows


def routing_rules(x: Tensor, expert_idx: Tensor, **options: Any) -> None:
    """Vendor and facts: experts int32 [tokens, k]; simulated are the forms that drop no tokens, count the tokens of all
    experts, and quantize tokens to int8 (quant_mode 1) or not (-1)."""
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
        "active_expert_range": ([0, count], []),
    }
    for argument, (value, default) in wanted.items():
        given = options.get(argument, default)
        require(given == value, name, argument, f"{given} is not simulated: {value} is")
    require(count >= 1, name, "expert_num", f"must be the number of experts, is {count}")
    require(options.get("quant_mode", -1) in (-1, 1), name, "quant_mode", "must be -1 or 1: others are not simulated")
    for argument, default in (("expert_capacity", -1), ("drop_pad_mode", 0), ("row_idx_type", 0)):
        require(options.get(argument, default) == default, name, argument, f"is not simulated but for {default}")
    _only(name, options, (*wanted, "expert_num", "quant_mode", "expert_capacity", "drop_pad_mode", "row_idx_type"))


@reference("npu_moe_init_routing_v2", rules=routing_rules)
def npu_moe_init_routing_v2(x: Tensor, expert_idx: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tokens [tokens * k, hidden] in the order of their experts, where each pair's is, int32, tokens of each expert
    int64, and with quant_mode 1 what each row was divided by."""
    experts = expert_idx.flatten().long()
    require(
        bool((experts < options["expert_num"]).all()), "npu_moe_init_routing_v2", "expert_idx", "has no such expert"
    )
    order = experts.argsort(stable=True)
    rows = x[order // expert_idx.shape[1]]
    index = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order))).to(torch.int32)
    counts = experts.bincount(minlength=options["expert_num"])
    if options.get("quant_mode", -1) == -1:
        return rows, index, counts, torch.full((len(rows),), float("nan"))
    wide = rows.float()
    scales = wide.abs().amax(-1) / 127
    whole = torch.where(scales[:, None] > 0, wide / scales[:, None], 0.0).round().clamp(-128, 127)
    return whole.to(torch.int8), index, counts, scales


def grouped_rules(x: list[Tensor], weight: list[Tensor], **options: Any) -> None:
    """Vendor and facts: one tensor each, [M, K] by [experts, K, N], dimensions below 65536, groups along M that a
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


def _floats(weight: Tensor, factors: Tensor, offsets: Tensor) -> Tensor:
    if weight.dtype == torch.int32:
        nibbles = ((weight[..., None] >> (4 * torch.arange(8))) & 15).flatten(2)
        weight = torch.where(nibbles > 7, nibbles - 16, nibbles)

    def wide(values: Tensor) -> Tensor:
        rows = values.float() if values.dim() == 3 else values.float()[:, None]
        return rows.repeat_interleave(weight.shape[1] // rows.shape[1], 1)

    return (weight.float() + wide(offsets)) * wide(factors)
