"""Steps that a platform prepared beforehand, to be run in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.platforms.operators import Draws
from kernels.platforms.rows import DecodeTokens, StepTokens, TokenTable
from kernels.speculative.tree import DraftTree

__all__ = ["Advance", "Decodes", "HostPass", "StepFound", "Steps", "Verify"]


Verify = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int32], DraftTree], tuple[Tensor, Tensor] | None]


@dataclass(frozen=True)
class Decodes:
    """Steps that were prepared beforehand. ``rows``: the numbers of rows they were prepared for.

    ``run``: [tokens, hidden] of a batch of decodes and drafts, of up to the tokens a row that it was prepared for; None
    when it fits nothing that was prepared. The result is overwritten by the next call. ``prompts``: chunks of prompts
    fit as well, up to so many tokens of each.

    ``verify``: of rows that all verify a tree, with no batch made of it: from the roots' positions int64 [rows], their
    pages int32 [rows, columns] and the trees, what ``run`` gives, and where keys and values were put, int64 [tokens];
    None, as that, also of trees of fewer nodes. It is None where there is no such way.
    """

    rows: tuple[int, ...]
    run: Callable[[ForwardBatch], Tensor | None]
    prompts: int = 0
    verify: Verify | None = None


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


Advance = Callable[[npt.NDArray[np.int64], Draws | None], bytes | None]
"""Decodes a token of each of the slots int64 [rows], drawn as ``Draws`` [rows] say or the likeliest, and adds it to the
table. -> these int32 [rows]; nothing when the sequences are at their end, all of them; None when a row has no decode to
run, or its logits are not to be used: then nothing was done that is not done again."""


class HostPass(Protocol):
    """A pass that was prepared: the tensors that it returned when it was hold its results, whenever it has run."""

    def __call__(self, rows: DecodeTokens) -> None: ...

    def advance(
        self, table: TokenTable, logits: Tensor, likeliest: npt.NDArray[np.int64], broken: npt.NDArray[np.bool_]
    ) -> Advance:
        """Whole steps of decodes by it. ``logits`` [tokens, vocab], ``likeliest``, ``broken``: such results of it.

        ``table``: of the sequences, whose arrays stay where they are.
        """
        ...
