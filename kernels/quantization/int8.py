"""Products with int8 weights by PyTorch's own operators, for devices without kernels of ours."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantization.weights import Int8Weight, StaticActivation

__all__ = ["Int8Linear", "round_tokens"]

_TINY = torch.finfo(torch.float32).tiny


def round_tokens(x: Tensor, weight: Int8Weight) -> tuple[Tensor, Tensor]:
    """``x`` [tokens, inputs] as the weight's activation says -> int8 of the same shape, and the scales f32 [tokens, 1]:
    not finite where something in the token is not."""
    wide = x.float()
    activation, most = weight.activation, wide.abs().amax(-1, keepdim=True)
    if isinstance(activation, StaticActivation):
        whole = (wide / activation.scale).round_()
        if activation.offset is not None:
            whole += activation.offset
        scales = torch.where(most.isfinite(), activation.scale, most)
        return whole.clamp_(-128, 127).to(torch.int8), scales
    scales = most.div_(127).clamp_(min=_TINY)
    return (wide / scales).round_().clamp_(-127, 127).to(torch.int8), scales


class Int8Linear:
    """``x @ weight.T + bias`` of whole numbers, by torch._int_mm, whose sums are exact."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self._values = weight.values.t()

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight
        whole, scales = round_tokens(x, weight)
        sums = torch._int_mm(whole, self._values)
        if weight.correction is not None:
            sums = sums + weight.correction
        out = sums.float().mul_(scales * weight.scales)
        if self.bias is not None:
            out += self.bias.float()
        return out.to(x.dtype)
