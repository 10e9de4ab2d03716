"""What layers that keep a state of each sequence share.

A family declares the layers in ``ModelConfig.recurrent`` and their sizes in ``recurrence``. Such a layer projects all
tokens of a step at once, then ``BoundedRows.run`` runs it over the projections: ``advance_states`` calls it for each
segment, tokens [n, count] of n rows, on from their states, which it returns as they are afterwards. Batches, chunks of
prompts, prefixes and draft tokens need no more of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.caches import CacheGroup
from kernels.models.config import ModelConfig

__all__ = ["CausalConvolution", "caches", "inputs_after", "with_attention"]


class CausalConvolution:
    """A convolution of each channel over the last tokens, ``silu(weight * x + bias)``. ``weight`` [channels, 1, taps],
    the last tap is of the token itself. ``dilation``: tokens from one tap to the next. Its state is the ``kept`` inputs
    before, [kept, channels]: ``(taps - 1) * dilation``."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, activate: bool = True, dilation: int = 1) -> None:
        self.taps, self.dilation = weight.shape[-1], dilation
        self.kept = (self.taps - 1) * dilation
        self.weight = weight.squeeze(1).t().float().contiguous()
        self.bias = None if bias is None else bias.float()
        self._activate = activate

    def __call__(self, x: Tensor, state: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``x`` [n, count, channels] after ``state`` [n, kept, channels] -> results float32 [n, count, channels], the
        state after. ``lengths`` int64 [n]: tokens of each row before its padding; None: all are."""
        count, step = x.shape[1], self.dilation
        wide = torch.cat((state, x.to(state.dtype)), 1)
        result = wide[:, :count].float() * self.weight[0]
        for tap in range(1, self.taps):
            result.addcmul_(wide[:, tap * step : tap * step + count].float(), self.weight[tap])
        if self.bias is not None:
            result += self.bias
        return F.silu(result) if self._activate else result, inputs_after(wide, self.kept, lengths)


def inputs_after(wide: Tensor, kept: int, lengths: Tensor | None) -> Tensor:
    """The last ``kept`` inputs of each row, [n, kept, ...]. ``wide`` [n, kept + count, ...]: the inputs kept before a
    call, then its own. ``lengths``: as ``CausalConvolution``."""
    if lengths is None:
        return wide[:, wide.shape[1] - kept :]
    rows = torch.arange(len(wide), device=wide.device).unsqueeze(1)
    return wide[rows, lengths.unsqueeze(1) + torch.arange(kept, device=wide.device)]


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The states of the recurrent layers; none where there are no such layers."""
    if config.recurrence is None or not config.recurrent:
        return ()
    return (CacheGroup(config.recurrence.state(), tuple(sorted(config.recurrent))),)


def with_attention(config: ModelConfig, attention: tuple[CacheGroup, ...]) -> tuple[CacheGroup, ...]:
    """The caches of a model whose other layers have ``attention``, given as if all layers had it."""
    groups = (
        CacheGroup(group.spec, tuple(layer for layer in group.layers if layer not in config.recurrent))
        for group in attention
    )
    return (*(group for group in groups if group.layers), *caches(config))
