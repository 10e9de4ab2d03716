"""What a graph of drafts reads, written in one kernel: tokens and places of trees that are on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cuda.launch import overlapping
from kernels.cuda.verify import HEADER
from kernels.speculative.tree import DraftTree

__all__ = ["stage"]


@triton.jit(do_not_specialize=["rows", "columns", "state_stride", "nodes_stride", "depths_stride", "bits_stride"])
def _stage(
    given,
    nodes,
    depths,
    bits,
    token_ids,
    positions,
    index,
    state,
    seen,
    rows,
    columns,
    state_stride,
    nodes_stride,
    depths_stride,
    bits_stride,
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
    own = given + row * columns
    start = tl.load(own + header - 1) - tokens  # of a row that there is: its tokens in the cache, less these
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
    for begin in range(0, columns, block):
        column = begin + tl.arange(0, block)
        number = tl.load(own + column, mask=column < columns, other=0)
        tl.store(state + row * state_stride + column, number, mask=column < columns)


def stage(
    given: Tensor,
    tree: DraftTree,
    token_ids: Tensor,
    positions: Tensor,
    index: Tensor,
    state: Tensor,
    seen: Tensor,
    page_size: int,
) -> None:
    """``given`` int32 [size, HEADER + columns], as ``DraftRows.state``, of which the first rows are the ``tree``'s; it
    goes to the leading columns of ``state``. Written as a ``ForwardBatch`` has them: ``token_ids`` int32, ``positions``
    and ``index`` int64 [size * tokens], and ``seen`` int64 [size, tokens], what each node sees.
    """
    size, columns = given.shape
    tokens = seen.shape[1]
    pdl = overlapping(token_ids.device)
    _stage[(size,)](
        given,
        tree.tokens,
        tree.depths,
        tree.bits,
        token_ids,
        positions,
        index,
        state,
        seen,
        len(tree.tokens),
        columns,
        state.stride(0),
        tree.tokens.stride(0),
        tree.depths.stride(0),
        tree.bits.stride(0),
        tokens,
        triton.next_power_of_2(tokens),
        page_size,
        HEADER,
        256,
        pdl,
        num_warps=2,
        launch_pdl=pdl,
    )
