"""Causal convolutions of a few tokens of each row, with states that are read from their pages and written to them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.core.batch import StateSegments
from kernels.devices.convolution import Convolution

__all__ = ["MOST_TOKENS", "CudaConvolution", "convolve_tokens", "fits"]

MOST_TOKENS = 16
"""Tokens of a row that kernels of states run one after the other, 15 draft tokens and their root; more run in
chunks."""
_CHANNELS = 512  # that a program convolves


@triton.jit
def _convolve(
    mixed,
    weight,
    bias,
    states,
    tokens,
    sources,
    targets,
    lengths,
    out,
    channels,
    stride,
    count,
    taps: tl.constexpr,
    has_bias: tl.constexpr,
    activates: tl.constexpr,
    writes: tl.constexpr,
    ragged: tl.constexpr,
    block: tl.constexpr,
):
    """Program (row, block of channels): inputs before a row's first token are the state's ``taps - 1``."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < channels
    width = (taps - 1) * channels
    source = tl.load(sources + row)
    before = states + source * width + channel
    known = inside & (source != 0)
    length = count
    if ragged:
        length = tl.load(lengths + row).to(tl.int32)
    for at in range(length):
        total = tl.zeros([block], dtype=tl.float32)
        for tap in tl.static_range(taps):
            place = at + tap - (taps - 1)  # of the input among the row's tokens
            token = tl.load(tokens + row * count + place, mask=place >= 0, other=0)
            old = tl.load(before + (place + taps - 1) * channels, mask=known & (place < 0), other=0.0)
            new = tl.load(mixed + token * stride + channel, mask=inside & (place >= 0), other=0.0).to(tl.float32)
            total += (old + new) * tl.load(weight + tap * channels + channel, mask=inside, other=0.0)
        if has_bias:
            total += tl.load(bias + channel, mask=inside, other=0.0)
        if activates:
            total = total * tl.sigmoid(total)
        tl.store(out + (row.to(tl.int64) * count + at) * channels + channel, total, mask=inside)
    if writes:
        after = states + tl.load(targets + row) * width + channel
        for tap in tl.static_range(taps - 1):  # reads no input that it has overwritten, if the pages are the same
            place = length + tap - (taps - 1)
            token = tl.load(tokens + row * count + place, mask=place >= 0, other=0)
            old = tl.load(before + (place + taps - 1) * channels, mask=known & (place < 0), other=0.0)
            new = tl.load(mixed + token * stride + channel, mask=inside & (place >= 0), other=0.0).to(tl.float32)
            tl.store(after + tap * channels, old + new, mask=inside)


def fits(segment: StateSegments) -> bool:
    """Whether kernels run the segment."""
    return segment.tokens.shape[1] <= (MOST_TOKENS if segment.few else 1)


def convolve_tokens(
    mixed: Tensor,
    weight: Tensor,
    states: Tensor,
    segment: StateSegments,
    bias: Tensor | None = None,
    activate: bool = True,
) -> Tensor:
    """A few tokens of each row after the inputs in ``states`` float32 [pages, taps - 1, channels], to which they are
    written -> the sums, or silu of them (``activate``), float32 [n * count, channels]; undefined of padding. ``mixed``
    [tokens, channels], channels side by side; ``weight`` float32 [taps, channels], ``bias`` [channels]."""
    taps, channels = weight.shape
    rows, count = segment.tokens.shape
    out = states.new_empty(rows * count, channels)
    _convolve[(rows, triton.cdiv(channels, _CHANNELS))](
        mixed,
        weight,
        weight if bias is None else bias,
        states,
        segment.tokens,
        segment.sources,
        segment.sources if segment.targets is None else segment.targets,
        segment.sources if segment.lengths is None else segment.lengths,
        out,
        channels,
        mixed.stride(0),
        count,
        taps,
        bias is not None,
        activate,
        segment.targets is not None,
        segment.lengths is not None,
        _CHANNELS,
        num_warps=4,
    )
    return out


class CudaConvolution(Convolution):
    """The kernel for decodes and draft tokens; prompts run in plain torch."""

    def step(
        self, mixed: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, segment: StateSegments, out: Tensor
    ) -> bool:
        """As ``Convolution.step``."""
        if not fits(segment) or len(weight) < 2:
            return False
        results = convolve_tokens(mixed, weight, states, segment, bias, activate=False)
        segment.put(out, results.view(*segment.tokens.shape, -1))
        return True
