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

__all__ = ["DRAW_NUMBERS", "DrawTokens", "TorchDraw", "pack_draws"]

DRAW_NUMBERS = 6
"""The width of ``pack_draws``."""

_ALL, _TOP_P, _TOP_K = "all", "top-p", "top-k"
_MAX_K = 1024
"""The largest k of npu_top_k_top_p."""


class DrawTokens(Protocol):
    """Draws a token of each row. ``forms``: those that graphs capture one by one."""

    @property
    def forms(self) -> tuple[str, ...]: ...

    def form(self, draws: Draws) -> str | None:
        """The form that draws these rows; None: none does."""
        ...

    def __call__(self, form: str, logits: Tensor, draws: Tensor) -> Tensor:
        """Tokens int64 [rows] of ``logits`` [rows, vocab]; any in rows that are greedy or not finite. ``draws`` int32
        [rows, 6]: as ``pack_draws`` makes them."""
        ...


def pack_draws(draws: Draws, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """int32 [rows, 6]: two keys of the seed at the position, the bits of temperature, log of min-p and top-p in
    float32, and top-k, which is 1 in a greedy row. ``positions`` [rows]."""
    result = np.empty((len(draws), DRAW_NUMBERS), np.int32)
    floats = result.view(np.float32)
    result[:, :2] = host_keys_at(draws["keys"], positions)
    floats[:, 2], floats[:, 3], floats[:, 4] = draws["temperature"], draws["log_min_p"], draws["top_p"]
    result[:, 5] = np.where(draws["temperature"] > 0, draws["top_k"], 1)
    return result


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
