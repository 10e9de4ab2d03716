"""The stages of a pipeline: each runs some of a model's layers (Huang et al., GPipe, arXiv 1811.06965).

The residual stream goes from each stage to the next. What the last one samples goes back to all others, because the
next step reads it from the state of the slots, which every stage keeps. A rank talks only to the ranks of other stages
that have the same part of each layer, and messages between two ranks arrive in the order in which they were sent.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.contract.config import RunnerConfig
from kernels.distributed.group import Group, GroupError

__all__ = ["PipelineStage", "Stage", "make_stage"]

_PENDING_SENDS = 8
"""Messages that may be under way before a stage waits for the first of them."""


class Stage:
    """A model without a pipeline: its only stage is the first and the last. ``index``: of ``size`` stages. ``waited``:
    seconds in which the host has waited for messages of other stages."""

    index = 0
    size = 1
    waited = 0.0

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embeddings."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the last norm and the output."""
        return self.index == self.size - 1

    def receive_stream(self, stream: Tensor) -> None:
        """Fill ``stream`` [tokens, hidden] with the residual stream of the previous stage. Raises GroupError."""
        raise GroupError("a model on one stage receives nothing from other stages")

    def send_stream(self, stream: Tensor) -> None:
        """Send the residual stream [tokens, hidden] to the next stage. Raises GroupError."""

    def send_outcome(self, outcome: Tensor) -> None:
        """Send what the last stage found, int64 [numbers], to all others. Raises GroupError."""

    def await_outcome(self, numbers: int, device: torch.device) -> Callable[[], Tensor]:
        """Returns at once; call the result to wait for what the last stage sends, int64 [numbers]. Raises
        GroupError."""
        raise GroupError("a model on one stage receives nothing from other stages")

    def flush(self) -> None:
        """Wait until all messages have left, before the group is closed."""


class PipelineStage(Stage):
    """One of several stages, by torch.distributed's default group. ``ranks``: of each stage, those that this rank talks
    to."""

    def __init__(self, index: int, ranks: list[int]) -> None:
        self.index, self.size = index, len(ranks)
        self._ranks = ranks
        self._sends: deque[tuple[dist.Work | None, Tensor]] = deque()  # a tensor must live until it has arrived

    def receive_stream(self, stream: Tensor) -> None:
        self._receive(stream, self.index - 1)

    def send_stream(self, stream: Tensor) -> None:
        if not self.is_last:
            self._send(stream, self.index + 1)

    def send_outcome(self, outcome: Tensor) -> None:
        for stage in range(self.size - 1):
            self._send(outcome, stage)

    def await_outcome(self, numbers: int, device: torch.device) -> Callable[[], Tensor]:
        outcome, last = torch.empty(numbers, dtype=torch.int64, device=device), self.size - 1
        try:
            work = dist.irecv(outcome, self._ranks[last])
        except RuntimeError as error:
            raise self._error("receive from", last, error) from error

        def arrived() -> Tensor:
            begun = time.perf_counter()
            try:
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                raise self._error("receive from", last, error) from error
            self.waited += time.perf_counter() - begun
            return outcome

        return arrived

    def flush(self) -> None:
        while self._sends:
            work, _ = self._sends.popleft()
            if work is not None:
                with contextlib.suppress(RuntimeError):  # the other rank may be gone
                    work.wait()

    def _send(self, message: Tensor, stage: int) -> None:
        message = message.contiguous()
        try:
            self._sends.append((dist.isend(message, self._ranks[stage]), message))
            while len(self._sends) > _PENDING_SENDS:
                work, _ = self._sends.popleft()
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            raise self._error("send to", stage, error) from error

    def _receive(self, message: Tensor, stage: int) -> None:
        begun = time.perf_counter()
        try:
            dist.recv(message, self._ranks[stage])
        except RuntimeError as error:
            raise self._error("receive from", stage, error) from error
        self.waited += time.perf_counter() - begun

    def _error(self, what: str, stage: int, error: RuntimeError) -> GroupError:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return GroupError(
            f"stage {self.index} of {self.size} could not {what} stage {stage} ({lines[0]}); see which of the other "
            "workers died or hung first"
        )


def make_stage(world: Group, config: RunnerConfig) -> tuple[Stage, Group]:
    """The stage of this rank, and the group of the ranks that share its layers. ``world``: of ``join_group``."""
    if config.pp_size == 1:
        return Stage(), world
    size, stage = config.tp_size, config.pp_rank
    own = [stage * size + rank for rank in range(size)]
    ranks = [other * size + config.tp_rank for other in range(config.pp_size)]
    return PipelineStage(stage, ranks), world.subgroup(own)
