"""Passes and whole steps that are captured once, into graphs or programs, and then run in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.contract.caches import GroupPages
from kernels.core.batch import ForwardBatch
from kernels.devices.prepared import CapturedPasses, CapturedSteps, NativePass, StepForward, VerifyHead

__all__ = ["Capture", "CaptureRequest", "StepCaptureRequest"]


@dataclass(frozen=True)
class CaptureRequest:
    """``forward`` for steps of up to ``max_rows`` rows of decodes, or of drafts of up to ``tokens`` tokens each.

    ``windows``: those of the batches' plans. ``columns``: pages that a sequence may have. Page 0 is written to.
    ``agree``: whether all ranks that run the model together succeeded, given whether this one did. It is called after
    each capture: a step that only some ranks have captured would hang.
    ``tree``: whether drafts may be trees. ``states`` [any, width]: like those of the batches, if these have any.
    ``prompts``: tokens of a step up to which chunks of prompts are worth capturing. ``bounded``: the groups with page
    tables of their own (``Capture.holds_windows``, ``holds_states``), in the order of a step's tables.
    ``head``: what ``CapturedPasses.verify`` computes from the result in the same call, if the device gains by it.
    """

    forward: Callable[[ForwardBatch], Tensor]
    windows: Sequence[int]
    max_rows: int
    columns: int
    agree: Callable[[bool], bool]
    tokens: int = 1
    tree: bool = False
    states: Tensor | None = None
    prompts: int = 0
    head: VerifyHead | None = None
    bounded: Sequence[GroupPages] = ()


@dataclass(frozen=True)
class StepCaptureRequest:
    """Whole steps of decodes of up to ``max_rows`` rows, from the tokens that the device knows to those that it
    chooses.

    ``table`` int32 [slots, positions]: tokens by slot; row 0 belongs to no request. ``windows``, ``columns``,
    ``bounded``, ``agree``: as in ``CaptureRequest``.
    """

    forward: StepForward
    table: Tensor
    windows: Sequence[int]
    max_rows: int
    columns: int
    bounded: Sequence[GroupPages] = ()
    agree: Callable[[bool], bool] = bool


class Capture:
    """Captures passes and steps. A method returns None if the device cannot capture or gains nothing by it; this base
    class always does.

    ``holds_windows``: whether passes of decodes are captured if layers keep only windows, in page tables of their own.
    ``holds_states``: the same if layers keep states. ``spans_ranks``: whether whole steps are captured of a model that
    several ranks run.
    """

    holds_windows: bool = False
    holds_states: bool = False
    spans_ranks: bool = False

    def decodes(self, request: CaptureRequest) -> CapturedPasses | None:
        """Passes of decodes and drafts."""
        return None

    def steps(self, request: StepCaptureRequest) -> CapturedSteps | None:
        """Whole steps, instead of ``decodes``; steps with chunks of prompts too, if the device gains by it."""
        return None

    def native_pass(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        windows: Sequence[int],
        max_tokens: int,
        states: Tensor | None = None,
    ) -> NativePass | None:
        """One call of a pass over up to ``max_tokens`` tokens, if the device is the host.

        ``forward`` is called once, and must hold on to the tensors that are to be read after each call. ``states``
        [max_tokens, width]: its batch's, which are written before a call.
        """
        return None

    def draft(self, run: Callable[[], None]) -> Callable[[], None] | None:
        """A pass that reads and writes the same tensors each time, and reads nothing back to the host."""
        return None

    def precompile(self, passes: Callable[[], None]) -> None:
        """Compile what ``passes`` run, if that takes long: passes of the model over the null page, whose control
        flow does not depend on computed values. May run them, with kernels that compute nothing, or not."""
        return None
