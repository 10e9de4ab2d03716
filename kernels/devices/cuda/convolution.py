"""Causal convolutions of one token of each row, with states that are read from their pages and written to them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.core.batch import StateSegments
from kernels.devices.convolution import Convolution

__all__ = ["CudaConvolution", "convolve_token"]

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
    out,
    channels,
    stride,
    taps: tl.constexpr,
    has_bias: tl.constexpr,
    activates: tl.constexpr,
    block: tl.constexpr,
):
    """Program (row, block of channels): the state's last ``taps - 1`` inputs and the token's own."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < channels
    width = (taps - 1) * channels
    token = tl.load(tokens + row)
    source = tl.load(sources + row)
    before = states + source * width + channel
    after = states + tl.load(targets + row) * width + channel
    known = inside & (source != 0)
    own = tl.load(mixed + token * stride + channel, mask=inside, other=0.0).to(tl.float32)
    total = own * tl.load(weight + (taps - 1) * channels + channel, mask=inside, other=0.0)
    for tap in tl.static_range(taps - 1):
        value = tl.load(before + tap * channels, mask=known, other=0.0)
        total += value * tl.load(weight + tap * channels + channel, mask=inside, other=0.0)
        if tap > 0:
            tl.store(after + (tap - 1) * channels, value, mask=inside)
    tl.store(after + (taps - 2) * channels, own, mask=inside)
    if has_bias:
        total += tl.load(bias + channel, mask=inside, other=0.0)
    if activates:
        total = total * tl.sigmoid(total)
    tl.store(out + row.to(tl.int64) * channels + channel, total, mask=inside)


def convolve_token(
    mixed: Tensor,
    weight: Tensor,
    states: Tensor,
    segment: StateSegments,
    bias: Tensor | None = None,
    activate: bool = True,
) -> Tensor:
    """One token of each row after the inputs in ``states`` float32 [pages, taps - 1, channels], in which it is written
    -> the sums, or silu of them (``activate``), float32 [n, channels]. ``mixed`` [tokens, channels], channels side by
    side; ``weight`` float32 [taps, channels], ``bias`` [channels]."""
    taps, channels = weight.shape
    rows = len(segment.sources)
    out = states.new_empty(rows, channels)
    _convolve[(rows, triton.cdiv(channels, _CHANNELS))](
        mixed,
        weight,
        weight if bias is None else bias,
        states,
        segment.tokens,
        segment.sources,
        segment.targets,
        out,
        channels,
        mixed.stride(0),
        taps,
        bias is not None,
        activate,
        _CHANNELS,
        num_warps=4,
    )
    return out


class CudaConvolution(Convolution):
    """The kernel for decodes; other tokens run in plain torch."""

    def step(
        self, mixed: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, segment: StateSegments, out: Tensor
    ) -> bool:
        """As ``Convolution.step``."""
        if segment.tokens.shape[1] > 1 or segment.targets is None or len(weight) < 2:
            return False
        results = convolve_token(mixed, weight, states, segment, bias, activate=False)
        out.index_copy_(0, segment.tokens[:, 0], results.to(out.dtype))
        return True
