"""Decodes and draft tokens of Mamba 2: the convolution of a few tokens of each row, and their state space, in two
kernels. States are read from their pages and written to them in place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.core.batch import StateSegments
from kernels.devices.cuda.convolution import convolve_tokens, fits
from kernels.devices.state_cache import StateCache
from kernels.devices.state_space import SpaceInputs, StateSpace

__all__ = ["CudaStateSpace", "space_tokens"]

_LARGEST_STATE = 512  # numbers of a row of a head's state, which a program has in registers
_ROWS = 16  # of a head's state that a program updates


@triton.jit
def _step(
    convolved,
    steps,
    rates,
    skips,
    states,
    tokens,
    sources,
    targets,
    lengths,
    out,
    channels,
    count,
    heads: tl.constexpr,
    share: tl.constexpr,
    dim: tl.constexpr,
    state_dim: tl.constexpr,
    block: tl.constexpr,
    wide: tl.constexpr,
    writes_state: tl.constexpr,
    ragged: tl.constexpr,
):
    """Program (row, head, block of its numbers)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.program_id(2) * block + tl.arange(0, block)
    place = tl.arange(0, wide)
    of_head = at < dim
    of_state = place < state_dim
    both = of_head[:, None] & of_state[None, :]
    tile = (head * dim + at[:, None]) * state_dim + place[None, :]
    size = heads * dim * state_dim
    source = tl.load(sources + row)
    state = tl.load(states + source * size + tile, mask=both & (source != 0), other=0.0)
    rate, skip = tl.load(rates + head), tl.load(skips + head)
    length = count
    if ragged:
        length = tl.load(lengths + row).to(tl.int32)
    for index in range(length):
        token = tl.load(tokens + row * count + index)
        own = convolved + (row.to(tl.int64) * count + index) * channels
        shared = own + heads * dim + (head // share) * state_dim + place
        x = tl.load(own + head * dim + at, mask=of_head, other=0.0)
        writes = tl.load(shared, mask=of_state, other=0.0)
        reads = tl.load(shared + (heads // share) * state_dim, mask=of_state, other=0.0)
        step = tl.load(steps + token * heads + head)
        state = state * tl.exp(step * rate) + (x * step)[:, None] * writes[None, :]
        answers = tl.sum(state * reads[None, :], 1) + x * skip
        tl.store(out + (token * heads + head) * dim + at, answers.to(out.dtype.element_ty), mask=of_head)
    if writes_state:
        tl.store(states + tl.load(targets + row) * size + tile, state, mask=both)


def space_tokens(convolved: Tensor, inputs: SpaceInputs, states: Tensor, segment: StateSegments, out: Tensor) -> None:
    """A few tokens of each row: what ``convolved`` float32 [n * count, channels] has of them changes ``states`` float32
    [pages, heads, dim, state_dim], and the answers go to ``out`` [tokens, heads * dim]."""
    _, heads, dim, state_dim = states.shape
    count = segment.tokens.shape[1]
    groups = (convolved.shape[1] - heads * dim) // (2 * state_dim)
    _step[(len(segment.sources), heads, triton.cdiv(dim, _ROWS))](
        convolved,
        inputs.steps,
        inputs.rates,
        inputs.skips,
        states,
        segment.tokens,
        segment.sources,
        segment.sources if segment.targets is None else segment.targets,
        segment.sources if segment.lengths is None else segment.lengths,
        out,
        convolved.shape[1],
        count,
        heads,
        heads // groups,
        dim,
        state_dim,
        _ROWS,
        triton.next_power_of_2(state_dim),
        segment.targets is not None,
        segment.lengths is not None,
        num_warps=4,
    )


class CudaStateSpace(StateSpace):
    """The kernels for decodes and draft tokens; prompts run in plain torch."""

    def step(
        self,
        inputs: SpaceInputs,
        weight: Tensor,
        bias: Tensor | None,
        cache: StateCache,
        segment: StateSegments,
        out: Tensor,
    ) -> bool:
        """As ``StateSpace.step``."""
        if not fits(segment) or len(weight) < 2 or cache[1].shape[3] > _LARGEST_STATE:
            return False
        convolved = convolve_tokens(inputs.mixed, weight, cache[0], segment, bias)
        space_tokens(convolved, inputs, cache[1], segment, out)
        return True
