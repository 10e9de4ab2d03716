"""Experts of which each token takes a few: the reference, of any linear layers.

Tokens are put in the order of the experts that they take, and each expert that any takes runs once, over its tokens.
The results are weighted and added in float32, always in the order of the experts, so that what a token gets does not
depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.quantization.weights import Projection

__all__ = ["ExpertWeights", "ExpertsInTurn", "choose"]


@dataclass(frozen=True)
class ExpertWeights:
    """Of one expert. ``gate_up`` [2 * inner, hidden] is gate's, then up's; ``down`` [hidden, inner]."""

    gate_up: Projection
    gate_up_bias: Tensor | None
    down: Projection
    down_bias: Tensor | None


def choose(logits: Tensor, chosen: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """``logits`` [tokens, experts] -> the weights float32 [tokens, chosen] of the experts that each token takes, which
    are those of a softmax over all, and the experts int64. ``normalized``: the weights add up to one."""
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(chosen, -1)
    return weights / weights.sum(-1, keepdim=True) if normalized else weights, experts


class ExpertsInTurn:
    """[tokens, hidden] -> [tokens, hidden]. How many tokens an expert has is read back to the host.

    ``router``: to a logit for each expert. ``experts``: (gate and up, down) of each.
    """

    def __init__(
        self,
        router: Callable[[Tensor], Tensor],
        experts: Sequence[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]],
        chosen: int,
        normalized: bool,
    ) -> None:
        self.router = router
        self.experts = tuple(experts)
        self.chosen = chosen
        self.normalized = normalized

    def __call__(self, x: Tensor) -> Tensor:
        weights, experts = choose(self.router(x), self.chosen, self.normalized)
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=len(self.experts)).tolist()
        tokens, weights = order // self.chosen, weights.flatten()[order].unsqueeze(1)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        begin = 0
        for count, (gate_up, down) in zip(counts, self.experts, strict=True):
            if count:
                here = slice(begin, begin + count)
                begin += count
                out.index_add_(0, tokens[here], down(gate_up(x[tokens[here]])) * weights[here])
        return out.to(x.dtype)
