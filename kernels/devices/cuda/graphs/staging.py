"""Writes the input of a graph of drafts in one kernel: tokens and places of trees on the device."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.core.tree import DraftTree
from kernels.devices.cuda.attention.verify import HEADER
from kernels.devices.cuda.launch import overlapping

__all__ = ["Staged", "stage"]


_STRIDES = ["state_stride", "nodes_stride", "depths_stride", "bits_stride", "before_stride"]


@triton.jit(do_not_specialize=["follows", "rows", "columns", *_STRIDES])
def stage_inputs_kernel(
    given,
    nodes,
    parents,
    depths,
    bits,
    token_ids,
    positions,
    index,
    state,
    verified_rows,
    parent_of,
    depth_of,
    seen,
    before,
    follows,
    rows,
    columns,
    state_stride,
    nodes_stride,
    depths_stride,
    bits_stride,
    before_stride,
    tokens: tl.constexpr,
    tokens_block: tl.constexpr,
    page_size: tl.constexpr,
    header: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    row = tl.program_id(0)
    node = tl.arange(0, tokens_block)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(given + row * (1 + columns))
    own = given + row * (1 + columns) + 1
    start = tl.load(own + header - 1) - tokens  # for a valid row: its cached tokens, without these
    if follows & (row < rows):
        accepted = tl.abs(tl.load(before + row * before_stride))
        start = (tl.load(verified_rows + row * 4 + 1) + accepted).to(tl.int32)
        tl.debug_barrier()  # the same place is written to below
    inside = node < tokens
    there = inside & (row < rows)
    token = tl.load(nodes + row * nodes_stride + node, mask=there, other=0)
    depth = tl.load(depths + row * depths_stride + node, mask=there, other=0)
    at = start + node
    page = tl.load(own + header + at // page_size, mask=there, other=0).to(tl.int64)
    place = row * tokens + node
    tl.store(token_ids + place, token.to(tl.int32), mask=there)
    tl.store(positions + place, start + depth, mask=there)
    tl.store(index + place, tl.where(there, page * page_size + at % page_size, place % page_size), mask=inside)
    path = tl.load(bits + row * bits_stride + node, mask=there, other=1)
    tl.store(seen + place, path, mask=inside)
    tl.store(parent_of + place, tl.load(parents + row * depths_stride + node, mask=there, other=-1), mask=inside)
    tl.store(depth_of + place, depth, mask=inside)
    tl.store(verified_rows + row * 4, slot.to(tl.int64))
    tl.store(verified_rows + row * 4 + 1, tl.where(row < rows, start, 0).to(tl.int64))
    tl.store(verified_rows + row * 4 + 2, tl.where(row < rows, tokens, 1).to(tl.int64))
    tl.store(verified_rows + row * 4 + 3, (row * tokens).to(tl.int64))
    for begin in range(0, columns, block):
        column = begin + tl.arange(0, block)
        number = tl.load(own + column, mask=column < columns, other=0)
        if follows & (row < rows):
            number = tl.where(column == header - 2, start, tl.where(column == header - 1, start + tokens, number))
        tl.store(state + row * state_stride + column, number, mask=column < columns)


class Staged(NamedTuple):
    """The input of a graph of drafts with ``size`` rows. As a ``ForwardBatch`` has them, ``token_ids`` int32,
    ``positions`` and ``index`` int64 [size * tokens]; ``state`` int32 [size, HEADER + columns or more], as
    ``DraftRows`` has it; ``rows`` int64 [size, 4], as for ``DraftKernels.accept``; padding rows have only a root and no
    request. ``tree``: the nodes' tokens are ``token_ids``.
    """

    token_ids: Tensor
    positions: Tensor
    index: Tensor  # type: ignore[assignment]  # replaces tuple.index
    state: Tensor
    rows: Tensor
    tree: DraftTree


def stage(given: Tensor, tree: DraftTree, to: Staged, page_size: int, before: Tensor | None = None) -> None:
    """``given`` int32 [size, 1 + HEADER + columns]: the slots, and the leading columns of ``to.state``; the first rows
    are the ``tree``'s.

    ``before`` int64 [size, ..]: as ``Acceptance.packed``, of the last pass that ``to`` was written for. The trees start
    after its accepted tokens; starts and ends in ``given`` are ignored.
    """
    size, columns = given.shape[0], given.shape[1] - 1
    tokens = to.tree.bits.shape[1]
    parents, depths = tree.parents, tree.depths
    if parents.stride() != depths.stride():
        parents, depths = parents.contiguous(), depths.contiguous()
    pdl = overlapping(to.token_ids.device)
    stage_inputs_kernel[(size,)](
        given,
        tree.tokens,
        parents,
        depths,
        tree.bits,
        to.token_ids,
        to.positions,
        to.index,
        to.state,
        to.rows,
        to.tree.parents,
        to.tree.depths,
        to.tree.bits,
        to.rows if before is None else before,
        int(before is not None),
        len(tree.tokens),
        columns,
        to.state.stride(0),
        tree.tokens.stride(0),
        depths.stride(0),
        tree.bits.stride(0),
        0 if before is None else before.stride(0),
        tokens,
        triton.next_power_of_2(tokens),
        page_size,
        HEADER,
        256,
        pdl,
        num_warps=2,
        launch_pdl=pdl,
    )
