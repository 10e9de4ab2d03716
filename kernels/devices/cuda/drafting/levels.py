"""Kernels that choose each level of a draft's tree, and finally the tree (see ``tree_builder``).

Equal logits are ordered by id, equal scores by node, as in ``kernels.core.tree.Growth``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.drafting.candidates import merged, ranked, value_of

__all__ = ["choose_level", "choose_tree"]


@triton.jit
def _scored(
    keys,
    sums,
    ids,
    before,
    row,
    above: tl.constexpr,
    lines: tl.constexpr,
    width: tl.constexpr,
    width_block: tl.constexpr,
    parts: tl.constexpr,
    parts_block: tl.constexpr,
    keys_block: tl.constexpr,
    mapped: tl.constexpr,
):
    """Candidates after the ``above`` nodes of the previous level: scores along the paths and tokens [lines,
    width_block], the numbers of these nodes [lines], and which candidates are valid."""
    line = tl.arange(0, lines)
    there = line < above
    number = tl.full([lines], -1, tl.int64)
    passed = tl.zeros([lines], tl.float32)
    if above > 1:  # asked for before anything is waited for
        own = before + (row * width + line) * 2
        number = tl.load(own, mask=there, other=0)
        passed = tl.load(own + 1, mask=there, other=0).to(tl.int32).to(tl.float32, bitcast=True)
    score, token = merged(
        keys, sums, row * above + line, there, parts, parts_block, width, width_block, keys_block, lines
    )
    column = tl.arange(0, width_block)
    here = there[:, None] & (column < width)[None, :]
    token = token.to(tl.int64)
    if mapped:
        token = tl.load(ids + token, mask=here, other=0)
    if above > 1:
        score += passed[:, None]
    return score, token, number, here


@triton.jit
def _record(all_tokens, all_scores, all_parents, place, score, token, number, here, width: tl.constexpr, total, row,
            lines: tl.constexpr, width_block: tl.constexpr):  # fmt: skip
    """Store every candidate, for ``choose_tree``."""
    candidate = tl.arange(0, lines)[:, None] * width + tl.arange(0, width_block)[None, :]
    to = row * total + place + candidate
    tl.store(all_tokens + to, token, mask=here)
    tl.store(all_scores + to, score, mask=here)
    tl.store(all_parents + to, number[:, None] + tl.zeros([lines, width_block], tl.int64), mask=here)


@triton.jit(do_not_specialize=["nodes_stride", "place", "shift"])
def choose_level(
    keys,
    sums,
    ids,
    before,
    states,
    seen,
    tokens,
    after,
    next_states,
    next_seen,
    all_tokens,
    all_scores,
    all_parents,
    nodes,
    states_stride,
    nodes_stride,
    wide,
    total,
    place,
    shift,
    above: tl.constexpr,
    lines: tl.constexpr,
    width: tl.constexpr,
    width_block: tl.constexpr,
    parts: tl.constexpr,
    parts_block: tl.constexpr,
    keys_block: tl.constexpr,
    copied: tl.constexpr,
    mapped: tl.constexpr,
    pdl: tl.constexpr,
):
    """Node ``program_id(1)`` of a level. ``before``, ``after`` int64 [rows, width, 2]: the nodes' numbers, and the bits
    of their scores. ``place``: number of earlier candidates. ``shift``: nodes of the tree before this level."""
    row, node = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    line = tl.arange(0, lines)
    if above > 1:
        seen_of = tl.load(seen + row * width + line, mask=line < above, other=0)
    score, token, number, here = _scored(
        keys, sums, ids, before, row, above, lines, width, width_block, parts, parts_block, keys_block, mapped
    )
    if width == 1:  # a chain
        chosen = tl.sum(tl.sum(token, 1), 0)
        tl.store(tokens + row, chosen)
        tl.store(nodes + row * nodes_stride + shift + 1, chosen)
    else:
        if node == 0:
            _record(
                all_tokens, all_scores, all_parents, place, score, token, number, here, width, total, row, lines,
                width_block,
            )  # fmt: skip
        candidate = tl.arange(0, lines)[:, None] * width + tl.arange(0, width_block)[None, :]
        key = tl.where(here, ranked(score, candidate), -0x7FFFFFFFFFFFFFFF)
        result = tl.max(tl.max(key, 1), 0)
        for index in tl.static_range(1, width):
            key = tl.where((key == result) & (index <= node), -0x7FFFFFFFFFFFFFFF, key)
            result = tl.max(tl.max(key, 1), 0)
        best, chosen = value_of(result)
        origin = chosen // width
        tl.store(tokens + row * width + node, tl.sum(tl.sum(tl.where(candidate == chosen, token, 0), 1), 0))
        own = after + (row * width + node) * 2
        tl.store(own, (place + chosen).to(tl.int64))
        tl.store(own + 1, best.to(tl.int32, bitcast=True).to(tl.int64))
        bit = tl.full([], 1, tl.int64) << (shift + node).to(tl.int64)
        if above > 1:
            bit = bit | tl.sum(tl.where(line == origin, seen_of, 0), 0)
        tl.store(next_seen + row * width + node, bit)
        at = tl.arange(0, copied)
        for begin in range(0, wide, copied):
            there = begin + at < wide
            state = tl.load(states + (row * above + origin) * states_stride + begin + at, mask=there, other=0.0)
            tl.store(next_states + (row * width + node) * wide + begin + at, state, mask=there)


@triton.jit
def choose_tree(
    keys,
    sums,
    ids,
    before,
    all_tokens,
    all_scores,
    all_parents,
    ranks,
    nodes,
    parents,
    depths,
    bits,
    total: tl.constexpr,
    total_block: tl.constexpr,
    chunk: tl.constexpr,
    kept: tl.constexpr,
    steps: tl.constexpr,
    above: tl.constexpr,
    lines: tl.constexpr,
    width: tl.constexpr,
    width_block: tl.constexpr,
    parts: tl.constexpr,
    parts_block: tl.constexpr,
    keys_block: tl.constexpr,
    mapped: tl.constexpr,
    pdl: tl.constexpr,
):
    """Add the last level's candidates, then choose the root and the ``kept - 1`` best of all."""
    row = tl.program_id(0).to(tl.int64)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    score, token, number, here = _scored(
        keys, sums, ids, before, row, above, lines, width, width_block, parts, parts_block, keys_block, mapped
    )
    _record(
        all_tokens, all_scores, all_parents, total - above * width, score, token, number, here, width, total, row,
        lines, width_block,
    )  # fmt: skip
    tl.debug_barrier()
    candidate = tl.arange(0, total_block)
    there = candidate < total
    own = row * total + candidate
    value = tl.load(all_scores + own, mask=there, other=-float("inf"))
    rank = tl.zeros([total_block], tl.int32)  # number of better candidates
    for begin in range(0, total, chunk):
        other = begin + tl.arange(0, chunk)
        against = tl.load(all_scores + row * total + other, mask=other < total, other=-float("inf"))
        first = (against[None, :] > value[:, None]) | (
            (against[None, :] == value[:, None]) & (other[None, :] < candidate[:, None])
        )
        rank += tl.sum((first & (other < total)[None, :]).to(tl.int32), 1)
    tl.store(ranks + own, rank, mask=there)
    tl.debug_barrier()
    one = tl.full([total_block], 1, tl.int64)
    seen = one | (one << tl.minimum(rank + 1, 63).to(tl.int64))  # the root, and itself
    parent = tl.load(all_parents + own, mask=there, other=-1)
    above_it = parent
    depth = tl.full([total_block], 1, tl.int64)
    place = tl.zeros([total_block], tl.int32)
    for level in tl.static_range(1, steps):
        inner = above_it >= 0
        at = tl.load(ranks + row * total + above_it, mask=inner, other=-1) + 1
        if level == 1:
            place = at
        seen = seen | tl.where(inner, one << tl.minimum(at, 63).to(tl.int64), 0)
        depth += inner.to(tl.int64)
        above_it = tl.load(all_parents + row * total + above_it, mask=inner, other=-1)
    to = row * kept + rank + 1
    chosen = there & (rank + 1 < kept)
    tl.store(nodes + to, tl.load(all_tokens + own, mask=there, other=0), mask=chosen)
    tl.store(parents + to, place.to(tl.int64), mask=chosen)
    tl.store(depths + to, depth, mask=chosen)
    tl.store(bits + to, seen, mask=chosen)
    root = tl.full([], 0, tl.int64)
    tl.store(parents + row * kept, root - 1)
    tl.store(depths + row * kept, root)
    tl.store(bits + row * kept, root + 1)
