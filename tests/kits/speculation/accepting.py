"""A device whose verifying passes accept on the device, in plain torch."""

from __future__ import annotations

import numpy as np
import torch

from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Acceptance
from kernels.core.tree import DraftTree
from kernels.devices.cpu.capture import CpuCapture
from kernels.devices.cpu.device import CpuDevice
from kernels.devices.cpu.memory import CpuMemory
from kernels.devices.draft_kernels import DraftKernels
from kernels.devices.prepared import CapturedPasses, PassResult, VerifyOutputs
from kernels.speculation.verify import walk

NOWHERE = 1 << 20  # a page that does not exist
SIZES = (2, 4)


class AcceptingPasses:
    """Run eagerly; inputs and outputs have fixed addresses, as with graphs."""

    def __init__(self, capture, forward, windows, columns, tokens, head):
        self.capture, self.forward, self.windows, self.tokens, self.head = capture, forward, windows, tokens, head
        self.rows, self.pages = torch.zeros((4, 4), dtype=torch.int64), torch.zeros((4, columns), dtype=torch.int32)
        self.rows[:, 2], self.rows[:, 3] = 1, torch.arange(4) * tokens  # only roots, in slot 0
        self.held = {size: self.run(size, *self.nodes(size)) for size in SIZES}
        self.ends = {
            size: VerifyOutputs(self.rows[:size], self.pages[:size], found, head.features(result))
            for size, (result, _, found) in self.held.items()
        }

    def nodes(self, size):
        nodes = torch.zeros((4, size, self.tokens), dtype=torch.int64)
        nodes[1], nodes[3] = -1, 1
        return nodes

    def verify(self, starts, pages, tree, slots=None):
        count, tokens = len(pages), self.tokens
        size = min((size for size in SIZES if size >= count), default=0)
        if slots is None or not size or tree.tokens.shape[1] != tokens:
            return None
        if starts is None:
            starts = (self.rows[:count, 1] + self.held[size][2].packed[:count, 0].abs()).numpy()
        self.rows[:, :3] = torch.tensor([0, 0, 1])
        self.rows[:count, :3] = torch.from_numpy(np.stack((slots, starts, np.full(count, tokens)), 1))
        self.pages.fill_(NOWHERE)[:, : pages.shape[1]] = 0
        self.pages[:count, : pages.shape[1]] = torch.from_numpy(pages)
        given = self.nodes(size)
        for held, new in zip(given, (tree.tokens, tree.parents, tree.depths, tree.bits), strict=True):
            held[:count] = new
        result, index, found = self.held[size]
        new = self.run(size, *given)
        result.copy_(new[0]), index.copy_(new[1]), found.packed.copy_(new[2].packed)
        return PassResult(result[: count * tokens], index[: count * tokens], None, found.first_rows(count), size)

    def run(self, size, ids, parents, depths, bits):
        page, starts = self.capture._attention.caches.page_size, self.rows[:size, 1]
        at = starts[:, None] + torch.arange(self.tokens)
        index = (self.pages[:size].long().gather(1, at // page) * page + at % page).reshape(-1)
        counts = np.full(size, self.tokens)
        rows = AttentionRows(starts.numpy().copy(), counts, self.pages[:size].numpy(), 0, size, bits)
        plans = {window: self.capture._attention.plan(rows, window) for window in self.windows}
        positions = (starts[:, None] + depths).reshape(-1)
        result = self.forward(ForwardBatch(ids.reshape(-1), positions, index, plans))
        tree = DraftTree(ids, parents, depths, bits)
        return result, index, self.head.accept(tree, self.rows[:size], index, *self.head.find(result)[1:])


class AcceptingDrafting(DraftKernels):
    """The accepting part of ``DraftKernels`` in plain torch. ``cache``: that of a CPU."""

    candidates = None  # none

    def __init__(self):
        self.cache = CpuDevice(1).cache

    def make_tree_builder(self, shape, given):
        return None

    def copy_accepted(self, *given):
        return False

    def accept(self, tree, rows, sampled, nonfinite, depth, forced, table):
        slots, starts, counts, first = rows.T
        node = torch.arange(tree.tokens.shape[1])
        places = (first[:, None] + node).clamp(max=len(sampled) - 1)
        found = walk(tree, counts, sampled[places], depth, None, forced)
        levels = torch.arange(found.path.shape[1])
        packed = torch.zeros((len(rows), Acceptance.width(len(levels))), dtype=torch.int64)
        accepted = Acceptance(packed, len(levels), rows)
        accepted.outcome[:, 0], accepted.outcome[:, 2:] = found.counts, found.path
        accepted.outcome[:, 1] = torch.where(node < counts[:, None], tree.depths, 0).amax(1)
        accepted.tokens.copy_(found.tokens)
        table[slots[:, None], starts[:, None] + 1 + levels] = found.tokens.int()
        return accepted

    def move_accepted(self, caches, index, rows, outcome):
        levels, first = torch.arange(outcome.shape[1] - 2), rows[:, 3:]
        inside = levels < outcome[:, :1]
        source, target = (
            index[first + torch.where(inside, nodes, 0)].reshape(-1) for nodes in (outcome[:, 2:], levels)
        )
        self.cache.move_all(caches, source, target, len(levels))
        return True


accept, move_accepted = AcceptingDrafting.accept, AcceptingDrafting.move_accepted


def decodes(self, request):
    head = request.head
    if head is None or head.accept is None:
        return None
    passes = AcceptingPasses(self, request.forward, request.windows, request.columns, request.tokens, head)
    return CapturedPasses(SIZES, lambda batch: None, verify=passes.verify, accept_outputs=passes.ends)


def fetch(self, tensors, lasting=False):
    found = [tensor.clone() for tensor in tensors]
    return lambda: found


def accepting(monkeypatch):
    """Assumes that all rows are finite."""
    monkeypatch.setattr(CpuDevice, "drafting", AcceptingDrafting())
    monkeypatch.setattr(CpuCapture, "decodes", decodes)
    monkeypatch.setattr(CpuMemory, "fetch", fetch)
