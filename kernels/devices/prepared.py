"""Passes and steps that a device has captured, to be run in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.contract.step import RecordedExperts
from kernels.core.arrays import Bools, Longs
from kernels.core.attention_rows import DecodeTokens, PromptTokens, StepTokens, TokenTable
from kernels.core.batch import BoundedRows, ForwardBatch
from kernels.core.operators import Acceptance, Draws, Masks
from kernels.core.tree import DraftTree

__all__ = [
    "AcceptCall",
    "CapturedPasses",
    "CapturedStepResult",
    "CapturedSteps",
    "ChainDraftPasses",
    "CycleResult",
    "DecodeCall",
    "DraftCacheSlots",
    "DraftCycle",
    "NativePass",
    "ObserveTokens",
    "PassLogits",
    "PassResult",
    "PrefillCall",
    "StepForward",
    "TargetOutput",
    "VerifyCall",
    "VerifyChains",
    "VerifyHead",
    "VerifyOutputs",
]


class AcceptCall(Protocol):
    """Acceptance on the device."""

    def __call__(
        self, trees: DraftTree, rows: Tensor, nodes: Tensor, argmax: Tensor, nonfinite: Tensor, /
    ) -> Acceptance:
        """``rows``: as ``DraftKernels.accept`` takes them. ``nodes`` int64 [tokens]: slots of the nodes' keys and
        values. ``argmax`` and ``nonfinite``: the results of ``Greedy``. The accepted keys and values are in place
        afterwards."""
        ...


@dataclass(frozen=True)
class VerifyHead:
    """The end of a pass of few rows that verify.

    ``find``: from the pass's result to the logits of its tokens [tokens, vocab], and the two results of ``Greedy``.
    ``accept``: what is accepted; None if the number of accepted tokens is not decided by the model alone.
    ``features``: the part of the result that a draft reads.
    """

    find: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    accept: AcceptCall | None = None
    features: Callable[[Tensor], Tensor] | None = None


class VerifyOutputs(NamedTuple):
    """Results of a pass that accepts, in tensors that stay where they are: the ``rows`` as ``DraftKernels.accept``
    takes them, their ``pages`` int32 [rows, columns], what was ``accepted``, and the ``features`` [tokens, n]."""

    rows: Tensor
    pages: Tensor
    accepted: Acceptance
    features: Tensor


class PassResult(NamedTuple):
    """Results of a pass that verifies: the ``result``, and the slots of its keys and values int64 [tokens]. If they
    were captured, also the results of its ``head``, or what was ``accepted`` and ``accept_size``, the number of rows by
    which ``CapturedPasses.accept_outputs`` has the buffers of that pass. All are overwritten by the next call.
    ``experts`` int32 [tokens, layers, chosen]: those that each token took, if they are returned or ``recorded``
    (``StepBatch.record_experts``). ``states``: the rows of states with draft tokens (``ForwardBatch.verifying``)."""

    result: Tensor
    index: Tensor  # type: ignore[assignment]  # in place of tuple.index
    head: tuple[Tensor, Tensor, Tensor] | None = None
    accepted: Acceptance | None = None
    accept_size: int = 0
    experts: Tensor | None = None
    recorded: RecordedExperts = ""
    states: tuple[BoundedRows, ...] = ()


class VerifyCall(Protocol):
    """Runs rows that all verify a tree, without a batch."""

    def __call__(
        self, roots: Longs | None, pages: npt.NDArray[np.int32], trees: DraftTree, greedy_slots: Longs | None, /
    ) -> PassResult | None:
        """``roots``: the roots' positions int64 [rows]; None if the pass that accepted last had the same rows, whose
        roots are where its accepted tokens end: the host need not know them. ``pages`` int32 [rows, columns].
        ``greedy_slots`` int64 [rows]: if all rows are greedy and want nothing else; then the pass may accept.

        Returns None if no captured pass fits, also for trees of fewer nodes.
        """
        ...


@dataclass(frozen=True)
class CapturedPasses:
    """Captured passes. ``rows``: the numbers of rows that they were captured for.

    ``run``: the result [tokens, hidden] of a batch of decodes and drafts; None if no captured pass fits. The result is
    overwritten by the next call. ``prompts``: chunks of prompts of up to so many tokens fit as well.

    ``verify``: a pass over rows that all verify a tree; None if the device has none. ``accept_outputs``: buffers of
    the results of passes that accept, by the number of rows. ``states`` [any, width]: where the passes read those of a
    batch, which need no copy if they begin there; None: batches have none. ``run_sized``: ``run`` by a pass of at least
    so many rows.
    """

    rows: tuple[int, ...]
    run: Callable[[ForwardBatch], Tensor | None]
    prompts: int = 0
    verify: VerifyCall | None = None
    accept_outputs: Mapping[int, VerifyOutputs] = field(default_factory=dict)
    states: Tensor | None = None
    run_sized: Callable[[ForwardBatch, int], Tensor | None] | None = None


class StepForward(Protocol):
    """A model's pass with the logits of its tokens."""

    def __call__(self, batch: ForwardBatch, last: Tensor | None, /) -> tuple[Tensor, Tensor]:
        """Hidden states [rows, hidden] and logits [rows, vocab] of the tokens ``last`` int64 [rows]; None: of all."""
        ...


@dataclass(frozen=True)
class CapturedStepResult:
    """Results of a step: ``hidden`` [rows, hidden] and ``logits`` [rows, vocab] of each row's last token.

    ``argmax`` int32 [rows]: each row's next token, or -1 if its logits are not finite. For rows that grow it, or 0, is
    in the table of tokens. ``arrives``: waits for a copy of ``argmax`` that the step itself brings to the host.
    ``drawn``: whether the tokens are drawn as ``StepTokens.draws`` says.
    """

    hidden: Tensor
    logits: Tensor
    argmax: Tensor
    arrives: Callable[[], list[Tensor]] | None = None
    drawn: bool = False


@dataclass(frozen=True)
class CapturedSteps:
    """Captured whole steps of decodes. ``rows``: the numbers of rows that they were captured for.

    ``run``: None if no captured step fits. Its results are overwritten by the next call. ``prompts``: the same for
    steps with chunks of prompts whose tokens are not scored; None if there are none. ``draws``: whether ``run`` draws
    tokens.
    """

    rows: tuple[int, ...]
    run: Callable[[StepTokens], CapturedStepResult | None]
    prompts: Callable[[PromptTokens], CapturedStepResult | None] | None = None
    draws: bool = False


class DecodeCall(Protocol):
    """A decode step in one call."""

    def __call__(self, slots: Longs, draws: Draws | None, masks: Masks | None, /) -> bytes | None:
        """Decode one token of each of ``slots`` int64 [rows] and append it to the table. ``draws`` [rows]: how it is
        sampled; None: greedily. ``masks`` need draws.

        Returns the tokens int32 [rows]; no bytes if all sequences have ended; None if a row has no decode to run or its
        logits are not finite: state is unchanged, and the caller may try the next executor.
        """
        ...


class ObserveTokens(Protocol):
    """A draft's pass over tokens of the target, in one call."""

    def __call__(
        self, slots: Longs, starts: Longs, counts: Longs, features: npt.NDArray[np.int16] | None, places: Longs, /
    ) -> None:
        """Run the draft over ``counts`` tokens of each of ``slots`` from position ``starts`` on, all int64 [rows]. The
        tokens' rows in ``features`` [.., width] (their bits, or None) are ``places`` int64 [tokens]."""
        ...


class VerifyChains(Protocol):
    """The verification of chains in one call."""

    def __call__(
        self, slots: Longs, roots: Longs, counts: Longs, tokens: Longs, draws: Draws | None, /
    ) -> Longs | None:
        """Verify the first ``counts`` of ``tokens`` int64 [rows, n] of each of ``slots``, from the root at position
        ``roots`` on. The tokens that follow, sampled by ``draws`` [tokens] or greedily, are appended to the table.

        Returns how many each row gained, int64 [rows]; None if logits are not finite: state is unchanged, and the
        caller may try the next executor.
        """
        ...


class PrefillCall(Protocol):
    """The end of prompts in one call."""

    def __call__(
        self, slots: Longs, starts: Longs, counts: Longs, draws: Draws | None, masks: Masks | None, /
    ) -> bytes | None:
        """Run ``counts`` tokens of each of ``slots`` from position ``starts`` on, int64 [rows], up to the last known
        token. The tokens that follow, sampled by ``draws`` [rows] or greedily, are appended to the table. ``masks``
        need draws.

        Returns these int32 [rows]; None if logits are not finite: state is unchanged, and the caller may try the next
        executor.
        """
        ...


@dataclass(frozen=True)
class PassLogits:
    """Results of a draft's pass: ``logits`` [rows, vocab] and their argmax ``tokens`` int64 [rows]."""

    logits: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class TargetOutput:
    """Where a pass of the target leaves its results: ``logits`` [tokens, vocab], their ``argmax`` int64 [tokens], and
    whether they are ``nonfinite`` bool [tokens]. The arrays share memory with the pass's tensors."""

    logits: Tensor
    argmax: Longs
    nonfinite: Bools


@dataclass(frozen=True)
class ChainDraftPasses:
    """Passes of a draft that drafts one token after the other.

    ``observe`` reads accepted tokens, each with the token ``ahead`` of it (see ``NativePass.observe``): features are
    copied to ``observe_input`` [tokens, n], and it writes ``observe_output`` [tokens, n]. ``first_pass`` drafts the
    first token from ``first_input`` [rows, n], where the ``states`` [slots, n] of the last tokens are copied;
    ``next_pass`` drafts the others from ``next_input`` [rows, n], where it writes its next input. ``ids``: the tokens
    that logits are of; None: all.
    """

    observe: NativePass
    ahead: int
    observe_input: Tensor
    observe_output: Tensor
    first_pass: NativePass
    next_pass: NativePass
    first_logits: PassLogits
    next_logits: PassLogits
    ids: Tensor | None
    states: Tensor
    first_input: Tensor
    next_input: Tensor


@dataclass(frozen=True)
class DraftCacheSlots:
    """Places of a draft's cache. ``filled`` int64 [slots]: how many of each slot are filled. A sequence's first draft
    token takes the one ``offset`` behind its root's position. A sequence without a page left has ``spare_tokens`` of
    its own; those of all slots follow from page ``spare_page`` on."""

    filled: Longs
    offset: int
    spare_page: int
    spare_tokens: int


class CycleResult(NamedTuple):
    """Rows whose chains were verified; overwritten by the next step. There are no rows if there was nothing to draft.

    ``roots``: positions, and ``accepted``: numbers of tokens, int64 [rows]. ``emitted``, ``drafted``, ``depths`` int32
    [rows]: the same numbers, those of verified draft tokens, and these with the next one if it was wrong and would have
    ended the sequence. ``tokens`` int32: the accepted ones, row by row; ``places`` int64: the step's tokens that they
    follow. ``drafted_at``: ``time.perf_counter`` between drafting and verification. ``over``: whether all sequences
    have ended."""

    roots: Longs
    accepted: Longs
    places: Longs
    emitted: bytes
    drafted: bytes
    depths: bytes
    tokens: bytes
    drafted_at: float
    over: bool


class DraftCycle(Protocol):
    """Drafting and verification in one call."""

    def __call__(
        self, slots: Longs, drafts: bytes, left: Longs | None, levels: int, draws: Draws | None, observe: bool, /
    ) -> tuple[CycleResult | None, bool]:
        """Draft behind the last tokens of ``slots`` int64 [rows], up to ``drafts`` int32 [rows] of each in ``levels``
        levels, and verify; sampled by ``draws`` [rows] or greedily. A sequence may grow by ``left`` int64 [rows]
        tokens. Accepted tokens are appended to the table. ``observe``: the draft first observes what the previous
        cycle of the same slots accepted; that cycle also knows what is left, so that ``left`` is None.

        Returns None if a row does not allow this or logits are not finite: state is unchanged, and the caller may try
        the next executor. Also returns whether the draft has observed.
        """
        ...


class NativePass(Protocol):
    """A captured pass: after each call the tensors that it returned when it was captured hold its results."""

    def __call__(self, rows: DecodeTokens) -> None: ...

    def advance(self, table: TokenTable, output: TargetOutput) -> DecodeCall:
        """Whole decode steps by this pass, the target's. ``table``: of the sequences; its arrays stay where they
        are."""
        ...

    def observe(
        self, table: TokenTable, ahead: int, inputs: Tensor, left: Tensor | None, states: Tensor | None
    ) -> ObserveTokens:
        """This pass is a draft's: with a position goes the token ``ahead`` of it, whose features are read from
        ``inputs`` [tokens, width]. The rows of ``left`` [tokens, n] of each sequence's last token are copied to
        ``states`` [slots, n]."""
        ...

    def cycle(
        self,
        draft: ChainDraftPasses,
        places: DraftCacheSlots,
        table: TokenTable,
        output: TargetOutput,
        features: npt.NDArray[np.int16] | None,
        *,
        max_drafts: int,
        max_length: int,
    ) -> DraftCycle:
        """This pass is the target's. The draft observes the rows of ``features``
        [tokens, n] (their bits) of accepted tokens; None: it reads none. ``max_drafts``: draft tokens that are verified
        of a row. ``max_length``: tokens at which a sequence has no room for more."""
        ...

    def verify(self, table: TokenTable, output: TargetOutput) -> VerifyChains:
        """This pass is the target's."""
        ...

    def prefill(
        self,
        head: NativePass,
        table: TokenTable,
        hidden: Tensor,
        last: Tensor,
        output: PassLogits,
        nonfinite: npt.NDArray[np.bool_],
    ) -> PrefillCall:
        """This pass is the model's and writes ``hidden`` [tokens, n]; the rows of the sequences' last tokens are copied
        to ``last`` [rows, n], from which ``head`` makes ``output`` and ``nonfinite``, as in ``advance``."""
        ...
