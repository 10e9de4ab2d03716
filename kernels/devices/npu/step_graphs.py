"""Whole steps of decodes on an NPU: one copy to the device, a graph from the tokens to the next ones, one copy back.

The host knows where the tokens of a step stand and where the next ones go, but not the tokens themselves. So it brings
all places, packed; the graph looks the tokens up, runs the model, and finds and writes the next ones. Rows that are
drawn without edits of their logits are drawn in a second graph behind the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.core.attention_rows import StepTokens
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Draws
from kernels.devices.capture import StepCaptureRequest
from kernels.devices.memory import DeviceMemory
from kernels.devices.npu.captured import CapturedGraphs, Plans
from kernels.devices.npu.drawing import DRAW_NUMBERS, DrawTokens, draws_at
from kernels.devices.npu.fused_attention import FusedPart
from kernels.devices.prepared import CapturedStepResult

__all__ = ["StepGraphs"]

_ALIGN = 64


class _Inputs:
    """The input of a step, in one block of bytes that lies alike on the host and on the device.

    ``tokens``, ``targets`` int64 [rows]: places in the table of tokens, of each row's last and of its next one.
    ``positions``, ``index`` int64 [rows]: as in ``ForwardBatch``. ``draws`` int32 [rows, 6]. ``pages`` int32
    [rows, columns]. The pages change seldom and stand last.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        shapes = [(np.int64, (rows,))] * 4 + [(np.int32, (rows, DRAW_NUMBERS)), (np.int32, (rows, columns))]
        begins, size = [], 0
        for dtype, shape in shapes:
            begins.append(size)
            size += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
        self.host = np.zeros(size, np.uint8)
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.pages_begin, self._row = begins[-1], 4 * columns

        parts: list[npt.NDArray[Any]] = [
            np.ndarray(shape, dtype, self.host, begin) for (dtype, shape), begin in zip(shapes, begins, strict=True)
        ]
        self.tokens, self.targets, self.positions, self.index, self.draws, self.pages = parts
        self.draws[:, 5] = 1  # what top-k takes in rows that are not drawn
        self.on_device: list[Tensor] = [
            self.memory[begin : begin + part.nbytes].view(torch.from_numpy(part).dtype).view(part.shape)
            for part, begin in zip(parts, begins, strict=True)
        ]

    def bring(self, memory: DeviceMemory, rows: int, pages: bool) -> None:
        """Copy what changed to the device: all but the pages, or with those of the first ``rows``."""
        end = self.pages_begin + (rows * self._row if pages else 0)
        memory.write(self.memory[:end], self.host[:end])


class StepGraphs:
    """Captures steps of ``sizes`` rows. ``plan``, ``page_size``, ``mask``, ``padded``: as ``DecodeGraphs``. ``draw``:
    what draws tokens. For the rest see ``StepCaptureRequest``.
    """

    def __init__(
        self,
        request: StepCaptureRequest,
        sizes: Sequence[int],
        plan: Plans,
        page_size: int,
        mask: Tensor,
        padded: bool,
        memory: DeviceMemory,
        draw: DrawTokens,
    ) -> None:
        rows, device = max(sizes), mask.device
        self._forward, self._windows, self._plan, self._mask = request.forward, request.windows, plan, mask
        self._table, self._stride = request.table.view(-1), request.table.shape[1]
        self._page_size, self._padded, self._memory, self._draw = page_size, padded, memory, draw
        self._inputs = _Inputs(rows, request.columns, device)
        self._none = torch.tensor(-1, dtype=torch.int32, device=device)
        sizes = [size for size in sizes if size <= page_size or not padded]
        self._steps = CapturedGraphs(sizes, self._prepare, request.agree)
        self.sizes = self._steps.sizes
        whole = len(self.sizes) == len(sizes)  # else more graphs will fail alike
        self._draws = {
            form: CapturedGraphs(
                self.sizes if whole else [],
                partial(self._prepare_draw, form),
                request.agree,
                attends=False,
                what="sampling",
            )
            for form in draw.forms
        }

    def run(self, step: StepTokens) -> CapturedStepResult | None:
        """Run the step; None if no graph fits it."""
        count = len(step.slots)
        size = next((size for size in self.sizes if size >= count), 0)
        if not size or (size > count and not self._padded):
            return None
        form = None if step.draws is None else self._draw.form(step.draws)
        drawing = None if form is None else self._draws[form]
        if drawing is not None and size not in drawing.sizes:
            drawing = None
        self._fill(step, size, step.draws if drawing is not None else None)
        result = self._steps.replay(size, [*step.lengths.tolist(), *[1] * (size - count)])
        tokens = result.argmax if drawing is None else drawing.replay(size)
        return CapturedStepResult(
            result.hidden[:count], result.logits[:count], tokens[:count], drawn=drawing is not None
        )

    def _fill(self, step: StepTokens, size: int, draws: Draws | None) -> None:
        """Bring the step's rows to the device, and padding behind them: token 0 of the table, which is no request's,
        in a place of the null page for each."""
        inputs, count, page_size = self._inputs, len(step.slots), self._page_size
        positions, columns = step.lengths - 1, step.pages.shape[1]
        begins = step.slots * self._stride
        inputs.tokens[:count] = begins + positions
        inputs.targets[:count] = (begins + step.lengths) * step.grows
        inputs.positions[:count] = positions
        page = step.pages[np.arange(count), positions // page_size].astype(np.int64)
        inputs.index[:count] = page * page_size + positions % page_size
        for padded in (inputs.tokens, inputs.targets, inputs.positions):
            padded[count:size] = 0
        inputs.index[count:size] = np.arange(count, size) % page_size
        if draws is not None:
            inputs.draws[:count] = draws_at(draws, step.lengths)
            inputs.draws[count:size] = inputs.draws[0]
        held = inputs.pages
        changed = not np.array_equal(held[:count, :columns], step.pages) or bool(held[count:size, 0].any())
        if changed:
            held[:count, :columns], held[count:size, 0] = step.pages, 0
        inputs.bring(self._memory, size, changed)

    def _prepare(self, size: int) -> Callable[[], CapturedStepResult]:
        inputs = self._inputs
        inputs.index[:] = np.arange(len(inputs.index)) % self._page_size
        inputs.bring(self._memory, len(inputs.index), True)
        tokens, targets, positions, index, _, pages = (part[:size] for part in inputs.on_device)
        ends = [*range(1, size + 1)]
        parts = {window: FusedPart(0, size, ends, [1] * size, pages, self._mask, window) for window in self._windows}
        plans = {window: self._plan(part) for window, part in parts.items()}

        def step() -> CapturedStepResult:
            ids = self._table.index_select(0, tokens)
            hidden, logits = self._forward(ForwardBatch(ids, positions, index, plans), None)
            found = logits.argmax(-1).to(torch.int32)
            found = torch.where(logits.amax(-1).isfinite(), found, self._none)
            self._table.index_copy_(0, targets, found.clamp(min=0))
            return CapturedStepResult(hidden, logits, found)

        return step

    def _prepare_draw(self, form: str, size: int) -> Callable[[], Tensor]:
        step, draws = self._steps.result(size), self._inputs.on_device[4][:size]
        for uninitialized in (step.logits, step.argmax):
            uninitialized.zero_()
        targets, temperature = self._inputs.on_device[1][:size], draws.view(torch.float32)[:, 2]

        def drawn() -> Tensor:
            tokens = self._draw(form, step.logits, draws).to(torch.int32)
            # Rows that are greedy or not finite stay as they are.
            tokens = torch.where((step.argmax >= 0) & (temperature > 0), tokens, step.argmax)
            self._table.index_copy_(0, targets, tokens.clamp(min=0))
            return tokens

        return drawn
