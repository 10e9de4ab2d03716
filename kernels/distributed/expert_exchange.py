"""All-to-all of MoE layers: rows travel to the ranks of their experts (dispatch), and results come back (combine).

Each rank routes its rows, and sends each row once to each rank that has at least one of its experts, together with the
places and weights of all its experts. Results are added in float32, in the order of ranks. There are two modes, as in
DeepEP (https://github.com/deepseek-ai/DeepEP): normal exchanges the numbers of rows first; low_latency has a fixed
capacity, so no rank waits for a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.contract.expert_settings import ExchangeSettings
from kernels.devices.experts import Communicator, ExchangingExperts, Experts, Routing
from kernels.distributed.group import Group
from kernels.distributed.turns import PassValue

__all__ = ["LOW_LATENCY_ROWS", "ExpertExchange"]

LOW_LATENCY_ROWS = 128
"""Most rows of a rank for which ``auto`` is low_latency: DeepEP's default capacity."""


class ExpertExchange:
    """The all-to-all of the ranks ``whole``. They form ``parts`` groups of equal size; the ranks of a group have the
    same rows and divide them."""

    def __init__(self, whole: Group, parts: int, settings: ExchangeSettings) -> None:
        self.whole, self.settings = whole, settings
        self._width = whole.size // parts
        self._communicator: Communicator | None = None
        self._limits: dict[Experts, int] = {}

    def add(self, experts: Experts) -> None:
        """Agree on how rows travel in a layer. All ranks must call it for their ``experts`` of the layer."""
        own = experts.exchange_rows(self.whole.size) if isinstance(experts, ExchangingExperts) else 0
        limit = self.whole.minimum(own)
        if limit:
            self._limits[experts] = limit
            if self._communicator is None:
                self._communicator = Communicator(self.whole.communicator_name(), self.whole.rank, self.whole.size)

    def run(
        self,
        x: Tensor,
        tokens: tuple[int, ...],
        experts: Experts,
        routing: Routing,
        beside: Callable[[], None] | None = None,
        *,
        ids: PassValue | None = None,
    ) -> Tensor:
        """The results of the experts for the rows that this rank sends, and 0 for the others: [rows, hidden].

        ``x`` [rows, hidden]: the rows of this part. ``tokens``: the most rows of each part, the same on all ranks.
        ``routing``: of ``experts``. ``beside`` runs while rows travel. ``ids`` int [rows]: by which experts
        of ``x`` are chosen. All ranks must call it.
        """
        limits = [self._slice(count, within) for count in tokens for within in range(self._width)]
        mine = limits[self.whole.rank]
        own = x[mine]
        if len(own) and ids is not None and ids.value is not None:
            with ids.holding(ids.value[mine]):
                weights, places = experts.route(own)
        elif len(own):
            weights, places = experts.route(own)
        else:
            weights = x.new_empty((0, routing.chosen), dtype=torch.float32)
            places = weights.to(torch.int32)
        sizes = [limit.stop - limit.start for limit in limits]
        rows, mode = _Rows(own, weights, places, experts, routing, beside), self.settings.mode
        low_latency = mode == "low_latency" or (mode == "auto" and max(sizes) <= LOW_LATENCY_ROWS)
        if low_latency and max(sizes) <= self._limits.get(experts, 0):
            total = self._run_operators(rows, max(sizes))
        elif low_latency:
            total = self._run_capacity(rows, sizes)
        else:
            total = self._run_counted(rows)
        if self._width == 1:
            return total.to(x.dtype)
        out = torch.zeros_like(x)
        out[mine] = total.to(x.dtype)
        return out

    def _slice(self, count: int, within: int) -> slice:
        """Which of a part's ``count`` rows its rank ``within`` sends."""
        each = -(-count // self._width)
        return slice(min(count, within * each), min(count, (within + 1) * each))

    def _run_capacity(self, rows: _Rows, sizes: list[int]) -> Tensor:
        """low_latency: every rank gets all rows, since any of them may have an expert there. ``sizes``: the most rows
        of each rank."""
        most, hidden = max(sizes), rows.x.shape[1]
        wait = self.whole.begin_gather_rows(_padded(rows.packed(), most))
        rows.run_beside()
        found = wait()
        if sum(sizes) < len(found):
            found = torch.cat([part[:size] for part, size in zip(found.split(most), sizes, strict=True)])
        out = rows.run_experts(found)
        if len(out) < len(sizes) * most:
            out = torch.cat([_padded(part, most) for part in out.split(sizes)])
        back = self.whole.begin_all_to_all(out)().view(len(sizes), most, hidden)[:, : len(rows.x)]
        total = back[0].float()
        for part in back[1:]:
            total = total + part
        return total

    def _run_operators(self, rows: _Rows, most: int) -> Tensor:
        """low_latency by the device's operators for dispatch and combine."""
        experts, communicator = rows.experts, self._communicator
        assert isinstance(experts, ExchangingExperts)
        assert communicator is not None
        rows.run_beside()
        mask = torch.arange(most, device=rows.x.device) < len(rows.x)
        x, weights = _padded(rows.x, most), _padded(rows.weights.float(), most)
        places = _padded(rows.places.to(torch.int32), most)
        return experts.run_exchanged(x, weights, places, mask, communicator)[: len(rows.x)]

    def _run_counted(self, rows: _Rows) -> Tensor:
        """normal: every rank gets the rows that it has experts of. The host reads their numbers first."""
        size, local = self.whole.size, rows.routing.local
        assert local is not None
        goes = torch.zeros((len(rows.x), size), dtype=torch.bool, device=rows.x.device)
        goes.scatter_(1, rows.places.long() // len(local), True)
        counts = goes.sum(0)
        outgoing, incoming = torch.stack((counts, self.whole.begin_all_to_all(counts)())).tolist()
        sent = goes.t().nonzero()[:, 1]  # rank after rank, in the order of rows
        wait = self.whole.begin_all_to_all(rows.packed().index_select(0, sent), outgoing, incoming)
        rows.run_beside()
        out = rows.run_experts(wait())
        back = self.whole.begin_all_to_all(out, incoming, outgoing)()
        total = torch.zeros(rows.x.shape, dtype=torch.float32, device=rows.x.device)
        for part, at in zip(back.split(outgoing), sent.split(outgoing), strict=True):
            total.index_add_(0, at, part.float())  # a row is there once, so that sums have the order of ranks
        return total


@dataclass(frozen=True, eq=False)
class _Rows:
    """A rank's own rows ``x`` [rows, hidden] with the ``weights`` and ``places`` [rows, chosen] of their experts."""

    x: Tensor
    weights: Tensor
    places: Tensor
    experts: Experts
    routing: Routing
    beside: Callable[[], None] | None

    def packed(self) -> Tensor:
        """The rows with their weights (float32) and places (int32) as bytes: uint8 [rows, n]."""
        parts = self.x, self.weights.float(), self.places.to(torch.int32)
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)

    def run_beside(self) -> None:
        if self.beside is not None:
            self.beside()

    def run_experts(self, packed: Tensor) -> Tensor:
        """The sum over this rank's experts for each of the ``packed`` rows, uint8 [rows, n] -> [rows, hidden]."""
        hidden, chosen, dtype = self.x.shape[1], self.routing.chosen, self.x.dtype
        if not len(packed):
            return self.x.new_empty((0, hidden))
        x, weights, places = packed.split([hidden * dtype.itemsize, 4 * chosen, 4 * chosen], 1)
        return self.experts.run_places(
            x.contiguous().view(dtype), weights.contiguous().view(torch.float32), places.contiguous().view(torch.int32)
        ).contiguous()


def _padded(x: Tensor, rows: int) -> Tensor:
    """``x`` with rows of zeros behind it."""
    return x if len(x) == rows else torch.cat((x, x.new_zeros((rows - len(x), x.shape[1]))))
