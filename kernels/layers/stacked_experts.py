"""Layers of experts whose weights stand side by side in one tensor, for products of all experts at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kernels.layers.experts import ExpertWeights
from kernels.quantization.tokens import clip_tokens, settle_tokens
from kernels.quantization.weights import GroupedWeight, Int8Weight, Projection, QuantizedWeight, StaticActivation

__all__ = ["Before", "StackedExperts", "may_be_dense", "refusal"]

_Stack = TypeVar("_Stack")
_BLOCK = 1 << 22  # elements of rows that are prepared at a time


class StackedExperts(ABC, Generic[_Stack]):
    """[tokens, hidden] -> [tokens, hidden]. ``router``: to a logit for each expert. ``gate_up``, ``down``: of all."""

    def __init__(
        self, router: Callable[[Tensor], Tensor], experts: Sequence[ExpertWeights], chosen: int, normalized: bool
    ) -> None:
        self.router = router
        self.count = len(experts)
        self.chosen = chosen
        self.normalized = normalized
        self.gate_up = self.stack([expert.gate_up for expert in experts])
        self.down = self.stack([expert.down for expert in experts])

    @abstractmethod
    def stack(self, weights: Sequence[Projection]) -> _Stack:
        """Weights of one kind."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Before:
    """What is done to inputs before they are multiplied: of each expert the ``orders`` int64 [experts, inputs] in which
    its weight has them and the share of their largest that they are held within, ``clips`` f32 [experts, 1]; and
    whether tokens are rounded to 8 bits."""

    orders: Tensor | None
    clips: Tensor | None
    settles: bool

    @classmethod
    def of(cls, weights: Sequence[Projection]) -> Before | None:
        """None: nothing. ``weights``: of one kind."""
        quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        groups = [weight for weight in quantized if isinstance(weight, GroupedWeight)]
        orders = [weight.order for weight in groups if weight.order is not None]
        clips = [weight.clip for weight in quantized if weight.clip is not None]
        settles = any(weight.activation is not None for weight in groups)
        if not orders and not clips and not settles:
            return None
        return cls(torch.stack(orders) if orders else None, torch.stack(clips).float() if clips else None, settles)

    def __call__(self, rows: Tensor, experts: Tensor) -> Tensor:
        """``rows`` [pairs, inputs], each of the expert ``experts`` int [pairs]."""
        size = max(1, _BLOCK // rows.shape[1])
        if len(rows) <= size:
            return self._prepared(rows, experts)
        out = torch.empty_like(rows)
        # An index of all elements takes four times the rows' own memory, and so do floats in which they are rounded.
        for some, owners, target in zip(rows.split(size), experts.split(size), out.split(size), strict=True):
            target.copy_(self._prepared(some, owners))
        return out

    def _prepared(self, rows: Tensor, experts: Tensor) -> Tensor:
        if self.orders is not None:
            rows = rows.gather(1, self.orders.index_select(0, experts))
        if self.clips is not None:
            rows = clip_tokens(rows, self.clips.index_select(0, experts))
        return settle_tokens(rows) if self.settles else rows


def may_be_dense(weight: QuantizedWeight) -> bool:
    """Whether the weight in floats is all there is to it: its inputs are rounded by no scale that was found before."""
    return not (isinstance(weight, Int8Weight) and isinstance(weight.activation, StaticActivation))


def refusal(experts: Sequence[ExpertWeights], kind: Callable[[Tensor | QuantizedWeight], object]) -> str | None:
    """Why experts cannot stand side by side; None: they can. ``kind``: what those of a layer must share, None for a
    weight that there is no kernel for."""
    if any(expert.gate_up_bias is not None or expert.down_bias is not None for expert in experts):
        return "they have biases"
    for part in ([expert.gate_up for expert in experts], [expert.down for expert in experts]):
        kinds = set()
        for weight in part:
            if isinstance(weight, tuple):
                return "gates are of another kind than what they are multiplied with"
            kinds.add(kind(weight))
            if None in kinds:
                return f"no kernel takes {_named(weight)}"
        if len(kinds) > 1:
            return "they are of different kinds"
    return None


def _named(weight: Tensor | QuantizedWeight) -> str:
    if isinstance(weight, Tensor):
        return f"{str(weight.dtype).removeprefix('torch.')} of {list(weight.shape)}"
    if not may_be_dense(weight):
        return "inputs that are rounded by scales found before"
    return f"{type(weight).__name__} of {list(weight.shape)}"
