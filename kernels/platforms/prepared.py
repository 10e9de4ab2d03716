"""Steps that a platform prepared beforehand, to be run in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.platforms.operators import Acceptance, Draws
from kernels.platforms.rows import DecodeTokens, PromptTokens, StepTokens, TokenTable
from kernels.speculative.tree import DraftTree

__all__ = [
    "Advance",
    "ChainPasses",
    "Decodes",
    "DraftSlots",
    "GuessCycle",
    "Guessed",
    "Guessing",
    "HostPass",
    "ObserveTokens",
    "PassEnd",
    "PassFound",
    "PassHead",
    "ReachEnds",
    "StepForward",
    "StepFound",
    "Steps",
    "Verify",
    "VerifyChains",
]

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PassHead:
    """What a pass of few rows that verify may end with.

    ``find``: from its result to the logits of its tokens [tokens, vocab], and what ``Greedy`` finds in them.
    ``accept``: from the trees, the rows as ``Platform.accept`` wants them, where the nodes' keys and values were put,
    int64 [tokens], and what ``Greedy`` found, to what is accepted, whose keys and values are at their places then. None
    where that is not known before. ``features``: the part of the result that a draft is made from.
    """

    find: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    accept: Callable[[DraftTree, Tensor, Tensor, Tensor, Tensor], Acceptance] | None = None
    features: Callable[[Tensor], Tensor] | None = None


class PassEnd(NamedTuple):
    """What a pass of so many rows that accepts leaves, in places that are always the same: the ``rows`` as
    ``Platform.accept`` wants them, their ``pages`` int32 [rows, columns], what was ``accepted``, and the ``features``
    [tokens, n]."""

    rows: Tensor
    pages: Tensor
    accepted: Acceptance
    features: Tensor


class PassFound(NamedTuple):
    """The ``result`` of a pass that verifies, where its keys and values were put, int64 [tokens], and, if that was
    prepared, what its head made or else what was ``accepted``, and of which of ``Decodes.ends``. Overwritten by the
    next call."""

    result: Tensor
    index: Tensor
    head: tuple[Tensor, Tensor, Tensor] | None = None
    accepted: Acceptance | None = None
    end: int = 0


Verify = Callable[[Longs | None, npt.NDArray[np.int32], DraftTree, Longs | None], PassFound | None]


@dataclass(frozen=True)
class Decodes:
    """Steps that were prepared beforehand. ``rows``: the numbers of rows they were prepared for.

    ``run``: [tokens, hidden] of a batch of decodes and drafts, of up to the tokens a row that it was prepared for; None
    when it fits nothing that was prepared. The result is overwritten by the next call. ``prompts``: chunks of prompts
    fit as well, up to so many tokens of each.

    ``verify``: of rows that all verify a tree, with no batch made of it: from the roots' positions int64 [rows], their
    pages int32 [rows, columns] and the trees; None, as ``run``, also of trees of fewer nodes. Of rows that all are
    greedy, and want nothing else, the slots int64 [rows] are told: what is right may be accepted then. No positions are
    told if the pass that accepted last was of the very rows: the roots are where what it accepted ends, and the host
    need not know. It is None where there is no such way. ``ends``: by the number of rows, of passes that accept.
    """

    rows: tuple[int, ...]
    run: Callable[[ForwardBatch], Tensor | None]
    prompts: int = 0
    verify: Verify | None = None
    ends: Mapping[int, PassEnd] = field(default_factory=dict)


StepForward = Callable[[ForwardBatch, Tensor | None], tuple[Tensor, Tensor]]
"""From a batch to hidden states [rows, hidden] and logits of its tokens ``last`` int64 [rows], or of all."""


@dataclass(frozen=True)
class StepFound:
    """``hidden`` [rows, hidden] and ``logits`` [rows, vocab] of each row's last token. ``likeliest`` int32 [rows]: the
    likeliest next token of each, or -1 where its logits are not to be used; rows that grow have it, or 0, in the table
    of tokens. ``arrives``: waits for a copy of ``likeliest`` that the step brings to the host itself.
    """

    hidden: Tensor
    logits: Tensor
    likeliest: Tensor
    arrives: Callable[[], list[Tensor]] | None = None


@dataclass(frozen=True)
class Steps:
    """Whole steps of decodes that were prepared beforehand. ``rows``: the numbers of rows they were prepared for.

    ``run``: None when none that was prepared fits. What it gives is overwritten by the next call. ``prompts``: the same
    of steps with chunks of prompts whose tokens are not scored; None where there are none.
    """

    rows: tuple[int, ...]
    run: Callable[[StepTokens], StepFound | None]
    prompts: Callable[[PromptTokens], StepFound | None] | None = None


Advance = Callable[[npt.NDArray[np.int64], Draws | None], bytes | None]
"""Decodes a token of each of the slots int64 [rows], drawn as ``Draws`` [rows] say or the likeliest, and adds it to the
table. -> these int32 [rows]; nothing when the sequences are at their end, all of them; None when a row has no decode to
run, or its logits are not to be used: then nothing was done that is not done again."""


ObserveTokens = Callable[[Longs, Longs, Longs, npt.NDArray[np.int16] | None, Longs], None]
"""Runs a draft over tokens of ``slots``: ``counts`` of each from position ``starts`` on, int64 [rows]. Of ``features``
[.., width], as their bits, or None, the tokens' are at ``places`` int64 [tokens]."""

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


@dataclass(frozen=True)
class ChainPasses:
    """Of a draft that guesses one token after the other. ``observe`` shows it tokens, with those ``ahead`` of them, as
    ``HostPass.observe`` says: features are brought to ``seen`` [tokens, n], and it leaves ``left`` [tokens, n].
    ``head`` makes the first guess of ``headed`` [rows, n], where the ``states`` [slots, n] that the last tokens left
    are brought; ``then`` the others, of ``before`` [rows, n], where it leaves what is next. ``ids``: the tokens that
    logits are of; None: all.
    """

    observe: HostPass
    ahead: int
    seen: Tensor
    left: Tensor
    head: HostPass
    then: HostPass
    first: Guessed
    later: Guessed
    ids: Tensor | None
    states: Tensor
    headed: Tensor
    before: Tensor


@dataclass(frozen=True)
class DraftSlots:
    """Of a draft's cache: by slot, the places ``reached`` int64 [slots] that are filled. A sequence's first guess takes
    the place ``first`` behind its root's position; where it has no page left, the slot has ``spare`` of its own, those
    of all slots from page ``begin`` on."""

    reached: Longs
    first: int
    begin: int
    spare: int


class Guessing(NamedTuple):
    """Of rows whose chains were verified: the ``roots``' positions and how many tokens were ``accepted``, int64 [rows],
    ``told``, ``drafted`` and ``depths``, int32 [rows], the same, how many guesses were verified, and those and the next
    where that was wrong and would have ended the sequence; the ``tokens`` int32 and which of the step's they follow
    (``places`` int64), one row after the other. ``drafted_at``: ``time.perf_counter`` between the guesses and their
    verification. ``over``: whether all sequences are at their end. No rows where there was nothing to guess.
    Overwritten by the next step."""

    roots: Longs
    accepted: Longs
    places: Longs
    told: bytes
    drafted: bytes
    depths: bytes
    tokens: bytes
    drafted_at: float
    over: bool


GuessCycle = Callable[[Longs, bytes, Longs | None, int, Draws | None, bool], tuple[Guessing | None, bool]]
"""Guesses behind the last tokens of ``slots`` int64 [rows], up to ``drafts`` int32 [rows] of each in so many levels,
and verifies them; a sequence may have ``left`` int64 [rows] tokens more. Drawn as ``Draws`` [rows] say, or the
likeliest. What was accepted is added to the table. Before all that, if so asked, the draft sees what the cycle before
accepted of the same slots, which also knows what is ``left``. -> None when that is not for a row, or logits are not to
be used: then nothing was done that is not done again; and whether the draft has seen that."""


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

    def cycle(
        self,
        draft: ChainPasses,
        places: DraftSlots,
        table: TokenTable,
        logits: Tensor,
        likeliest: Longs,
        broken: npt.NDArray[np.bool_],
        features: npt.NDArray[np.int16] | None,
        most: int,
        longest: int,
    ) -> GuessCycle:
        """It is of the model, with results as ``advance`` has them. Of its ``features`` [tokens, n], as their bits, the
        draft is shown those of tokens that were accepted; None: it has no use for them. Of a row ``most`` guesses are
        verified, and a sequence of ``longest`` tokens has no room for more."""
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
