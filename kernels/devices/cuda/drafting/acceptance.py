"""Kernels between a pass that verifies and the drafting after it: the walk to the accepted nodes
(``kernels.speculation.verify``), and copying the input of the next draft (``kernels.speculation.early_draft``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.core.operators import Acceptance
from kernels.core.tree import DraftTree
from kernels.devices.cuda.launch import overlapping
from kernels.devices.draft_kernels import AcceptedBuffers

__all__ = ["accept", "copy_accepted"]

_COPIED = 2048


@triton.jit(do_not_specialize=["nodes_stride", "parents_stride", "table_stride", "found_stride"])
def accept_drafts_kernel(
    rows,
    sampled,
    nonfinite,
    nodes,
    parents,
    depths,
    bits,
    table,
    found,
    unsound,
    kept_rows,
    nodes_stride,
    parents_stride,
    table_stride,
    found_stride,
    block: tl.constexpr,
    depth: tl.constexpr,
    forced: tl.constexpr,
    shown: tl.constexpr,
    pdl: tl.constexpr,
):
    """Walk the tree of one row. ``forced``: take the path to the first of the deepest nodes within the depth, right or
    wrong. ``shown``: whether ``rows`` are in host memory, which no kernel writes and which is slow to read."""
    levels: tl.constexpr = depth + 1
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, block)
    if pdl:
        gdc_launch_dependents()
        if not shown:
            gdc_wait()
    slot = tl.load(rows + row * 4)
    start = tl.load(rows + row * 4 + 1)
    count = tl.load(rows + row * 4 + 2)
    first = tl.load(rows + row * 4 + 3)
    if shown:
        if pdl:
            gdc_wait()
        number = tl.arange(0, 4)
        header = tl.where(number == 0, slot, tl.where(number == 1, start, tl.where(number == 2, count, first)))
        tl.store(kept_rows + row * 4 + number, header)
    run = node < count
    own = row * parents_stride + node
    token = tl.load(nodes + row * nodes_stride + node, mask=run, other=-1).to(tl.int64)
    parent = tl.load(parents + own, mask=run, other=-1).to(tl.int32)
    below = tl.load(depths + own, mask=run, other=0).to(tl.int32)
    after = tl.load(sampled + first + node, mask=run, other=0)
    fails = tl.load(nonfinite + first + node, mask=run, other=0).to(tl.int32)
    max_depth = tl.max(below, 0)
    if forced:
        deepest = tl.where(run & (below <= depth), below * block + (block - 1 - node), -1)
        end = block - 1 - tl.max(deepest, 0) % block
        path = tl.load(bits + row * parents_stride + end)
        run = run & (((path >> tl.minimum(node, 63).to(tl.int64)) & 1) != 0)
    at = tl.full([], 0, tl.int32)
    accepted = tl.full([], 1, tl.int32)
    wrong = tl.full([], 0, tl.int32)
    going = tl.full([], 1, tl.int32)
    outcome = found + row * found_stride
    tokens = outcome + 2 + levels
    for level in tl.static_range(0, levels):
        here = node == at
        next_token = tl.sum(tl.where(here, after, 0), 0)
        failed = tl.max(tl.where(here, fails, 0), 0)
        wrong = tl.where(going > 0, tl.maximum(wrong, failed), wrong)
        tl.store(outcome + 2 + level, at.to(tl.int64))
        tl.store(unsound + row * found_stride * 8 + level, failed.to(tl.int8))
        if level < depth:
            right = (parent == at) & run & (node > 0)
            if not forced:
                right = right & (token == next_token)
            child = tl.min(tl.where(right, node, block), 0)
            going = tl.where(child < block, going, 0)
            at = tl.where(going > 0, child, at)
            accepted += going
            if forced:  # what was passed is what was accepted
                passed = tl.sum(tl.where(node == at, token, 0), 0)
                next_token = tl.where(going > 0, passed, next_token)
        tl.store(tokens + level, next_token)
        tl.store(table + slot * table_stride + start + 1 + level, next_token.to(tl.int32))
    tl.store(outcome, tl.where(wrong > 0, -accepted, accepted).to(tl.int64))
    tl.store(outcome + 1, max_depth.to(tl.int64))


def accept(
    tree: DraftTree, rows: Tensor, sampled: Tensor, nonfinite: Tensor, depth: int, forced: int, table: Tensor
) -> Acceptance:
    """See ``DraftKernels.accept``."""
    count, width = tree.tokens.shape
    depth = min(depth, forced - 1) if forced else depth
    levels, device = depth + 1, sampled.device
    result = torch.empty((count, Acceptance.width(levels)), dtype=torch.int64, device=device)
    shown = rows.device.type == "cpu"
    kept = torch.empty((count, 4), dtype=torch.int64, device=device) if shown else rows
    parents, depths, bits = tree.parents, tree.depths, tree.bits
    if not parents.stride() == depths.stride() == bits.stride() or parents.stride(1) != 1:
        parents, depths, bits = (each.contiguous() for each in (parents, depths, bits))
    nodes = tree.tokens if tree.tokens.stride(1) == 1 else tree.tokens.contiguous()
    pdl = overlapping(device)
    accept_drafts_kernel[(count,)](
        rows,
        sampled,
        nonfinite.view(torch.int8),
        nodes,
        parents,
        depths,
        bits,
        table,
        result,
        result[:, 2 + 2 * levels :].view(torch.int8),
        kept,
        nodes.stride(0),
        parents.stride(0),
        table.stride(0),
        result.stride(0),
        triton.next_power_of_2(max(width, depth + 1)),  # so that truncated trees use the same kernel
        depth,
        forced > 0,
        shown,
        pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return Acceptance(result, levels, kept)


_STRIDES = ["given_stride", "pages_stride", "host_stride", "outcome_stride", "tokens_stride"]


@triton.jit(do_not_specialize=["rows", "held", "given_pages", *_STRIDES])
def copy_accepted_kernel(
    given,
    pages,
    outcome,
    tokens,
    features,
    host,
    kept_outcome,
    kept_tokens,
    kept_features,
    rows,
    held,
    given_pages,
    given_stride,
    pages_stride,
    host_stride,
    outcome_stride,
    tokens_stride,
    features_stride,
    columns,
    wide,
    levels: tl.constexpr,
    levels_block: tl.constexpr,
    block: tl.constexpr,
    copied: tl.constexpr,
    pdl: tl.constexpr,
):
    """Copy a part of the features of one level of a row; the first part also copies all other data. ``held``: number of
    levels."""
    row, level, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    there = row < rows
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    inside = there & (level < held)
    node = tl.load(outcome + row * outcome_stride + 2 + level, mask=inside, other=0)
    place = tl.load(given + row * given_stride + 3, mask=there, other=0) + node
    if there:
        at = part * copied + tl.arange(0, copied)
        feature = tl.load(features + place * features_stride + at, mask=at < wide, other=0.0)
        tl.store(kept_features + (row * levels + level) * wide + at, feature, mask=at < wide)
    if (level == 0) & (part == 0):
        number = tl.arange(0, levels_block)
        some = tl.load(outcome + row * outcome_stride + number, mask=there & (number < held + 2), other=0)
        tl.store(kept_outcome + row * (levels + 2) + number, some, mask=number < levels + 2)
        some = tl.load(tokens + row * tokens_stride + number, mask=there & (number < held), other=0)
        tl.store(kept_tokens + row * levels + number, some, mask=there & (number < held))
        own = host + row * host_stride
        tl.store(own, tl.load(given + row * given_stride + 1))
        tl.store(own + 1, tl.load(given + row * given_stride))
        for begin in range(0, columns, block):
            column = begin + tl.arange(0, block)
            page = tl.load(pages + row * pages_stride + column, mask=column < given_pages, other=0)
            tl.store(own + 2 + column, page.to(tl.int64), mask=column < columns)


def copy_accepted(
    rows: Tensor, pages: Tensor, outcome: Tensor, tokens: Tensor, features: Tensor, to: AcceptedBuffers
) -> None:
    """See ``DraftKernels.copy_accepted``."""
    count, size = len(outcome), len(rows)
    columns, levels, wide = to.rows.shape[1] - 2, to.tokens.shape[1], features.shape[1]
    pdl = overlapping(outcome.device)
    copy_accepted_kernel[(size, levels, triton.cdiv(wide, _COPIED))](
        rows,
        pages,
        outcome,
        tokens,
        features,
        to.rows,
        to.outcome,
        to.tokens,
        to.features,
        count,
        tokens.shape[1],
        min(columns, pages.shape[1]),
        rows.stride(0),
        pages.stride(0),
        to.rows.stride(0),
        outcome.stride(0),
        tokens.stride(0),
        features.stride(0),
        columns,
        wide,
        levels,
        triton.next_power_of_2(levels + 2),
        256,
        _COPIED,
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
