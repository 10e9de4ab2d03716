"""Steps that a platform prepared beforehand, to be run in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.platforms.rows import DecodeTokens, StepTokens

__all__ = ["Decodes", "HostPass", "StepFound", "Steps"]


@dataclass(frozen=True)
class Decodes:
    """Steps that were prepared beforehand. ``rows``: the numbers of rows they were prepared for.

    ``run``: [tokens, hidden] of a batch of decodes and drafts, of up to the tokens a row that it was prepared for; None
    when it fits nothing that was prepared. The result is overwritten by the next call. ``prompts``: chunks of prompts
    fit as well, up to so many tokens of each.
    """

    rows: tuple[int, ...]
    run: Callable[[ForwardBatch], Tensor | None]
    prompts: int = 0


@dataclass(frozen=True)
class StepFound:
    """``hidden`` [rows, hidden] and ``logits`` [rows, vocab] of a step. ``likeliest`` int32 [rows]: the likeliest next
    token of each, or -1 where its logits are not to be used; rows that grow have it, or 0, in the table of tokens.
    """

    hidden: Tensor
    logits: Tensor
    likeliest: Tensor


@dataclass(frozen=True)
class Steps:
    """Whole steps of decodes that were prepared beforehand. ``rows``: the numbers of rows they were prepared for.

    ``run``: None when none that was prepared fits. What it gives is overwritten by the next call.
    """

    rows: tuple[int, ...]
    run: Callable[[StepTokens], StepFound | None]


HostPass = Callable[[DecodeTokens], None]
"""Runs a pass that was prepared: the tensors that it returned when it was hold its results then."""
