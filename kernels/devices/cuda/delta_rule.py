"""Decodes and draft tokens of gated delta nets: the convolution of a few tokens of each row, and the delta rule, in two
kernels. States are read from their pages and written to them in place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.core.batch import StateSegments
from kernels.core.operators import Norm
from kernels.devices.cuda.convolution import convolve_tokens, fits
from kernels.devices.cuda.elementwise.norms import CudaNorm
from kernels.devices.cuda.launch import copying
from kernels.devices.delta_rule import DeltaChunks, DeltaInputs, DeltaRule
from kernels.devices.state_cache import StateCache

__all__ = ["CudaDeltaRule", "delta_tokens", "scan"]

_VALUES = 32  # numbers of a value head that a program updates
_SCANNED = (16, 32)  # numbers of a value head that a program scans, and with matrix instructions of a warp group
_KEYS = 64  # numbers of a key head whose products a scan makes at once; it has up to two such halves
_PRECISION = "tf32x3"  # of the products of a scan: about that of float32
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


@triton.jit
def _head_gates(b, a, factor, offset, betas, decays, b_stride, a_stride, heads: tl.constexpr, block: tl.constexpr):
    """Program (row): all of its heads."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, block)
    inside = head < heads
    beta = tl.sigmoid(tl.load(b + row * b_stride + head, mask=inside, other=0.0).to(tl.float32))
    x = tl.load(a + row * a_stride + head, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(offset + head, mask=inside, other=0.0)
    grown = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + grown  # log(1 + grown) would lose what is small beside 1
    soft = tl.where(total == 1.0, grown, tl.log(total) * grown / tl.where(total == 1.0, 1.0, total - 1.0))
    soft = tl.where(x > 20.0, x, soft)
    tl.store(betas + row * heads + head, beta, mask=inside)
    tl.store(decays + row * heads + head, soft * tl.load(factor + head, mask=inside, other=0.0), mask=inside)


@triton.jit
def _gated_norm(
    x,
    weight,
    gates,
    out,
    eps,
    gates_stride,
    heads: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
    sigmoid: tl.constexpr,
):
    """Program (row, head)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, block)
    inside = at < dim
    place = (row * heads + head) * dim + at
    value = tl.load(x + place, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    gamma = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide) / dim + eps) * gamma).to(value.dtype).to(tl.float32)
    gate = tl.load(gates + row * gates_stride + head * dim + at, mask=inside, other=0.0).to(tl.float32)
    by = tl.sigmoid(gate)
    if not sigmoid:
        by = by * gate
    tl.store(out + place, (normed * by).to(value.dtype), mask=inside)


@triton.jit(do_not_specialize=["chunks"])
def _scan(
    changes,
    reads,
    asks,
    scores,
    writes,
    forgets,
    states,
    out,
    chunks,
    chunk_stride,
    token_stride,
    number_stride,
    size: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    k_block: tl.constexpr,
    v_block: tl.constexpr,
    by_channel: tl.constexpr,
    precision: tl.constexpr,
):
    """Program (row and head, block of its values). ``changes`` and ``reads`` are parts of one result."""
    head = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, size)
    key = tl.arange(0, k_block)
    value = tl.program_id(1) * v_block + tl.arange(0, v_block)
    place = states + head * k_dim * v_dim + key[:, None] * v_dim + value[None, :]
    halves: tl.constexpr = k_dim > k_block  # products of all keys at once would need too many registers
    state = tl.load(place)
    if halves:
        other = tl.load(place + k_block * v_dim)
    for chunk in range(chunks):
        token = (head * chunks + chunk) * size + at
        solved = (head * chunks + chunk) * chunk_stride + at[:, None] * token_stride
        change = tl.load(changes + solved + value[None, :] * number_stride)
        read = reads + solved + key[None, :] * number_stride
        change -= tl.dot(tl.load(read), state, input_precision=precision)
        if halves:
            change -= tl.dot(tl.load(read + k_block * number_stride), other, input_precision=precision)
        ask = asks + token[:, None] * k_dim + key[None, :]
        answer = tl.dot(tl.load(ask), state, input_precision=precision)
        if halves:
            answer = tl.dot(tl.load(ask + k_block), other, answer, input_precision=precision)
        score = tl.load(scores + token[:, None] * size + at[None, :])
        answer = tl.dot(score, change, answer, input_precision=precision)
        tl.store(out + token[:, None] * v_dim + value[None, :], answer)
        write = writes + token[None, :] * k_dim + key[:, None]
        forget = forgets + head * chunks + chunk
        if by_channel:
            forget = forgets + (head * chunks + chunk) * k_dim + key
            state = state * tl.load(forget)[:, None]
            if halves:
                other = other * tl.load(forget + k_block)[:, None]
        else:
            state = state * tl.load(forget)
            if halves:
                other = other * tl.load(forget)
        state = tl.dot(tl.load(write), change, state, input_precision=precision)
        if halves:
            other = tl.dot(tl.load(write + k_block), change, other, input_precision=precision)
    tl.store(place, state)
    if halves:
        tl.store(place + k_block * v_dim, other)


def scan(chunks: DeltaChunks, state: Tensor) -> tuple[Tensor, Tensor]:
    """``DeltaRule.scan`` of sizes that are powers of two, from 16 on, and parts of one result. Overwrites the
    state."""
    rows, heads, count, size, v_dim = chunks.changes.shape
    k_dim, state = chunks.reads.shape[-1], state.contiguous()
    out = state.new_empty(rows, heads, count, size, v_dim)
    _scan[(rows * heads, v_dim // (block := min(_SCANNED[copying(state.device)], v_dim)))](
        chunks.changes,
        chunks.reads,
        chunks.asks.contiguous(),
        chunks.scores.contiguous(),
        chunks.writes.contiguous(),
        chunks.forgets.contiguous(),
        state,
        out,
        count,
        *chunks.changes.stride()[2:],
        size,
        k_dim,
        v_dim,
        min(_KEYS, k_dim),
        block,
        chunks.forgets.shape[-1] > 1,
        _PRECISION,
        num_warps=4,
        num_stages=1,
    )
    return out, state


def _is_tiled(number: int) -> bool:
    return number >= 16 and number & (number - 1) == 0


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

    def scan(self, chunks: DeltaChunks, state: Tensor) -> tuple[Tensor, Tensor]:
        """As ``DeltaRule.scan``."""
        _, heads, count, size, v_dim = chunks.changes.shape
        strides, keys = chunks.changes.stride(), chunks.reads.shape[-1]
        solved = strides == chunks.reads.stride() and strides[:2] == (heads * count * strides[2], count * strides[2])
        tiled = all(map(_is_tiled, (size, v_dim, keys))) and keys <= 2 * _KEYS
        return scan(chunks, state) if solved and tiled else super().scan(chunks, state)

    def head_gates(self, b: Tensor, a: Tensor, factor: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """As ``DeltaRule.head_gates``."""
        rows, heads = b.shape
        if not rows:
            return super().head_gates(b, a, factor, offset)
        betas, decays = factor.new_empty(rows, heads), factor.new_empty(rows, heads, 1)
        _head_gates[(rows,)](
            b,
            a,
            factor,
            offset,
            betas,
            decays,
            b.stride(0),
            a.stride(0),
            heads,
            triton.next_power_of_2(heads),
            num_warps=1,
        )
        return betas, decays

    def gated_norm(self, norm: Norm, out: Tensor, gates: Tensor, sigmoid: bool) -> Tensor:
        """As ``DeltaRule.gated_norm``."""
        rows, heads, dim = out.shape
        if not rows or not isinstance(norm, CudaNorm) or norm.weight.ndim > 1:
            return super().gated_norm(norm, out, gates, sigmoid)
        result = out.new_empty(rows, heads * dim)
        block = triton.next_power_of_2(dim)
        _gated_norm[(rows, heads)](
            out,
            norm.weight,
            gates,
            result,
            norm.eps,
            gates.stride(0),
            heads,
            dim,
            block,
            sigmoid,
            num_warps=max(1, min(4, block // 128)),
        )
        return result
