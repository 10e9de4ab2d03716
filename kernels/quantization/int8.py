"""Products with int8 weights by PyTorch's own operators, for devices without kernels of ours."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantization.weights import Int8Weight, StaticActivation

__all__ = ["Int8Linear", "round_tokens"]

_TINY = torch.finfo(torch.float32).tiny


def round_tokens(x: Tensor, weight: Int8Weight) -> tuple[Tensor, Tensor]:
    """``x`` [tokens, inputs] as the weight's activation says -> int8 of the same shape, and the scales f32 [tokens, 1]
    (or [1])."""
    wide = x.float()
    activation = weight.activation
    if isinstance(activation, StaticActivation):
        whole = (wide / activation.scale).round_()
        if activation.offset is not None:
            whole += activation.offset
        return whole.clamp_(-128, 127).to(torch.int8), activation.scale
    scales = wide.abs().amax(-1, keepdim=True).div_(127).clamp_(min=_TINY)
    return (wide / scales).round_().clamp_(-127, 127).to(torch.int8), scales


class Int8Linear:
    """``x @ weight.T + bias`` of whole numbers, by torch._int_mm, whose sums are exact.

    ``least_rows``: of tokens that the device's operator takes; fewer are filled up with zeros.
    """

    def __init__(self, weight: Int8Weight, bias: Tensor | None, least_rows: int = 1) -> None:
        self.weight = weight
        self.bias = bias
        self._least_rows = least_rows
        self._values = weight.values.t()

    def __call__(self, x: Tensor) -> Tensor:
        weight, rows = self.weight, len(x)
        whole, scales = round_tokens(x, weight)
        if rows < self._least_rows:
            whole = torch.nn.functional.pad(whole, (0, 0, 0, self._least_rows - rows))
        sums = torch._int_mm(whole, self._values)[:rows]
        if weight.correction is not None:
            sums = sums + weight.correction
        out = sums.float().mul_(scales * weight.scales)
        if self.bias is not None:
            out += self.bias.float()
        return out.to(x.dtype)
