"""Draws tokens in fixed shapes, which graphs capture: what ``kernels.sampling`` computes for rows without edits of
logits, by torch's operators."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch_npu
from torch import Tensor

from kernels.core.noise import host_keys_at, noise_over_all
from kernels.core.operators import Draws
from kernels.devices.npu_triton.selection import pack_draws

__all__ = ["DRAW_NUMBERS", "DrawTokens", "KernelDraw", "TorchDraw", "draws_at"]

DRAW_NUMBERS = 6
"""The width of ``draws_at``."""

_ALL, _TOP_P, _TOP_K = "all", "top-p", "top-k"
_MAX_K = 1024
"""The largest k of npu_top_k_top_p."""
_MAX_ROWS = 4096
"""Rows of the fused attention."""


class DrawTokens(Protocol):
    """Draws a token of each row. ``forms``: those that graphs capture one by one."""

    @property
    def forms(self) -> tuple[str, ...]: ...

    def form(self, draws: Draws) -> str | None:
        """The form that draws these rows; None: none does."""
        ...

    def __call__(self, form: str, logits: Tensor, draws: Tensor) -> Tensor:
        """Tokens int64 [rows] of ``logits`` [rows, vocab]; any in rows that are greedy or not finite. ``draws`` int32
        [rows, 6]: as ``draws_at`` makes them."""
        ...


def draws_at(draws: Draws, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """``pack_draws`` [rows, 6] with the keys of ``positions`` [rows] in place of the seeds', and a top-k of 1 in greedy
    rows."""
    result: npt.NDArray[np.int32] = pack_draws(draws)
    result[:, :2] = host_keys_at(draws["keys"], positions)
    result[draws["temperature"] == 0, 5] = 1
    return result


class KernelDraw:
    """Our own kernel, for all rows."""

    def __init__(self, device: torch.device) -> None:
        self.forms = (_ALL,)
        self._origin = torch.zeros(_MAX_ROWS, dtype=torch.int64, device=device)  # keys are those of the positions

    def form(self, draws: Draws) -> str | None:
        """As ``DrawTokens``."""
        return _ALL

    def __call__(self, form: str, logits: Tensor, draws: Tensor) -> Tensor:
        """As ``DrawTokens``."""
        tokens: Tensor = torch.ops.troupe.draw(logits.contiguous(), draws, self._origin[: len(logits)])[0]
        return tokens


class TorchDraw:
    """``cuts``: whether the device has npu_top_k_top_p. It takes a k of 1 to 1024 in all rows, or in none."""

    def __init__(self, cuts: bool) -> None:
        self.forms = (_ALL, _TOP_P, _TOP_K) if cuts else (_ALL,)

    def form(self, draws: Draws) -> str | None:
        """As ``DrawTokens``."""
        sampled = draws[draws["temperature"] > 0]
        top_k = sampled["top_k"]
        if top_k.any():
            fits = _TOP_K in self.forms and top_k.min() > 0 and top_k.max() <= _MAX_K
            return _TOP_K if fits else None
        if (sampled["top_p"] >= 1).all() and np.isneginf(sampled["log_min_p"]).all():
            return _ALL
        return _TOP_P if _TOP_P in self.forms else None

    def __call__(self, form: str, logits: Tensor, draws: Tensor) -> Tensor:
        """As ``DrawTokens``."""
        floats = draws.view(torch.float32)
        temperature, values = floats[:, 2:3], logits.float()
        row_max = values.amax(-1, keepdim=True)
        scores = (values - row_max) / temperature
        if form != _ALL:
            top_k = draws[:, 5].contiguous() if form == _TOP_K else None
            kept = torch_npu.npu_top_k_top_p(scores, p=floats[:, 4].contiguous(), k=top_k)
            floor = values.masked_fill(kept == -torch.inf, torch.inf).amin(-1, keepdim=True)
            floor = torch.maximum(floor, row_max + temperature * floats[:, 3:4])
            scores.masked_fill_(values < floor, -torch.inf)
        return scores.sub_(noise_over_all(draws[:, :2], logits.shape[1]).log_()).argmax(-1)
