"""Captures a model's passes and steps at load, to reduce the work of the host in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from kernels.contract.caches import GroupPages
from kernels.contract.config import RunnerConfig
from kernels.core.attention_rows import PromptTokens, StepTokens
from kernels.core.batch import ForwardBatch
from kernels.core.layer_context import LayerContext
from kernels.core.operators import Acceptance
from kernels.core.tree import DraftTree
from kernels.devices.base import Device
from kernels.devices.capture import CaptureRequest, StepCaptureRequest
from kernels.devices.prepared import CapturedPasses, CapturedStepResult, CapturedSteps, VerifyHead
from kernels.models.decoder import Decoder
from kernels.state.slots import SlotTable

__all__ = ["Passes", "captures_draft"]


def captures_draft(config: RunnerConfig, device: Device) -> bool:
    """Whether passes of a draft are captured. The CPU has no graphs to disable."""
    settings = config.speculation
    return settings is None or not settings.disable_graphs or device.torch_device.type == "cpu"


class Passes:
    """Captures passes of ``model`` over ``caches``, with the tables of ``slots``. ``agree``, ``bounded``: see
    ``CaptureRequest``. ``moves``: whether passes that verify trees can move what they accept in ``caches``."""

    def __init__(
        self,
        config: RunnerConfig,
        device: Device,
        model: Decoder,
        caches: list[Any],
        *,
        slots: SlotTable,
        windows: Iterable[int],
        agree: Callable[[bool], bool],
        bounded: Sequence[GroupPages] = (),
        moves: bool = True,
    ) -> None:
        self._config, self._device, self._agree, self._bounded = config, device, agree, bounded
        self._moves = moves
        self._model, self._caches, self._slots, self._windows = model, caches, slots, sorted(windows)

    @property
    def skipped_adapters(self) -> LayerContext | None:
        """The model's, if what is captured ``without_adapters`` runs as if it had none; else None."""
        return self._model.rows if self._device.linear.skips_adapters else None

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Capture for steps in which no slot has an adapter. Only if there are ``skipped_adapters``."""
        adapters = self._model.rows
        assert adapters is not None
        adapters.idle = True
        try:
            yield
        finally:
            adapters.idle = False

    def capture_decodes(self, rows: int, tokens: int = 1, tree: bool = False, depth: int = 0) -> CapturedPasses | None:
        """Capture passes of decodes and drafts (``Capture.decodes``). ``depth``: the longest path that is verified."""
        device, model, table = self._device, self._model, self._slots.tokens
        drafting, greedy = device.drafting, device.sampling.greedy
        speculation, head = self._config.speculation, None

        def find(result: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            assert greedy is not None
            logits = model.logits(model.split(result)[0])
            return logits, *greedy(logits)

        def accept(given: DraftTree, rows: Tensor, index: Tensor, sampled: Tensor, nonfinite: Tensor) -> Acceptance:
            assert drafting is not None
            acceptance = drafting.accept(given, rows, sampled, nonfinite, min(depth, tokens - 1), forced, table)
            assert acceptance is not None
            if tree:
                drafting.move_accepted(self._caches, index, acceptance.rows, acceptance.outcome)
            return acceptance

        stages = model.stage.size > 1
        alone = (
            self._config.tp_size == 1 and not stages and not self._bounded
        )  # states wait until the host knows what is accepted
        if speculation is not None and tokens > 1 and greedy is not None and alone:
            forced = int(speculation.fixed_acceptance)
            known = drafting is not None and forced == speculation.fixed_acceptance and (self._moves or not tree)
            head = VerifyHead(find, accept if known else None, lambda result: model.split(result)[1])
        request = CaptureRequest(
            forward=lambda batch: model.run(batch, self._caches),
            windows=self._windows,
            max_rows=rows,
            columns=self._slots.pages.shape[1],
            agree=self._agree,
            tokens=tokens,
            tree=tree,
            states=None if model.stage.is_first else model.received,
            prompts=self._config.max_step_tokens,
            head=head,
            bounded=self._bounded,
        )
        return device.capture.decodes(request)

    def capture_steps(self, rows: int) -> CapturedSteps | None:
        """Capture whole steps (``Capture.steps``); if there are adapters, also those of rows without them."""
        found, adapters = self._capture_steps(rows), self.skipped_adapters
        if found is None or adapters is None:
            return found
        with self.without_adapters():
            plain = self._capture_steps(rows)
        if plain is None or plain.rows != found.rows:  # memory was short
            return found
        return _by_use(adapters, found, plain)

    def _capture_steps(self, rows: int) -> CapturedSteps | None:
        model, caches = self._model, self._caches

        def forward(batch: ForwardBatch, last: Tensor | None) -> tuple[Tensor, Tensor]:
            hidden = model.split(model.forward(batch, caches, wanted=last))[0]
            return hidden, model.logits(hidden)

        columns = self._slots.pages.shape[1]
        return self._device.capture.steps(
            StepCaptureRequest(forward, self._slots.tokens, self._windows, rows, columns, self._bounded, self._agree)
        )


def _by_use(adapters: LayerContext, used: CapturedSteps, unused: CapturedSteps) -> CapturedSteps:
    """``used`` where a slot has an adapter, else ``unused``."""

    def run(given: StepTokens) -> CapturedStepResult | None:
        return (used if adapters.used else unused).run(given)

    def prompts(given: PromptTokens) -> CapturedStepResult | None:
        found = (used if adapters.used else unused).prompts
        return None if found is None else found(given)

    return CapturedSteps(used.rows, run, None if used.prompts is None and unused.prompts is None else prompts)
