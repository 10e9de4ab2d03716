"""Clipping and fake quantization of inputs in plain torch, for products that are computed in floats."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["clip_tokens", "fake_quantize_tokens"]

_TINY = torch.finfo(torch.float32).tiny


def clip_tokens(x: Tensor, share: Tensor) -> Tensor:
    """Clamp ``x`` [tokens, inputs] to ``share`` [1] of each token's largest magnitude."""
    amax = x.abs().amax(-1, keepdim=True) * share.to(x.dtype)
    return torch.minimum(torch.maximum(x, -amax), amax)


def fake_quantize_tokens(x: Tensor) -> Tensor:
    """Quantize each token of ``x`` [tokens, inputs] to 8 bits and dequantize it again, in the dtype of ``x``. A token
    that is not finite stays so."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).div_(127).clamp_(min=_TINY)
    return (wide / scales).round_().clamp_(-127, 127).mul_(scales).to(x.dtype)
