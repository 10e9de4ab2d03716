"""Decodes and draft tokens of gated delta nets: the convolution of a few tokens of each row, and the delta rule, in two
kernels. States are read from their pages and written to them in place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.core.batch import StateSegments
from kernels.devices.cuda.convolution import convolve_tokens, fits
from kernels.devices.delta_rule import DeltaInputs, DeltaRule
from kernels.devices.state_cache import StateCache

__all__ = ["CudaDeltaRule", "delta_tokens"]

_VALUES = 32  # numbers of a value head that a program updates
_LARGEST_KEY = 256  # numbers of a key head whose state's part fits in registers


@triton.jit
def _step(
    convolved,
    betas,
    decays,
    states,
    tokens,
    sources,
    targets,
    lengths,
    out,
    scale,
    channels,
    count,
    heads: tl.constexpr,
    share: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    k_block: tl.constexpr,
    v_block: tl.constexpr,
    by_channel: tl.constexpr,
    writes: tl.constexpr,
    ragged: tl.constexpr,
):
    """Program (row, value head, block of its numbers)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    key = tl.arange(0, k_block)
    value = tl.program_id(2) * v_block + tl.arange(0, v_block)
    of_key = key < k_dim
    of_value = value < v_dim
    both = of_key[:, None] & of_value[None, :]
    keys = (heads // share) * k_dim
    at = (head // share) * k_dim + key
    place = head * k_dim * v_dim + key[:, None] * v_dim + value[None, :]
    size = heads * k_dim * v_dim
    source = tl.load(sources + row)
    state = tl.load(states + source * size + place, mask=both & (source != 0), other=0.0)
    length = count
    if ragged:
        length = tl.load(lengths + row).to(tl.int32)
    for step in range(length):
        token = tl.load(tokens + row * count + step)
        own = convolved + (row.to(tl.int64) * count + step) * channels
        q = tl.load(own + at, mask=of_key, other=0.0)
        k = tl.load(own + keys + at, mask=of_key, other=0.0)
        v = tl.load(own + 2 * keys + head * v_dim + value, mask=of_value, other=0.0)
        q = q * (tl.rsqrt(tl.sum(q * q) + 1e-6) * scale)
        k = k * tl.rsqrt(tl.sum(k * k) + 1e-6)
        beta = tl.load(betas + token * heads + head)
        if by_channel:
            kept = tl.exp(tl.load(decays + (token * heads + head) * k_dim + key, mask=of_key, other=0.0))
            state = state * kept[:, None]
        else:
            state = state * tl.exp(tl.load(decays + token * heads + head))
        change = (v - tl.sum(k[:, None] * state, 0)) * beta
        state += k[:, None] * change[None, :]
        answers = tl.sum(q[:, None] * state, 0)
        tl.store(out + (token * heads + head) * v_dim + value, answers.to(out.dtype.element_ty), mask=of_value)
    if writes:
        tl.store(states + tl.load(targets + row) * size + place, state, mask=both)


def delta_tokens(
    convolved: Tensor, inputs: DeltaInputs, states: Tensor, segment: StateSegments, out: Tensor, share: int
) -> None:
    """A few tokens of each row: queries, keys and values in ``convolved`` float32 [n * count, channels] change
    ``states`` float32 [pages, heads, k_dim, v_dim], and the answers go to ``out`` [tokens, heads, v_dim]. ``share``:
    value heads of a key head."""
    _, heads, k_dim, v_dim = states.shape
    rows, count = segment.tokens.shape
    _step[(rows, heads, triton.cdiv(v_dim, _VALUES))](
        convolved,
        inputs.betas,
        inputs.decays,
        states,
        segment.tokens,
        segment.sources,
        segment.sources if segment.targets is None else segment.targets,
        segment.sources if segment.lengths is None else segment.lengths,
        out,
        k_dim**-0.5,
        convolved.shape[1],
        count,
        heads,
        share,
        k_dim,
        v_dim,
        triton.next_power_of_2(k_dim),
        _VALUES,
        inputs.decays.shape[-1] > 1,
        segment.targets is not None,
        segment.lengths is not None,
        num_warps=4,
    )


class CudaDeltaRule(DeltaRule):
    """The kernels for decodes and draft tokens; prompts run in plain torch."""

    def step(
        self, inputs: DeltaInputs, weight: Tensor, cache: StateCache, segment: StateSegments, out: Tensor, share: int
    ) -> bool:
        """As ``DeltaRule.step``."""
        if not fits(segment) or len(weight) < 2 or cache[1].shape[2] > _LARGEST_KEY:
            return False
        convolved = convolve_tokens(inputs.mixed, weight, cache[0], segment)
        delta_tokens(convolved, inputs, cache[1], segment, out, share)
        return True
