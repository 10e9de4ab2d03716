"""Moves experts between ranks while a model runs, by the tokens that each takes (EPLB).

Some steps count the tokens of experts. After so many steps the ranks' counts are summed, and from then on each step
begins with moving the experts of a few layers, until all layers have their new placement. Every rank runs the same
steps and computes the same placement, so that ranks agree without a message. A step waits for one round of moves, in
which a rank sends and receives a bounded number of bytes; incoming experts are kept aside until the layer has all.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.errors import ConfigError, UnsupportedError
from kernels.contract.expert_placement import (
    ExpertMove,
    Placement,
    expert_moves,
    keep_places,
    place_experts,
    utilization,
)
from kernels.contract.expert_settings import RebalanceSettings
from kernels.contract.step import Rebalanced
from kernels.distributed.group import Group
from kernels.models.layers.expert_places import ExpertPlaces, PlacedLayer

__all__ = ["Rebalancer"]

_log = logging.getLogger("troupe.kernels")

_STRIDE = 16
"""One step in so many is counted; it runs eagerly."""

_MIN_GAIN = 1.05
"""A layer whose ranks would not be used better by this factor keeps its experts: a new placement moves most of them."""

_ROUND_BYTES = {"cpu": 8 << 20}
_LARGE_ROUND = 64 << 20
"""Most bytes that a rank sends, and receives, before one step, by device type. Moving them takes about as long as a
step of a model with experts of that size, over a CPU's sockets or network cards. A single expert may be larger."""


class Rebalancer:
    """Rebalances ``places``. ``group``: the ranks of the layers of experts. ``sparse``: the layers that have experts.
    Raises ConfigError if experts of their kind cannot move."""

    def __init__(self, places: ExpertPlaces, settings: RebalanceSettings, group: Group, sparse: list[int]) -> None:
        self._places, self._settings, self._group, self._sparse = places, settings, group, sparse
        self._width = group.size // places.parts  # ranks that share a part
        self._part, self._within = divmod(group.rank, self._width)
        self._level = logging.INFO if group.rank == 0 else logging.DEBUG  # each rank would say the same
        self._stride = max(1, min(_STRIDE, settings.iterations // 4))
        self._steps = 0
        device = places.layers[0].dispatch.table.device
        self._counts = torch.zeros((len(places.layers), places.count), dtype=torch.int64, device=device)
        self._loads: npt.NDArray[np.int64] = np.zeros((0, 0), dtype=np.int64)
        self.round_bytes = _ROUND_BYTES.get(device.type, _LARGE_ROUND)
        self._left: deque[int] = deque()  # layers whose experts are still to be moved
        self._transfer: _Transfer | None = None  # of the layers before them
        self._utilization, self._seconds, self._moved = 1.0, 0.0, 0
        self.moved = 0
        """Places of all ranks that have got another expert, since the model was loaded."""
        self.counting = False
        """Whether the current step counts the tokens of experts."""
        try:
            forms = [self._form(layer) for layer in places.layers]
        except UnsupportedError as error:
            raise ConfigError(f"the experts of this model cannot be moved: {error}; leave --enable-eplb out") from error
        digest = torch.tensor([[crc32(repr(forms).encode())]], device=device)
        parts = group.all_gather_rows(digest).view(-1, self._width)  # experts move between ranks of a column
        if bool((parts != parts[0]).any()):
            raise ConfigError(
                "the experts of this model cannot be moved: ranks store them in different formats; leave --enable-eplb "
                "out"
            )
        # Other ranks may have larger slices of an inner dimension, but all ranks need the same rounds.
        sizes = torch.tensor([[_size(self._weights(layer, 0)) for layer in places.layers]], device=device)
        self._sizes: list[int] = group.all_gather_rows(sizes).amax(0).tolist()

    @torch.inference_mode()
    def before_step(self) -> Rebalanced | None:
        """Call before each step that has rows, on any rank of data-parallel attention, on all ranks. Returns what was
        done, if a rebalance has ended."""
        self._steps += 1
        self.counting = self._steps % self._stride == 0
        if self._left or self._transfer is not None:
            return self._move()
        return self._plan() if self._steps % self._settings.iterations == 0 else None

    def add(self, counts: Tensor) -> None:
        """The tokens of experts int [layers, experts] in a step."""
        self._counts += counts[self._sparse]

    def _plan(self) -> Rebalanced | None:
        self._loads = self._group.all_reduce(self._counts).cpu().numpy().copy()
        self._counts.zero_()
        self._utilization, self._seconds, self._moved = self._mean_utilization(), 0.0, 0
        if self._utilization > self._settings.min_utilization:
            _log.log(
                self._level, "EPLB: experts keep their placement at a utilization of %.0f %%", 100 * self._utilization
            )
            return Rebalanced(self._utilization)
        self._left.extend(range(len(self._places.layers)))
        return None

    def _mean_utilization(self) -> float:
        placement = np.stack([layer.placement for layer in self._places.layers])
        return float(utilization(self._loads, placement, self._places.parts).mean())

    def _move(self) -> Rebalanced | None:
        """Run the next round of moves."""
        begun = time.perf_counter()
        if self._transfer is None:
            self._transfer = self._next()
        if self._transfer.run():
            self._moved += self._transfer.count
            self._transfer = None
        self._seconds = max(self._seconds, time.perf_counter() - begun)
        if self._left or self._transfer is not None:
            return None
        self.moved += self._moved
        _log.log(
            self._level,
            "EPLB: moved %d experts; utilization was %.0f %%, with the new placement it would have been %.0f %%; the "
            "longest wait of a step was %.3f s",
            self._moved,
            100 * self._utilization,
            100 * self._mean_utilization(),
            self._seconds,
        )
        return Rebalanced(self._utilization, self._moved, self._seconds)

    def _next(self) -> _Transfer:
        """The moves of the next layers."""
        places, parts, changed = self._places, self._places.parts, list[tuple[int, Placement]]()
        for _ in range(min(self._settings.layers_per_chunk, len(self._left))):
            number = self._left.popleft()
            loads, old = self._loads[number : number + 1], places.layers[number].placement[None]
            new = keep_places(old, place_experts(loads, old.shape[1], parts), parts)
            if utilization(loads, new, parts)[0] >= _MIN_GAIN * utilization(loads, old, parts)[0]:
                changed.append((number, new[0]))
        return _Transfer(self, changed)

    def _form(self, layer: PlacedLayer) -> list[tuple[torch.dtype, torch.Size]]:
        """What all experts of a layer here are made of."""
        each = [
            [(weight.dtype, weight.shape) for weight in self._weights(layer, number)]
            for number in range(len(layer.placement) // self._places.parts)
        ]
        if any(form != each[0] for form in each):
            raise UnsupportedError("those of a layer are stored in different formats")
        return each[0]

    def _weights(self, layer: PlacedLayer, number: int) -> list[Tensor]:
        assert layer.experts is not None
        return layer.experts.weights(number)


class _Round:
    """Moves before one step, in which a rank sends and receives at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.moves: list[tuple[PlacedLayer, ExpertMove]] = []
        self._sent, self._received = Counter[int](), Counter[int]()

    def take(self, layer: PlacedLayer, move: ExpertMove, ends: tuple[int, int], size: int) -> bool:
        """Add a move of ``size`` bytes between the parts ``ends``, if it fits; the first of a round always does."""
        source, target = ends
        if self.moves and max(self._sent[source], self._received[target]) + size > self._limit:
            return False
        self._sent[source] += size
        self._received[target] += size
        self.moves.append((layer, move))
        return True


class _Transfer:
    """The moves of the experts of some layers, in rounds. Nothing is written before all that is sent has been read.
    ``changed``: numbers of layers and their new placements."""

    def __init__(self, rebalancer: Rebalancer, changed: list[tuple[int, Placement]]) -> None:
        self._to, self._changed = rebalancer, changed
        self._rounds = deque([_Round(rebalancer.round_bytes)])
        self._incoming: list[tuple[Tensor, list[list[Tensor]]]] = []
        """Received bytes of experts, with the weights of their new places on this rank."""
        self.count = 0
        """The number of places, over all ranks, that get another expert."""
        for number, placement in changed:
            layer, size = rebalancer._places.layers[number], rebalancer._sizes[number]
            for move in expert_moves(layer.placement, placement, rebalancer._places.parts):
                self.count += len(move.targets)
                ends = self._part(layer, move.source), self._part(layer, move.targets[0])
                if not any(each.take(layer, move, ends, size) for each in self._rounds):
                    self._rounds.append(_Round(rebalancer.round_bytes))
                    self._rounds[-1].take(layer, move, ends, size)

    def _part(self, layer: PlacedLayer, place: int) -> int:
        return place * self._to._places.parts // len(layer.placement)

    def run(self) -> bool:
        """Run a round. Returns whether it was the last one, after which the experts are in their new places."""
        to, moves = self._to, self._rounds.popleft().moves
        outgoing, incoming = dict[int, list[Tensor]](), dict[int, list[list[list[Tensor]]]]()
        for layer, move in moves:
            source, target = self._part(layer, move.source), self._part(layer, move.targets[0])
            size = len(layer.placement) // to._places.parts
            if source == to._part:
                outgoing.setdefault(target, []).extend(_bytes(to._weights(layer, move.source % size)))
            if target == to._part:
                incoming.setdefault(source, []).append([to._weights(layer, place % size) for place in move.targets])
        sent = {part: torch.cat(outgoing.pop(part)) for part in list(outgoing)}
        received = {
            part: sent[part]
            if part == to._part
            else torch.empty(sum(_size(each[0]) for each in experts), dtype=torch.uint8, device=experts[0][0][0].device)
            for part, experts in incoming.items()
        }
        to._group.exchange(
            {part * to._width + to._within: bits for part, bits in sent.items() if part != to._part},
            {part * to._width + to._within: bits for part, bits in received.items() if part != to._part},
        )
        for part, bits in received.items():
            pieces = bits.split([_size(each[0]) for each in incoming[part]])
            self._incoming += zip(pieces, incoming[part], strict=True)
        if self._rounds:
            return False
        for piece, places in self._incoming:
            for weights in places:
                _unpack(piece, weights)
        for number, placement in self._changed:
            to._places.place(to._places.layers[number], placement)
        return True


def _size(weights: list[Tensor]) -> int:
    return sum(weight.nbytes for weight in weights)


def _bytes(weights: list[Tensor]) -> list[Tensor]:
    return [weight.reshape(-1).view(torch.uint8) for weight in weights]


def _unpack(bits: Tensor, weights: list[Tensor]) -> None:
    for weight, piece in zip(weights, bits.split([weight.nbytes for weight in weights]), strict=True):
        aligned = piece if piece.storage_offset() % weight.itemsize == 0 else piece.clone()
        weight.copy_(aligned.view(weight.dtype).view(weight.shape))
