"""What schemes do to inputs, by PyTorch's operators, for products that are then taken in floats."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["clip_tokens", "settle_tokens"]

_TINY = torch.finfo(torch.float32).tiny


def clip_tokens(x: Tensor, share: Tensor) -> Tensor:
    """Numbers of ``x`` [tokens, inputs] held within ``share`` [1] of the largest of their token."""
    most = x.abs().amax(-1, keepdim=True) * share.to(x.dtype)
    return torch.minimum(torch.maximum(x, -most), most)


def settle_tokens(x: Tensor) -> Tensor:
    """``x`` [tokens, inputs] with each token rounded to 255 steps up to its largest, in its dtype. Not finite where
    something in the token is not."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).div_(127).clamp_(min=_TINY)
    return (wide / scales).round_().clamp_(-127, 127).mul_(scales).to(x.dtype)
