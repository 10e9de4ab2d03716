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

__all__ = [
    "Advance",
    "Decodes",
    "GuessChains",
    "Guessed",
    "HostPass",
    "ObserveTokens",
    "ReachEnds",
    "StepFound",
    "Steps",
    "Verify",
    "VerifyChains",
]

Longs = npt.NDArray[np.int64]


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


ObserveTokens = Callable[[Longs, Longs, Longs, npt.NDArray[np.int16] | None, Longs], None]
"""Runs a draft over tokens of ``slots``: ``counts`` of each from position ``starts`` on, int64 [rows]. Of ``features``
[.., width], as their bits, or None, the tokens' are at ``places`` int64 [tokens]."""

GuessChains = Callable[[Longs, Longs, Longs, npt.NDArray[np.int32], int, Draws | None], Longs]
"""Guesses behind the ``roots`` of ``slots``, at ``starts`` and on in the draft's cache, int64 [rows], by ``pages``
int32 [rows, columns]; so many, drawn as ``Draws`` [rows] say or the likeliest. -> int64 [guesses, rows]."""

VerifyChains = Callable[[Longs, Longs, Longs, Longs, Draws | None], Longs | None]
"""Verifies chains: of each of ``slots`` the first ``counts`` of ``tokens`` int64 [rows, n], from the root at position
``roots`` on. What follows, drawn as ``Draws`` [tokens] say or the likeliest, is added to the table. -> tokens that each
has more, int64 [rows]; None when logits are not to be used: then nothing was done that is not done again."""


ReachEnds = Callable[[Longs, Longs, Longs, Draws | None], bytes | None]
"""Runs ``counts`` tokens of each of ``slots`` from position ``starts`` on, int64 [rows], to the last that is known.
What follows, drawn as ``Draws`` [rows] say or the likeliest, is added to the table. -> these int32 [rows]; None when
logits are not to be used: then nothing was done that is not done again."""


@dataclass(frozen=True)
class Guessed:
    """What a pass of a draft leaves: ``logits`` [rows, vocab], and the likeliest ``tokens`` int64 [rows] of them."""

    logits: Tensor
    tokens: Tensor


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

    def observe(
        self, table: TokenTable, ahead: int, given: Tensor, left: Tensor | None, states: Tensor | None
    ) -> ObserveTokens:
        """It is of a draft: the token that goes with a position is that ``ahead`` of it, its features are read from
        ``given`` [tokens, width]. What it leaves in ``left`` [tokens, n] of each row's last goes to ``states`` [slots,
        n]."""
        ...

    def guess(
        self,
        then: HostPass,
        first: Guessed,
        later: Guessed,
        ids: Tensor | None,
        states: Tensor,
        headed: Tensor,
        before: Tensor,
        page_size: int,
    ) -> GuessChains:
        """It makes the first guess, of ``headed`` [rows, n], where ``states`` [slots, n] are brought; ``then`` the
        others, of ``before`` [rows, n], where it leaves what is next. ``ids``: the tokens that logits are of;
        None: all.
        """
        ...

    def verify(
        self, table: TokenTable, logits: Tensor, likeliest: Longs, broken: npt.NDArray[np.bool_]
    ) -> VerifyChains:
        """It is of the model, with results as ``advance`` has them."""
        ...

    def reach(
        self,
        head: HostPass,
        table: TokenTable,
        hidden: Tensor,
        last: Tensor,
        found: Guessed,
        broken: npt.NDArray[np.bool_],
    ) -> ReachEnds:
        """It is of the model and leaves ``hidden`` [tokens, n]; those of the rows' last tokens are brought to ``last``
        [rows, n], of which ``head`` makes ``found``, and ``broken`` as ``advance`` has it."""
        ...
