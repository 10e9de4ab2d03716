"""Dispatch of tokens to the ranks of their experts, and combine of the results. Between the two operators only tokens
and counts are as on a device; the other tensors have a format of the simulator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.devices.npu.expert_exchange import exchange_algorithm, exchange_limit
from kernels.devices.npu_simulator.communicators import COMMUNICATORS, Communicator
from kernels.devices.npu_simulator.constraints import contiguous, dtypes, require
from kernels.devices.npu_simulator.operators.quantization import quantize_tokens
from kernels.devices.npu_simulator.operators.reference import reference

__all__: list[str] = []

_HALVES = (torch.float16, torch.bfloat16)
_ASSIST = 128
"""Numbers of a token in ``assist_info_for_combine``."""


def _group(name: str, group_ep: str, size: int, rank: int, experts: int) -> Communicator:
    require(group_ep in COMMUNICATORS, name, "group_ep", f"{group_ep!r} is no communicator of this rank")
    require(0 <= rank < size, name, "ep_rank_id", f"must be below {size}, is {rank}")
    require(experts % size == 0, name, "moe_expert_num", f"{experts} cannot be divided by {size} ranks")
    return COMMUNICATORS[group_ep]


def _common(name: str, x: Tensor, expert_ids: Tensor, group_ep: str, sizes: tuple[int, int, int], options: Any) -> None:
    """Vendor: limits of both operators."""
    size, rank, experts = sizes
    group = _group(name, group_ep, size, rank, experts)
    contiguous(name, x=x, expert_ids=expert_ids)
    dtypes(name, (torch.int32,), expert_ids=expert_ids)
    rows, chosen = expert_ids.shape
    most = exchange_limit(group.generation, x.shape[1], experts // size, chosen, size)
    require(most, name, "x", f"of {x.shape[1]} numbers, {experts} experts of which {chosen} are taken, or {size} ranks")
    require(0 < rows <= most, name, "x", f"must have 1 to {most} tokens with this HCCL_BUFFSIZE, has {rows}")
    algorithm = exchange_algorithm(group.generation)
    require(options.get("comm_alg", "") == algorithm, name, "comm_alg", f"must be {algorithm!r}")
    require(options.get("shared_expert_num", 1) == 0, name, "shared_expert_num", "is not simulated but for 0")
    mask = options.get("x_active_mask")
    if mask is not None:
        dtypes(name, (torch.bool,), x_active_mask=mask)
        require(mask.shape == (rows,), name, "x_active_mask", f"must be [{rows}], has shape {tuple(mask.shape)}")
    known = {"comm_alg", "shared_expert_num", "x_active_mask", "quant_mode", "expert_token_nums_type"}
    for argument, value in options.items():
        require(argument in known or not value, name, argument, "is not simulated: leave it out")


def dispatch_rules(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    **options: Any,
) -> None:
    """Vendor: 16-bit floats [tokens, hidden], and int32 [tokens, k] experts of up to 16."""
    name = "npu_moe_distribute_dispatch_v2"
    dtypes(name, _HALVES, x=x)
    _common(name, x, expert_ids, group_ep, (ep_world_size, ep_rank_id, moe_expert_num), options)
    require(expert_ids.shape[0] == x.shape[0], name, "expert_ids", f"must have {x.shape[0]} rows")
    require(options.get("quant_mode", 0) in (0, 2), name, "quant_mode", "must be 0 or 2 on A2 and A3")
    require(options.get("expert_token_nums_type", 1) == 1, name, "expert_token_nums_type", "is not simulated but for 1")


@reference("npu_moe_distribute_dispatch_v2", rules=dispatch_rules, generations=("A2", "A3"))
def npu_moe_distribute_dispatch_v2(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    **options: Any,
) -> tuple[Tensor, ...]:
    """The tokens that take an expert of this rank, expert after expert and rank after rank: [A, hidden], in int8 with
    scales f32 [A] for quant_mode 2. A: the most that there may be; what is behind those that came is undefined. Then
    what the other operator needs, and the tokens of each expert int64 [experts of this rank]."""
    group, local = COMMUNICATORS[group_ep], moe_expert_num // ep_world_size
    rows, chosen = expert_ids.shape
    mask = options.get("x_active_mask")
    here = torch.ones(rows, dtype=torch.bool) if mask is None else mask
    require(bool((here[:-1] | ~here[1:]).all()), "npu_moe_distribute_dispatch_v2", "x_active_mask", "true comes first")
    require(
        bool(((expert_ids >= 0) & (expert_ids < moe_expert_num)).all()),
        "npu_moe_distribute_dispatch_v2",
        "expert_ids",
        f"must be 0 to {moe_expert_num - 1}",
    )
    wanted = torch.where(here[:, None], expert_ids, -1)
    tokens, every = torch.cat(group.gather_host(x)), torch.cat(group.gather_host(wanted))
    most = rows * ep_world_size * min(local, chosen)
    expert = every.flatten() - ep_rank_id * local
    pairs = (expert + torch.where((expert >= 0) & (expert < local), 0, moe_expert_num * 4)).argsort(stable=True)
    counts = expert[(expert >= 0) & (expert < local)].bincount(minlength=local)
    pairs = pairs[: int(counts.sum())]
    assist = torch.full((max(rows * chosen, most * _ASSIST),), -1, dtype=torch.int32)
    assist[: len(pairs) * _ASSIST : _ASSIST] = pairs.to(torch.int32)
    received = torch.zeros(ep_world_size * local, dtype=torch.int32)
    found, scales = tokens[pairs // chosen], torch.full((most,), float("nan"))
    expanded = torch.full((most, x.shape[1]), float("nan"), dtype=x.dtype)
    if options.get("quant_mode", 0) == 2:
        expanded = torch.full((most, x.shape[1]), 111, dtype=torch.int8)
        found, scales[: len(pairs)] = quantize_tokens(found)
    expanded[: len(pairs)] = found
    return expanded, scales, assist, counts, received, torch.empty(0, dtype=torch.int32), torch.empty(0)


def combine_rules(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    **options: Any,
) -> None:
    """Vendor: 16-bit floats as the other operator gave them, and weights f32 [tokens, k]."""
    name = "npu_moe_distribute_combine_v2"
    dtypes(name, _HALVES, expand_x=expand_x)
    dtypes(name, (torch.float32,), expert_scales=expert_scales)
    dtypes(name, (torch.int32,), assist_info_for_combine=assist_info_for_combine, ep_send_counts=ep_send_counts)
    _common(name, expand_x, expert_ids, group_ep, (ep_world_size, ep_rank_id, moe_expert_num), options)
    rows, chosen = expert_ids.shape
    most = rows * ep_world_size * min(moe_expert_num // ep_world_size, chosen)
    require(expand_x.shape[0] == most, name, "expand_x", f"must have {most} rows, has {expand_x.shape[0]}")
    require(expert_scales.shape == expert_ids.shape, name, "expert_scales", f"must be {list(expert_ids.shape)}")


@reference("npu_moe_distribute_combine_v2", rules=combine_rules, generations=("A2", "A3"))
def npu_moe_distribute_combine_v2(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    **options: Any,
) -> Tensor:
    """[tokens, hidden]: the weighted sum of a token's experts; undefined where ``x_active_mask`` is false."""
    group, (rows, chosen) = COMMUNICATORS[group_ep], expert_ids.shape
    pairs = assist_info_for_combine[: len(expand_x) * _ASSIST : _ASSIST].contiguous()
    total = torch.zeros((rows * chosen, expand_x.shape[1]))
    first = ep_rank_id * rows * chosen
    for results, owners in zip(group.gather_host(expand_x), group.gather_host(pairs), strict=True):
        mine = (owners >= first) & (owners < first + rows * chosen)
        total[owners[mine].long() - first] = results[mine].float()
    out = (total.view(rows, chosen, -1) * expert_scales.unsqueeze(2)).sum(1).to(expand_x.dtype)
    mask = options.get("x_active_mask")
    return out if mask is None else out.masked_fill(~mask[:, None], float("nan"))
