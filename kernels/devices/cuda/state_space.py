"""Decodes of Mamba 2: the convolution of a token, and its step of the state space, in two kernels. States are read from
their pages and written to them in place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.core.batch import StateSegments
from kernels.devices.cuda.convolution import convolve_token
from kernels.devices.state_cache import StateCache
from kernels.devices.state_space import SpaceInputs, StateSpace

__all__ = ["CudaStateSpace", "space_token"]

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
    out,
    channels,
    heads: tl.constexpr,
    share: tl.constexpr,
    dim: tl.constexpr,
    state_dim: tl.constexpr,
    block: tl.constexpr,
    wide: tl.constexpr,
):
    """Program (row, head, block of its numbers)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.program_id(2) * block + tl.arange(0, block)
    place = tl.arange(0, wide)
    of_head = at < dim
    of_state = place < state_dim
    both = of_head[:, None] & of_state[None, :]
    token = tl.load(tokens + row)
    own = convolved + row.to(tl.int64) * channels
    shared = own + heads * dim + (head // share) * state_dim + place
    x = tl.load(own + head * dim + at, mask=of_head, other=0.0)
    writes = tl.load(shared, mask=of_state, other=0.0)
    reads = tl.load(shared + (heads // share) * state_dim, mask=of_state, other=0.0)
    step = tl.load(steps + token * heads + head)
    tile = (head * dim + at[:, None]) * state_dim + place[None, :]
    size = heads * dim * state_dim
    source = tl.load(sources + row)
    state = tl.load(states + source * size + tile, mask=both & (source != 0), other=0.0)
    state = state * tl.exp(step * tl.load(rates + head)) + (x * step)[:, None] * writes[None, :]
    tl.store(states + tl.load(targets + row) * size + tile, state, mask=both)
    answers = tl.sum(state * reads[None, :], 1) + x * tl.load(skips + head)
    tl.store(out + (token * heads + head) * dim + at, answers.to(out.dtype.element_ty), mask=of_head)


def space_token(convolved: Tensor, inputs: SpaceInputs, states: Tensor, segment: StateSegments, out: Tensor) -> None:
    """One token of each row: what ``convolved`` float32 [n, channels] has of it changes ``states`` float32 [pages,
    heads, dim, state_dim], and the answers go to ``out`` [tokens, heads * dim]."""
    _, heads, dim, state_dim = states.shape
    groups = (convolved.shape[1] - heads * dim) // (2 * state_dim)
    _step[(len(segment.sources), heads, triton.cdiv(dim, _ROWS))](
        convolved,
        inputs.steps,
        inputs.rates,
        inputs.skips,
        states,
        segment.tokens,
        segment.sources,
        segment.targets,
        out,
        convolved.shape[1],
        heads,
        heads // groups,
        dim,
        state_dim,
        _ROWS,
        triton.next_power_of_2(state_dim),
        num_warps=4,
    )


class CudaStateSpace(StateSpace):
    """The kernels for decodes; other tokens run in plain torch."""

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
        several = segment.tokens.shape[1] > 1 or segment.targets is None
        if several or len(weight) < 2 or cache[1].shape[3] > _LARGEST_STATE:
            return False
        convolved = convolve_token(inputs.mixed, weight, cache[0], segment, bias)
        space_token(convolved, inputs, cache[1], segment, out)
        return True
