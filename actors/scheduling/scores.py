"""Log-probabilities of a step's result, split by row."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from actors.protocol import TokenScores
from kernels.contract.step import StepResult, TokenValues

__all__ = ["PromptScores", "StepScores", "join", "pooled_vectors", "token_values"]

_BYTES = 4  # of an int32 and of a float32


class _Packed:
    """Runs of scored tokens: four arrays, the last two as long as the sum of the second."""

    __slots__ = ("_counts", "_ids", "_logprobs", "_starts", "_top_logprobs")

    def __init__(self, logprobs: bytes, top_counts: bytes, top_ids: bytes, top_logprobs: bytes) -> None:
        self._logprobs = logprobs
        self._counts = top_counts or bytes(len(logprobs))  # no alternatives requested: zero for each token
        self._ids = top_ids
        self._top_logprobs = top_logprobs
        counts: npt.NDArray[np.int32] = np.frombuffer(self._counts, dtype=np.int32)
        self._starts: list[int] = [0, *np.cumsum(counts).tolist()]

    def slice(self, start: int, end: int) -> TokenScores:
        """Scores of the tokens ``start .. end - 1``."""
        first, last = self._starts[start] * _BYTES, self._starts[end] * _BYTES
        return TokenScores(
            logprobs=self._logprobs[start * _BYTES : end * _BYTES],
            top_counts=self._counts[start * _BYTES : end * _BYTES],
            top_ids=self._ids[first:last],
            top_logprobs=self._top_logprobs[first:last],
        )


class StepScores:
    """Scores of the sampled tokens, by their place in ``StepResult.tokens``."""

    __slots__ = ("_packed",)

    def __init__(self, result: StepResult) -> None:
        self._packed = _Packed(result.logprobs, result.top_counts, result.top_ids, result.top_logprobs)

    def at(self, index: int) -> TokenScores:
        return self._packed.slice(index, index + 1)

    def run(self, start: int, end: int) -> TokenScores:
        """Scores of the tokens ``start .. end - 1``."""
        return self._packed.slice(start, end)


class PromptScores:
    """Scores of prompt tokens, by row."""

    __slots__ = ("_bounds", "_packed")

    def __init__(self, result: StepResult) -> None:
        self._packed = _Packed(
            result.prompt_logprobs, result.prompt_top_counts, result.prompt_top_ids, result.prompt_top_logprobs
        )
        rows: list[int] = np.frombuffer(result.prompt_rows, dtype=np.int32).tolist()
        ends: list[int] = np.cumsum(np.frombuffer(result.prompt_counts, dtype=np.int32)).tolist()
        self._bounds = dict(zip(rows, zip([0, *ends], ends, strict=False), strict=True))

    def for_row(self, row: int) -> TokenScores | None:
        """Scores that the chunk of this row added, or None if it was not scored."""
        bounds = self._bounds.get(row)
        return None if bounds is None else self._packed.slice(*bounds)


def pooled_vectors(result: StepResult) -> dict[int, bytes]:
    """The pooled vectors of a step, float32, by row."""
    rows: list[int] = np.frombuffer(result.pooled_rows, dtype=np.int32).tolist()
    ends = 4 * np.cumsum(np.frombuffer(result.pooled_sizes, dtype=np.int32))
    begins = [0, *ends.tolist()]
    return {row: result.pooled[begin:end] for row, begin, end in zip(rows, begins, ends.tolist(), strict=False)}


def token_values(found: TokenValues | None) -> dict[int, list[bytes]]:
    """The numbers of each token of a step, by row."""
    if found is None:
        return {}
    rows: list[int] = np.frombuffer(found.rows, dtype=np.int32).tolist()
    counts: list[int] = np.frombuffer(found.counts, dtype=np.int32).tolist()
    size = len(found.values) // sum(counts)
    values = iter([found.values[begin : begin + size] for begin in range(0, len(found.values), size)])
    return {row: list(itertools.islice(values, count)) for row, count in zip(rows, counts, strict=True)}


def join(parts: list[TokenScores]) -> TokenScores:
    """Scores of consecutive chunks as one."""
    return TokenScores(
        logprobs=b"".join([part.logprobs for part in parts]),
        top_counts=b"".join([part.top_counts for part in parts]),
        top_ids=b"".join([part.top_ids for part in parts]),
        top_logprobs=b"".join([part.top_logprobs for part in parts]),
    )
