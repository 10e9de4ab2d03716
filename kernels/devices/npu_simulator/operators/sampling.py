"""Cutting logits for sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.devices.npu_simulator.constraints import ConstraintError, contiguous, dtypes, require
from kernels.devices.npu_simulator.operators.reference import reference

__all__: list[str] = []

MAX_K = 1024


def top_k_top_p_rules(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> None:
    """Vendor: logits [rows, vocabulary] of the three floats; p of their dtype, k int32, one per row; not both None."""
    name = "npu_top_k_top_p"
    require(logits.dim() == 2, name, "logits", f"must be [rows, vocabulary], has shape {tuple(logits.shape)}")
    dtypes(name, (torch.float16, torch.bfloat16, torch.float32), logits=logits)
    require(p is not None or k is not None, name, "p", "p and k must not both be None")
    contiguous(name, logits=logits, p=p, k=k)
    dtypes(name, (logits.dtype,), p=p)
    dtypes(name, (torch.int32,), k=k)
    for argument, values in (("p", p), ("k", k)):
        if values is not None:
            rule = f"must be [{logits.shape[0]}], one per row, has shape {tuple(values.shape)}"
            require(tuple(values.shape) == (logits.shape[0],), name, argument, rule)


def top_k_top_p_shape(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """The vendor's meta function requires k."""
    return torch.empty_like(logits)


@reference("npu_top_k_top_p", rules=top_k_top_p_rules, generations=("A2", "A3"), shape=top_k_top_p_shape)
def npu_top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """Rejected logits become -inf. k in 1 to 1024 and at most the vocabulary, ties with the k-th value stay; then, of
    what is left, the smallest probabilities whose running sum is at most 1 - p go, never the largest (vendor)."""
    name = "npu_top_k_top_p"
    order, index = torch.sort(logits, dim=-1, stable=True)
    if k is not None:
        low, high = int(k.min()), int(k.max())
        max_k = min(MAX_K, logits.shape[1])
        if low < 1 or high > max_k:
            raise ConstraintError(name, "k", f"values {low} to {high} must be in 1 to {max_k}: pass None for no limit")
        kth = order.gather(1, (logits.shape[1] - k.long()).unsqueeze(1))
        order = order.masked_fill(order < kth, float("-inf"))
    if p is not None:
        low_p, high_p = float(p.min()), float(p.max())
        require(low_p >= 0 and high_p <= 1, name, "p", f"values {low_p} to {high_p} must be in 0 to 1")
        running = torch.softmax(order.float(), -1).cumsum(-1)
        cut = running <= 1 - p.float().unsqueeze(1)
        cut[:, -1] = False
        order = order.masked_fill(cut, float("-inf"))
    return torch.empty_like(logits).scatter_(1, index, order)
