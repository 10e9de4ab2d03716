"""A step's results, packed as kernels.step says."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.sampling import Sampled
from kernels.step import RowError, StepResult, StepTiming

__all__ = ["Answer", "PromptScores"]

_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True)
class PromptScores:
    """One row's scored prompt tokens. ``logprobs`` float32 [tokens], the others [tokens, k]."""

    row: int
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@dataclass
class Answer:
    """Collects what a step produced. ``rows``: how many rows the step had."""

    rows: int
    failed: list[RowError] = field(default_factory=list)
    prompts: list[PromptScores] = field(default_factory=list)
    sampled: Sampled | None = None
    sampled_rows: npt.NDArray[np.int64] | None = None  # index among the step's rows of each of sampled's rows
    kept: npt.NDArray[np.bool_] | None = None  # which of sampled's rows count

    def pack(self, number: int, begun: float, prepared: float) -> StepResult:
        """Waits for the device. ``begun``, ``prepared``: time.perf_counter() at the step's start, and its forward's."""
        accepted = np.zeros(self.rows, dtype=np.int32)
        tokens = logprobs = top_counts = top_ids = top_logprobs = b""
        if self.sampled is not None and self.sampled_rows is not None and self.kept is not None:
            kept = self.kept
            accepted[self.sampled_rows[kept]] = 1
            tokens = _host(self.sampled.tokens, np.int32)[kept].tobytes()
            if self.sampled.logprobs is not None:
                logprobs = _host(self.sampled.logprobs, np.float32)[kept].tobytes()
            if self.sampled.logprobs is not None and self.sampled.top_counts is not None:
                counts = _host(self.sampled.top_counts, np.int32)[kept]
                top_counts = counts.tobytes()
                if self.sampled.top_ids is not None and self.sampled.top_logprobs is not None:
                    chosen = np.arange(self.sampled.top_ids.shape[1]) < counts[:, None]
                    top_ids = _host(self.sampled.top_ids, np.int32)[kept][chosen].tobytes()
                    top_logprobs = _host(self.sampled.top_logprobs, np.float32)[kept][chosen].tobytes()
        top = [np.full(len(scores.logprobs), scores.top_ids.shape[1], dtype=np.int32) for scores in self.prompts]
        return StepResult(
            number=number,
            accepted=accepted.tobytes(),
            tokens=tokens,
            logprobs=logprobs,
            top_counts=top_counts,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            prompt_rows=np.array([scores.row for scores in self.prompts], dtype=np.int32).tobytes(),
            prompt_counts=np.array([len(scores.logprobs) for scores in self.prompts], dtype=np.int32).tobytes(),
            prompt_logprobs=b"".join(_host(scores.logprobs, np.float32).tobytes() for scores in self.prompts),
            prompt_top_counts=b"".join(counts.tobytes() for counts in top),
            prompt_top_ids=b"".join(_host(scores.top_ids, np.int32).tobytes() for scores in self.prompts),
            prompt_top_logprobs=b"".join(_host(scores.top_logprobs, np.float32).tobytes() for scores in self.prompts),
            failed=tuple(self.failed),
            timing=StepTiming(prepare=prepared - begun, run=time.perf_counter() - prepared),
        )


def _host(tensor: Tensor, dtype: type[_T]) -> npt.NDArray[_T]:
    return tensor.cpu().numpy().astype(dtype, copy=False)
