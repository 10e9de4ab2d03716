"""The experts of each token, the pairs of tokens and experts in the order of experts, and the sum of their results.

Three kernels for what is a chain of some fifteen in plain torch, most of which take a few microseconds for any number
of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.devices.cuda.launch import is_precompiling
from kernels.devices.experts import EPSILON, Routing, choose_places

__all__ = ["RoutedPairs", "choose_experts", "route", "sum_experts"]

_MAX_PAIRS = 8192
"""With more pairs, torch's radix sort is faster than one pass over all of them for each expert."""
_PAIRS = 1024  # that a program reads at a time
_HIDDEN = 512  # numbers of a token that a program sums


@dataclass(frozen=True)
class RoutedPairs:
    """``weights`` float32 and ``experts`` int32 [tokens, chosen]: of each token. Pair ``token * chosen + i`` is the
    token's i-th expert. ``order`` int32 [pairs]: the pairs by expert; ``counts`` int32 [experts]: pairs of each.
    ``total``: experts that the router knows."""

    weights: Tensor
    experts: Tensor
    order: Tensor
    counts: Tensor
    total: int


@triton.jit
def route_kernel(
    logits,
    correction,
    dispatch,
    weights,
    chosen_experts,
    stride,
    scale,
    count: tl.constexpr,
    block: tl.constexpr,
    chosen: tl.constexpr,
    chosen_block: tl.constexpr,
    sigmoid: tl.constexpr,
    corrected: tl.constexpr,
    normalized: tl.constexpr,
    groups: tl.constexpr,
    groups_block: tl.constexpr,
    top_groups: tl.constexpr,
    pair_sum: tl.constexpr,
    epsilon: tl.constexpr,
    rows: tl.constexpr,
    start: tl.constexpr,
    local: tl.constexpr,
):
    """One token. ``block``: a power of two from ``count`` on. ``dispatch`` int32 [rows, count]: the places of experts,
    if there are ``rows``. With ``local`` those are numbered from ``start`` on, and all but the ``local`` ones that
    follow are ``local``."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, block)
    there = expert < count
    logit = tl.load(logits + token * stride + expert, mask=there, other=-float("inf")).to(tl.float32)
    nonfinite = tl.max((logit != logit).to(tl.int32), 0) > 0
    logit = tl.where(logit != logit, -float("inf"), logit)
    if sigmoid:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    else:
        shares = tl.exp(logit - tl.max(logit, 0))
        scores = shares / tl.sum(shares, 0)
    ranked = scores
    if corrected:
        ranked += tl.load(correction + expert, mask=there, other=0.0)
    ranked = tl.where(there & (ranked == ranked), ranked, -float("inf"))
    if groups > 1:
        each: tl.constexpr = count // groups
        group = tl.arange(0, groups_block)
        mine = (expert // each)[:, None] == group[None, :]
        members = tl.where(mine & there[:, None], ranked[:, None], -float("inf"))
        best = tl.max(members, 0)
        if pair_sum:
            first = tl.argmax(members, 0)
            best += tl.max(tl.where(expert[:, None] == first[None, :], -float("inf"), members), 0)
        best = tl.where(group < groups, best, -float("inf"))
        taken = tl.zeros([groups_block], tl.int32)
        for _ in tl.static_range(top_groups):
            top = tl.argmax(tl.where(taken > 0, -float("inf"), best), 0)
            taken = tl.where(group == top, 1, taken)
        allowed = tl.max(tl.where(mine & (taken > 0)[None, :], 1, 0), 1) > 0
        ranked = tl.where(allowed, ranked, -float("inf"))
    place = tl.arange(0, chosen_block)
    result = tl.zeros([chosen_block], tl.int32)
    weight = tl.zeros([chosen_block], tl.float32)
    left = there
    for number in tl.static_range(chosen):
        # An expert that is left, whatever its rank: -inf may be all that there is.
        top = tl.argmax(tl.where(left, tl.maximum(ranked, -3.0e38), -float("inf")), 0)
        result = tl.where(place == number, top, result)
        weight = tl.where(place == number, tl.sum(tl.where(expert == top, scores, 0.0), 0), weight)
        left = left & (expert != top)
    if normalized:
        weight = weight / (tl.sum(weight, 0) + epsilon)
    weight = tl.where(nonfinite, float("nan"), weight * scale)
    if rows > 0:
        result = tl.load(dispatch + (token % rows) * count + result, mask=place < chosen, other=0)
    if local > 0:
        result = tl.where((result >= start) & (result < start + local), result - start, local)
    tl.store(weights + token * chosen + place, weight, mask=place < chosen)
    tl.store(chosen_experts + token * chosen + place, result, mask=place < chosen)


@triton.jit(do_not_specialize=["pairs"])
def sort_pairs_kernel(experts, order, counts, pairs, block: tl.constexpr):
    """One expert: its pairs in ascending order, behind those of the experts before it."""
    expert = tl.program_id(0)
    at = tl.arange(0, block)
    before = tl.zeros([block], tl.int32)
    own = tl.zeros([block], tl.int32)
    for begin in range(0, pairs, block):
        of = tl.load(experts + begin + at, mask=begin + at < pairs, other=1 << 30)
        before += (of < expert).to(tl.int32)
        own += (of == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(own, 0))
    place = tl.sum(before, 0)
    for begin in range(0, pairs, block):
        of = tl.load(experts + begin + at, mask=begin + at < pairs, other=1 << 30)
        mine = (of == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, begin + at, mask=mine > 0)
        place += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["hidden"])
def sum_experts_kernel(
    results, weights, experts, out, hidden, chosen: tl.constexpr, local: tl.constexpr, block: tl.constexpr
):
    """``local``: experts from there on have no results; 0: all have."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for number in tl.static_range(chosen):
        pair = token * chosen + number
        there = at < hidden
        if local > 0:
            there = there & (tl.load(experts + pair) < local)
        result = tl.load(results + pair * hidden + at, mask=there, other=0.0).to(tl.float32)
        total += result * tl.load(weights + pair)
    tl.store(out + token * hidden + at, total.to(out.dtype.element_ty), mask=at < hidden)


def route(logits: Tensor, routing: Routing) -> RoutedPairs:
    """``logits`` [tokens, experts]. A token whose logits are not all numbers has NaN weights of some experts. With
    ``Routing.local`` experts are numbered as ``choose_experts`` does, and those elsewhere are counted last."""
    count = logits.shape[1] if routing.local is None else len(routing.local) + 1
    return _ordered(*choose_experts(logits, routing), count, logits.shape[1])


def route_places(weights: Tensor, places: Tensor, routing: Routing, count: int) -> RoutedPairs:
    """``route`` of pairs whose experts are chosen: ``weights`` float32, ``places`` int32 [tokens, chosen]. ``count``:
    experts here."""
    local = routing.local or range(count)
    here = (places >= local.start) & (places < local.stop)
    experts = torch.where(here, places - local.start, count).to(torch.int32)
    known = count if routing.local is None else count + 1
    return _ordered(weights.contiguous(), experts.contiguous(), known, count * routing.parts)


def choose_experts(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """``choose_places`` in int32; with ``Routing.local`` numbered from the first of these on, and those elsewhere with
    their number."""
    tokens, count = logits.shape
    chosen, correction = routing.chosen, routing.correction
    if routing.in_torch:
        weights, found = choose_places(logits, routing)
        if routing.local is not None:
            here = (found >= routing.local.start) & (found < routing.local.stop)
            found = torch.where(here, found - routing.local.start, len(routing.local))
        return weights, found.to(torch.int32)
    weights = torch.empty((tokens, chosen), dtype=torch.float32, device=logits.device)
    local, dispatch = routing.local or range(0), routing.dispatch
    # While kernels are compiled, and not launched, torch must not count experts that nothing has chosen.
    allocate = torch.zeros if is_precompiling() else torch.empty
    experts = allocate((tokens, chosen), dtype=torch.int32, device=logits.device)
    route_kernel[(tokens,)](
        logits,
        logits if correction is None else correction,
        weights if dispatch is None else dispatch.table,
        weights,
        experts,
        logits.stride(0),
        routing.scale,
        count,
        triton.next_power_of_2(count),
        chosen,
        triton.next_power_of_2(chosen),
        routing.scores == "sigmoid",
        correction is not None,
        routing.normalized,
        routing.groups,
        triton.next_power_of_2(routing.groups),
        routing.top_groups,
        routing.pair_sum,
        EPSILON,
        0 if dispatch is None else len(dispatch.table),
        local.start,
        len(local),
        num_warps=4 if routing.groups > 1 else 1,
    )
    return weights, experts


def _ordered(weights: Tensor, experts: Tensor, count: int, total: int) -> RoutedPairs:
    """``weights``, ``experts`` [tokens, chosen] of ``count`` experts."""
    pairs, flat = experts.numel(), experts.view(-1)
    if pairs > _MAX_PAIRS:
        order = flat.argsort(stable=True).to(torch.int32)
        counts = torch.zeros(count, dtype=torch.int32, device=flat.device)
        counts.index_add_(0, flat, torch.ones_like(order))
        return RoutedPairs(weights, experts, order, counts, total)
    order, counts = torch.empty_like(flat), flat.new_empty(count)
    sort_pairs_kernel[(count,)](
        flat, order, counts, pairs, min(_PAIRS, max(32, triton.next_power_of_2(pairs))), num_warps=4
    )
    return RoutedPairs(weights, experts, order, counts, total)


def sum_experts(results: Tensor, weights: Tensor, experts: Tensor | None = None, local: int = 0) -> Tensor:
    """``results`` [pairs, hidden] of tokens' experts, times ``weights`` [tokens, chosen] -> [tokens, hidden]. Of the
    ``experts`` int32 [tokens, chosen] only those below ``local`` have results; None: all have."""
    tokens, chosen = weights.shape
    hidden = results.shape[1]
    out = results.new_empty((tokens, hidden))
    sum_experts_kernel[(tokens, triton.cdiv(hidden, _HIDDEN))](
        results, weights, weights if experts is None else experts, out, hidden, chosen, local, _HIDDEN, num_warps=4
    )
    return out
