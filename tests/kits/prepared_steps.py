"""A CPU that imitates a device with captured whole steps."""

from __future__ import annotations

import numpy as np
import torch

import kernels.execution.runner
from kernels.core.arrays import ragged
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.devices.capture import Capture
from kernels.devices.cpu.device import CpuDevice
from kernels.devices.prepared import CapturedStepResult, CapturedSteps

__all__ = ["drive_prepared"]


class PreparedSteps(Capture):
    """Whole steps without a graph."""

    def __init__(self, device):
        self.device = device

    def native_pass(self, *args, **options):
        return None

    def steps(self, request):
        forward, table, windows, device = request.forward, request.table, request.windows, self.device

        def run(given):
            if len(given.slots) > 4:
                return None
            device.prepared += 1
            device.grown += int(given.grows.sum())
            slots, at = torch.from_numpy(given.slots), torch.from_numpy(given.lengths) - 1
            size = device.page_size
            page = given.pages[np.arange(len(given.slots)), (given.lengths - 1) // size].astype(np.int64)
            index = torch.from_numpy(page * size + (given.lengths - 1) % size)
            rows = AttentionRows(given.lengths - 1, np.ones_like(given.lengths), given.pages, len(given.slots))
            plans = {window: device.attention.plan(rows, window) for window in windows}
            hidden, logits = forward(ForwardBatch(table[slots, at], at, index, plans), None)
            return left(hidden, logits, given, slots, at + 1)

        def left(hidden, logits, given, slots, lengths):
            nonfinite = ~logits.isfinite().all(-1)
            argmax = logits.argmax(-1).masked_fill(nonfinite, 0).to(torch.int32)
            grows = torch.from_numpy(given.grows)
            table[slots[grows], lengths[grows]] = argmax[grows]
            argmax.masked_fill_(nonfinite, -1)
            arrives = (lambda: [argmax]) if device.brings else None
            return CapturedStepResult(hidden, logits, torch.full_like(argmax, -1) if device.brings else argmax, arrives)

        def prompts(given):
            if given.counts.sum() > 150:
                return None
            device.chunks += 1
            row, at = np.repeat(np.arange(len(given.slots)), given.counts), ragged(given.starts, given.counts)
            index = given.pages[row, at // device.page_size].astype(np.int64) * device.page_size + at % device.page_size
            rows = AttentionRows(given.starts, given.counts, given.pages, given.decodes)
            plans = {window: device.attention.plan(rows, window) for window in windows}
            tokens = table[torch.from_numpy(given.slots[row]), torch.from_numpy(at)]
            last = torch.from_numpy(np.cumsum(given.counts) - 1)
            found = forward(ForwardBatch(tokens, torch.from_numpy(at), torch.from_numpy(index), plans), last)
            assert len(found[0]) == len(last)  # what is behind the last layer's keys and values is of these alone
            return left(*found, given, torch.from_numpy(given.slots), torch.from_numpy(given.starts + given.counts))

        return CapturedSteps((1, 2, 4), run, prompts)


class Preparing(CpuDevice):
    prepared = 0
    chunks = 0
    grown = 0
    brings = False

    def __init__(self, *given):
        super().__init__(*given)
        self.capture = PreparedSteps(self)


def drive_prepared(drive, monkeypatch, path, **options):
    """A driver whose device captures steps, and that device."""
    made = []

    def select(config):
        device = Preparing(config.threads, config.tp_size)
        device.page_size = config.page_size
        made.append(device)
        return device

    with monkeypatch.context() as patch:
        patch.setattr(kernels.execution.runner, "select_device", select)
        driver = drive(path, **options)
    return driver, made[0]
