"""Kernels between a draft's passes (``kernels.speculation.early_draft``).

Lengths are known before the first pass, so one kernel writes all positions, places and attention plans. Each level is
then chosen by one kernel after the one that finds candidates in parts. Its programs, one for each node, all make the
same choice; each writes its own node and the node's input state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.core.batch import ForwardBatch
from kernels.core.tree import DraftTree
from kernels.devices.cuda.attention.plan import AttentionPlan, DraftRows
from kernels.devices.cuda.attention.verify import HEADER
from kernels.devices.cuda.drafting.candidates import MAX_CANDIDATES, Parts, find_parts
from kernels.devices.cuda.drafting.levels import choose_level, choose_tree
from kernels.devices.cuda.launch import overlapping
from kernels.devices.draft_kernels import AcceptedTokens, TreeShape

__all__ = ["CudaTreeBuilder"]

_COPIED = 1024  # elements of a state copied at once
_AT_ONCE = 8192  # the same if one program copies all of it


@triton.jit(do_not_specialize=["host_stride", "outcome_stride", "columns", "rows"])
def draft_tree_enter_kernel(
    roots,
    pages,
    outcome,
    features,
    positions,
    index,
    plans,
    level_positions,
    level_index,
    parents,
    depths,
    bits,
    host_stride,
    outcome_stride,
    columns,
    rows,
    wide,
    steps: tl.constexpr,
    first: tl.constexpr,
    width: tl.constexpr,
    width_block: tl.constexpr,
    page_size: tl.constexpr,
    header: tl.constexpr,
    block: tl.constexpr,
    copied: tl.constexpr,
    pdl: tl.constexpr,
):
    """Write, for one row and level, the observed token and the plan and places of the level's nodes."""
    row, level = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    root = tl.load(roots + row * host_stride)
    accepted = tl.load(outcome + row * outcome_stride)
    count = tl.maximum(tl.abs(accepted), 1)
    own = pages + row * host_stride
    position = root + level
    page = tl.load(own + tl.minimum(position // page_size, columns - 1))
    place = row * (steps + 1) + level
    tl.store(positions + place, position)
    # Rejected tokens are written to the null page.
    tl.store(index + place, tl.where(level < count, page * page_size + position % page_size, level % page_size))
    if accepted <= 0:  # a row that is not finite leaves nothing behind
        at = tl.arange(0, copied)
        for begin in range(0, wide, copied):
            nothing = tl.zeros([copied], features.dtype.element_ty)
            tl.store(features + place * wide + begin + at, nothing, mask=begin + at < wide)
    if width == 1:  # the tree is known
        tl.store(parents + place, (level - 1).to(tl.int64))
        tl.store(depths + place, level.to(tl.int64))
        tl.store(bits + place, (tl.full([], 2, tl.int64) << level.to(tl.int64)) - 1)
    if level < steps:
        begins = root + count + first
        start = begins + width * (level - 1)
        tokens = tl.where(level == 0, steps + 1, width)
        seen = tl.where(level == 0, root, begins if width > 1 else start)
        begin = tl.where(level == 0, root, start)
        state = plans + (level * rows + row) * (header + columns)
        tl.store(state, (row * tokens).to(tl.int32))
        tl.store(state + 1, tokens.to(tl.int32))
        tl.store(state + 2, seen.to(tl.int32))
        tl.store(state + 3, (begin + tokens).to(tl.int32))
        column = tl.arange(0, block)
        for offset in range(0, columns, block):
            there = offset + column < columns
            held = tl.load(own + offset + column, mask=there, other=0)
            tl.store(state + header + offset + column, held.to(tl.int32), mask=there)
        if level > 0:
            node = tl.arange(0, width_block)
            there = node < width
            to = (level * rows + row) * width + node
            at_node = start + node
            page_of = tl.load(own + tl.minimum(at_node // page_size, columns - 1), mask=there, other=0)
            tl.store(level_positions + to, begins + (level - 1) + tl.zeros([width_block], tl.int64), mask=there)
            tl.store(level_index + to, page_of * page_size + at_node % page_size, mask=there)


@triton.jit(do_not_specialize=["host_stride", "outcome_stride", "tokens_stride", "nodes_stride"])
def draft_tree_start_kernel(
    seen,
    slots,
    outcome,
    tokens,
    kept,
    states,
    nodes,
    host_stride,
    outcome_stride,
    tokens_stride,
    nodes_stride,
    seen_stride,
    kept_stride,
    wide,
    levels: tl.constexpr,
    copied: tl.constexpr,
    pdl: tl.constexpr,
):
    """Copy the state of each row's last token, also by slot, and the token."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * copied + tl.arange(0, copied)
    there = at < wide
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    last = tl.maximum(tl.abs(tl.load(outcome + row * outcome_stride)), 1) - 1
    slot = tl.load(slots + row * host_stride)
    state = tl.load(seen + (row * levels + last) * seen_stride + at, mask=there, other=0.0)
    tl.store(kept + slot * kept_stride + at, state, mask=there)
    tl.store(states + row * wide + at, state, mask=there)
    if part == 0:
        tl.store(nodes + row * nodes_stride, tl.load(tokens + row * tokens_stride + last))


class CudaTreeBuilder:
    """``TreeBuilder`` on a GPU; ``fits`` must hold."""

    def __init__(self, shape: TreeShape, given: AcceptedTokens) -> None:
        self._shape, self._given = shape, given
        rows, levels = given.tokens.shape
        width, steps, device = shape.topk, shape.steps, given.tokens.device
        self._rows, self._levels, self._device, self._pdl = rows, levels, device, overlapping(device)
        self._columns = given.pages.shape[1]
        self._plans = torch.empty((steps, rows, HEADER + self._columns), dtype=torch.int32, device=device)
        self._positions, self._index = torch.empty((2, steps, rows * width), dtype=torch.int64, device=device)
        self._nodes = torch.empty((rows, shape.kept), dtype=torch.int64, device=device)
        # Parents, depths and bits.
        self._lines = tuple(torch.empty_like(self._nodes) for _ in range(3))  # each aligned as any tensor of its own
        self._all = torch.empty((2, rows, shape.candidates), dtype=torch.int64, device=device)  # tokens, parents
        self._scores = torch.empty((rows, shape.candidates), dtype=torch.float32, device=device)
        self._before = self._seen = self._all  # of the last level; nothing reads them in the first
        self._step = self._met = 0  # levels, and candidates of all of them

    @staticmethod
    def fits(shape: TreeShape) -> bool:
        return shape.topk <= MAX_CANDIDATES

    def observe(self) -> ForwardBatch:
        shape, given = self._shape, self._given
        positions, index = torch.empty((2, self._rows * self._levels), dtype=torch.int64, device=self._device)
        wide = given.features.shape[1]
        assert given.features.stride(0) == wide, "one block of numbers"
        assert given.roots.stride(0) == given.slots.stride(0) == given.pages.stride(0), "of one tensor"
        draft_tree_enter_kernel[(self._rows, self._levels)](
            given.roots,
            given.pages,
            given.outcome,
            given.features,
            positions,
            index,
            self._plans,
            self._positions,
            self._index,
            *self._lines,
            given.pages.stride(0),
            given.outcome.stride(0),
            self._columns,
            self._rows,
            wide,
            shape.steps,
            shape.first,
            shape.topk,
            triton.next_power_of_2(shape.topk),
            shape.page_size,
            HEADER,
            256,
            _COPIED,
            self._pdl,
            num_warps=4,
            launch_pdl=self._pdl,
        )
        tokens = given.tokens.reshape(-1)
        return ForwardBatch(tokens, positions, index, self._planned(0, self._levels, None), given.features)

    def start(self, seen: Tensor) -> Tensor:
        given, wide = self._given, seen.shape[1]
        states = seen.new_empty((self._rows, wide))
        draft_tree_start_kernel[(self._rows, triton.cdiv(wide, _COPIED))](
            seen,
            given.slots,
            given.outcome,
            given.tokens,
            given.states,
            states,
            self._nodes,
            given.slots.stride(0),
            given.outcome.stride(0),
            given.tokens.stride(0),
            self._nodes.stride(0),
            seen.stride(0),
            given.states.stride(0),
            wide,
            self._levels,
            _COPIED,
            self._pdl,
            num_warps=4,
            launch_pdl=self._pdl,
        )
        return states

    def level(self, logits: Tensor, states: Tensor) -> ForwardBatch:
        tokens, states = self._choose(logits, states)
        step, width = self._step, self._shape.topk
        plans = self._planned(step, width, self._seen if width > 1 else None)
        return ForwardBatch(tokens, self._positions[step], self._index[step], plans, states)

    def _choose(self, logits: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The next level's tokens and input states."""
        width, rows, wide = self._shape.topk, self._rows, states.shape[1]
        parts, above = find_parts(logits, width), len(logits) // rows
        tokens = torch.empty(rows * width, dtype=torch.int64, device=self._device)
        before, seen, following = self._before, self._seen, states
        after, next_seen = before, seen
        if width > 1:
            after = torch.empty((rows, width, 2), dtype=torch.int64, device=self._device)
            next_seen = torch.empty((rows, width), dtype=torch.int64, device=self._device)
            following = states.new_empty((rows * width, wide))
        choose_level[(rows, width)](
            parts.keys,
            parts.sums,
            tokens if self._shape.ids is None else self._shape.ids,
            before,
            states,
            seen,
            tokens,
            after,
            following,
            next_seen,
            self._all[0],
            self._scores,
            self._all[1],
            self._nodes,
            states.stride(0),
            self._nodes.stride(0),
            wide,
            self._shape.candidates,
            self._met,
            width * self._step,
            *self._sizes(parts, above),
            min(_AT_ONCE, triton.next_power_of_2(wide)),
            self._shape.ids is not None,
            self._pdl,
            num_warps=4,
            launch_pdl=self._pdl,
        )
        self._step, self._met = self._step + 1, self._met + above * width
        self._before, self._seen = after, next_seen
        return tokens, following

    def tree(self, logits: Tensor) -> DraftTree:
        shape, rows = self._shape, self._rows
        parents, depths, bits = self._lines
        if shape.topk == 1:
            self._choose(logits, logits)
            return DraftTree(self._nodes, parents, depths, bits, True)
        parts, above = find_parts(logits, shape.topk), len(logits) // rows
        total = shape.candidates
        block = triton.next_power_of_2(total)
        ranks = torch.empty((rows, total), dtype=torch.int32, device=self._device)
        choose_tree[(rows,)](
            parts.keys,
            parts.sums,
            ranks if shape.ids is None else shape.ids,
            self._before,
            self._all[0],
            self._scores,
            self._all[1],
            ranks,
            self._nodes,
            parents,
            depths,
            bits,
            total,
            block,
            min(block, max(1, 8192 // block)),
            shape.kept,
            shape.steps,
            *self._sizes(parts, above),
            shape.ids is not None,
            self._pdl,
            num_warps=4,
            launch_pdl=self._pdl,
        )
        return DraftTree(self._nodes, parents, depths, bits)

    def _sizes(self, parts: Parts, above: int) -> tuple[int, ...]:
        count, count_block, width, width_block, keys_block = parts.sizes
        return above, triton.next_power_of_2(above), width, width_block, count, count_block, keys_block

    def _planned(self, level: int, tokens: int, bits: Tensor | None) -> dict[int, AttentionPlan]:
        rows = DraftRows(self._plans[level], bits, tokens, self._columns * self._shape.page_size)
        return {window: AttentionPlan(None, None, window, rows) for window in self._shape.windows}
