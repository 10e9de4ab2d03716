"""Packs a step's results into a ``StepResult`` (``kernels.contract.step``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.contract.step import ExpertCounts, RowError, StepResult, StepTiming, TokenValues
from kernels.core.arrays import Bools, Longs
from kernels.sampling.sampler import SampledTokens

__all__ = ["PromptScores", "ResultBuilder", "RowValues"]


@dataclass(frozen=True)
class PromptScores:
    """One row's scored prompt tokens. ``logprobs`` float32 [tokens], the others [tokens, k]."""

    row: int
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@dataclass(frozen=True)
class RowValues:
    """Numbers [sum(counts), ...] of all tokens that ``rows`` int64 of a step ran, ``counts`` int64 of each."""

    rows: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    values: Tensor

    def packed(self, fetched: Tensor) -> TokenValues:
        """``fetched``: the host's copy of ``values``."""
        rows, counts = (part.astype(np.int32).tobytes() for part in (self.rows, self.counts))
        return TokenValues(rows, counts, fetched.numpy().tobytes())


@dataclass
class ResultBuilder:
    """Collects the results of a step. ``slots``, ``generations`` int32 [rows]: the requests of its rows.

    ``sampled_rows`` int64 [sampled]: the step's row of each sampled entry. ``places`` int64 [sampled]: the level of
    each entry in rows that verified draft tokens. ``outcome`` int64 [verified rows, 2 ..]: the number of accepted
    entries, negative in a row that is not finite, then the level that could have been reached. ``verified_rows``,
    ``drafted`` int64 [verified rows]: these rows and their draft tokens. ``argmax`` int32 [sampled]: tokens in place of
    ``sampled``, -1 in a row that is not finite; ``sampling`` bool [sampled] says which rows sample. ``pooled``: for
    groups of rows ``pooled_rows``, the vectors float32 [rows, n] of each. ``states``, ``experts``: see ``StepResult``;
    ``expert_counts`` int32 [layers, experts], ``routes``: see ``ExpertCounts``.
    ``arrives``: waits for results that the device copies to the host by itself. ``settle``: waits for what another
    stage of a pipeline samples. ``chunk_rows`` int64 [chunks]: rows that sampled nothing; ``chunks_broken`` bool
    [chunks]: which of them are not finite.
    """

    slots: npt.NDArray[np.int32]
    generations: npt.NDArray[np.int32]
    failed: list[RowError] = field(default_factory=list)
    prompts: list[PromptScores] = field(default_factory=list)
    sampled: SampledTokens | None = None
    sampled_rows: npt.NDArray[np.int64] | None = None
    chunk_rows: npt.NDArray[np.int64] | None = None
    chunks_broken: Tensor | None = None
    argmax: Tensor | None = None
    arrives: Callable[[], list[Tensor]] | None = None
    settle: Callable[[], None] | None = None
    sampling: Bools | None = None
    pooled_rows: list[npt.NDArray[np.int64]] = field(default_factory=list)
    pooled: list[Tensor] = field(default_factory=list)
    states: RowValues | None = None
    experts: RowValues | None = None
    expert_counts: Tensor | None = None
    routes: RowValues | None = None
    places: npt.NDArray[np.int64] | None = None
    outcome: Tensor | None = None
    verified_rows: npt.NDArray[np.int64] | None = None
    drafted: npt.NDArray[np.int64] | None = None
    graph_rows: int = 0  # that ran in a captured graph
    divided: bool = False  # whether the model ran the step as two batches
    draft: float = 0.0  # seconds
    masked: frozenset[int] = frozenset()  # rows whose grammar masks what they sample

    def add_vectors(self, rows: npt.NDArray[np.int64], vectors: Tensor) -> None:
        """Add the vectors float32 [rows, n] of these rows of the step."""
        self.pooled_rows.append(rows)
        self.pooled.append(vectors)

    def tensors(self) -> list[Tensor]:
        """The device tensors that ``pack`` needs on the host."""
        result: list[Tensor] = [] if self.argmax is None else [self.argmax]
        if self.sampled is not None:
            sampled = self.sampled
            wanted = (sampled.tokens, sampled.nonfinite, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
            result += [tensor for tensor in wanted if tensor is not None]
        if self.outcome is not None:
            result.insert(0, self.outcome)
        for scores in self.prompts:
            result += [scores.logprobs, scores.top_ids, scores.top_logprobs]
        if self.chunks_broken is not None:
            result.append(self.chunks_broken)
        counts = [] if self.expert_counts is None else [self.expert_counts]
        values = [each.values for each in (self.states, self.experts, self.routes) if each is not None]
        return result + self.pooled + counts + values

    def pack(self, number: int, fetched: Sequence[Tensor], timing: StepTiming) -> tuple[StepResult, list[RowError]]:
        """Pack ``fetched``, the host's copies of ``tensors``. Returns the result, and its errors of rows that were not
        finite."""
        host = iter(fetched)
        accepted = np.zeros(len(self.slots), dtype=np.int32)
        tokens = logprobs = top_counts = top_ids = top_logprobs = b""
        nonfinite: list[RowError] = []
        outcome = None if self.outcome is None else next(host).numpy()
        if self.argmax is not None and self.sampled_rows is not None:
            ids = next(host).numpy()
            nonfinite += self._nonfinite(self.sampled_rows[ids < 0])
            found = ids >= 0 if self.sampling is None else self.sampling & (ids >= 0)
            accepted[self.sampled_rows[found]] = 1
            tokens = ids[found].tobytes()
        if self.sampled is not None and self.sampled_rows is not None:
            ids = next(host).numpy().astype(np.int32)
            kept = ~next(host).numpy()
            if outcome is None:
                nonfinite += self._nonfinite(self.sampled_rows[~kept])
                accepted[self.sampled_rows[kept]] = 1
            else:
                kept, unsound = self._kept(kept, outcome)
                nonfinite += self._nonfinite(unsound)
                accepted = np.bincount(self.sampled_rows[kept], minlength=len(accepted)).astype(np.int32)
            tokens = ids[kept].tobytes()
            if self.sampled.logprobs is not None:
                logprobs = next(host).numpy()[kept].tobytes()
            if self.sampled.logprobs is not None and self.sampled.top_counts is not None:
                counts = self.sampled.top_counts.numpy().astype(np.int32, copy=False)[kept]
                top_counts = counts.tobytes()
                if self.sampled.top_ids is not None and self.sampled.top_logprobs is not None:
                    chosen = np.arange(self.sampled.top_ids.shape[1]) < counts[:, None]
                    top_ids = next(host).numpy().astype(np.int32)[kept][chosen].tobytes()
                    top_logprobs = next(host).numpy()[kept][chosen].tobytes()
        scored = [(next(host).numpy(), next(host).numpy().astype(np.int32), next(host).numpy()) for _ in self.prompts]
        if self.chunk_rows is not None:
            nonfinite += self._nonfinite(self.chunk_rows[next(host).numpy()])
        vectors = [next(host).numpy() for _ in self.pooled]
        counted = None if self.expert_counts is None else next(host).numpy().tobytes()
        states = None if self.states is None else self.states.packed(next(host))
        taken = None if self.experts is None else self.experts.packed(next(host))
        routes = None if self.routes is None else self.routes.packed(next(host))
        widths = [np.full(len(group), group.shape[1], dtype=np.int32) for group in vectors]
        top = [np.full(len(scores.logprobs), scores.top_ids.shape[1], dtype=np.int32) for scores in self.prompts]
        result = StepResult(
            number=number,
            accepted=accepted.tobytes(),
            tokens=tokens,
            logprobs=logprobs,
            top_counts=top_counts,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            prompt_rows=np.array([scores.row for scores in self.prompts], dtype=np.int32).tobytes(),
            prompt_counts=np.array([len(scores.logprobs) for scores in self.prompts], dtype=np.int32).tobytes(),
            prompt_logprobs=b"".join(logprobs.tobytes() for logprobs, _, _ in scored),
            prompt_top_counts=b"".join(counts.tobytes() for counts in top),
            prompt_top_ids=b"".join(ids.tobytes() for _, ids, _ in scored),
            prompt_top_logprobs=b"".join(logprobs.tobytes() for _, _, logprobs in scored),
            failed=(*self.failed, *nonfinite),
            timing=timing,
            pooled_rows=b"".join(rows.astype(np.int32).tobytes() for rows in self.pooled_rows),
            pooled_sizes=b"".join(group.tobytes() for group in widths),
            pooled=b"".join(group.tobytes() for group in vectors),
            states=states,
            experts=taken,
            record=None if counted is None else ExpertCounts(counted, routes),
        )
        if outcome is not None:
            result = self._with_drafted(result, outcome)
        return result, nonfinite

    def _kept(self, sound: Bools, outcome: Longs) -> tuple[Longs, Longs]:
        """The accepted entries in the order of the batch's rows, and the rows that are not finite."""
        assert self.sampled_rows is not None
        assert self.places is not None
        assert self.verified_rows is not None
        counts = np.ones(len(self.slots), dtype=np.int64)
        counts[self.verified_rows] = np.abs(outcome[:, 0])
        counted = self.places < counts[self.sampled_rows]
        unsound = np.unique(self.sampled_rows[counted & ~sound])
        entries = np.flatnonzero(counted & ~np.isin(self.sampled_rows, unsound))
        return entries[np.argsort(self.sampled_rows[entries], kind="stable")], unsound

    def _with_drafted(self, result: StepResult, outcome: Longs) -> StepResult:
        assert self.verified_rows is not None
        assert self.drafted is not None
        drafted, depths = np.zeros((2, len(self.slots)), dtype=np.int32)
        drafted[self.verified_rows] = self.drafted
        depths[self.verified_rows] = outcome[:, 1]
        return msgspec.structs.replace(result, drafted=drafted.tobytes(), depths=depths.tobytes())

    def _nonfinite(self, rows: npt.NDArray[np.int64]) -> list[RowError]:
        what = dict.fromkeys(self.masked, " or for every token that its grammar allows")
        message = "the model's output is not finite for this request{}; try float32, or check the weights"
        return [
            RowError(int(self.slots[row]), int(self.generations[row]), message.format(what.get(row, "")))
            for row in rows.tolist()
        ]
