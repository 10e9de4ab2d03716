"""Experts that move between two ranks, a thread each: their layers add up to the same as before."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.contract.errors import ConfigError
from kernels.contract.expert_placement import trivial_placement
from kernels.contract.expert_settings import RebalanceSettings
from kernels.devices.experts import ExpertWeights, Routing
from kernels.distributed.group import Group
from kernels.execution.rebalancing import _ROUND_BYTES, Rebalancer
from kernels.models.layers.expert_places import ExpertPlaces
from kernels.weights.quantization.weights import (
    GroupedWeight,
    Int8Weight,
    Projection,
    StaticActivation,
    quantize_fp8,
    quantize_int8,
)
from tests.kits.native import compiled, needs_native, platform
from tests.kits.waiting import PATIENCE

__all__ = ["compiled", "platform"]

pytestmark = [needs_native, pytest.mark.usefixtures("compiled")]

HIDDEN, INNER, COUNT, PLACES, LAYERS = 256, 64, 6, 8, 3
BF16 = torch.bfloat16


class Meeting:
    """Where two ranks meet."""

    def __init__(self) -> None:
        self.barrier, self.held = Barrier(2, timeout=PATIENCE), list[Any]([None, None])

    def swap(self, rank: int, value: Any) -> list[Any]:
        """What both bring."""
        self.held[rank] = value
        self.barrier.wait()
        both = list(self.held)
        self.barrier.wait()
        return both


class Pair(Group):
    size = 2

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank = meeting, rank

    def all_reduce(self, x: Tensor) -> Tensor:
        one, other = self._meeting.swap(self.rank, x)
        return torch.add(one, other)

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        other = self._meeting.swap(self.rank, outgoing)[1 - self.rank]
        assert set(other) == ({self.rank} if incoming else set())
        for target in incoming.values():
            target.copy_(other[self.rank])


class Alone(Group):
    """The first of two ranks, of which the other has no tokens."""

    size = 2


def grouped(weight: Tensor) -> GroupedWeight:
    outputs, inputs = weight.shape
    generator = torch.Generator().manual_seed(int(weight[0, 0] * 1e6))
    values = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, generator=generator)
    scales = torch.rand(outputs, inputs // 32, generator=generator) / 4 / inputs**0.5
    return GroupedWeight(values, scales, None, 32, 4, order=torch.randperm(inputs, generator=generator))


def halves(weight: Tensor) -> Projection:
    return quantize_int8(weight[:64]), grouped(weight[64:])


KINDS = {
    "floats": lambda weight: weight,
    "float32": lambda weight: weight.float(),
    "int8": quantize_int8,
    "4 bits": grouped,
    "e4m3": quantize_fp8,
    "side by side": lambda weight: halves(weight) if len(weight) == 2 * INNER else quantize_int8(weight),
}


def made(platform: Any, kind: str, places: ExpertPlaces, rank: int) -> list[Any]:
    """The layers of a rank."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(BF16)

    result = []
    for _ in range(LAYERS):
        placed, router = places.take(), random(COUNT, HIDDEN)
        experts = [
            ExpertWeights(
                KINDS[kind](random(2 * INNER, HIDDEN)),
                None,
                KINDS[kind](random(HIDDEN, INNER)),
                random(HIDDEN).to(torch.float32 if kind == "float32" else BF16),
            )
            for _ in range(COUNT)
        ]
        local = range(rank * PLACES // 2, (rank + 1) * PLACES // 2)
        own = [experts[expert] for expert in placed.placement[local.start : local.stop]]
        router = router.float() if kind == "float32" else router
        routing = Routing(2, True, local=local, dispatch=placed.dispatch)
        placed.experts = platform.experts.make(router, None, own, routing)
        result.append(placed.experts)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_moved_experts_add_up_to_the_same(kind: str, platform: Any) -> None:
    meeting = Meeting()
    placement = trivial_placement(LAYERS, COUNT, PLACES)
    every = [ExpertPlaces(placement.copy(), COUNT, 2, "static", torch.device("cpu")) for _ in range(2)]
    layers = [made(platform, kind, places, rank) for rank, places in enumerate(every)]
    settings = RebalanceSettings(iterations=4, layers_per_chunk=2)
    balancers = [Rebalancer(places, settings, Pair(meeting, rank), [0, 2, 3]) for rank, places in enumerate(every)]
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1))
    x = x if kind == "float32" else x.to(BF16)

    def sums() -> list[Tensor]:
        return [one(x).float() + other(x).float() for one, other in zip(*layers, strict=True)]

    before = sums()
    counts = torch.tensor([[10, 20, 900, 30, 40, 50], [0] * 6, [1, 2, 300, 4, 500, 6], [10, 10, 10, 10, 10, 900]])

    def step(rank: int) -> None:
        balancers[rank].before_step()
        if balancers[rank].counting:
            balancers[rank].add(counts)

    with ThreadPoolExecutor(2) as pool:
        for number in range(6):
            list(pool.map(step, range(2)))
            moved = [int((layer.placement != row).any()) for layer, row in zip(every[0].layers, placement, strict=True)]
            assert sum(moved) == max(0, min(3, 2 * (number - 3)))  # two layers a step from the fifth on
    for one, other in zip(every[0].layers, every[1].layers, strict=True):
        assert (one.placement == other.placement).all()
        assert torch.equal(one.dispatch.table, other.dispatch.table)
    assert balancers[0].moved == balancers[1].moved > 0
    for old, new in zip(before, sums(), strict=True):
        assert (new - old).norm() < 1e-2 * old.norm()


def test_moves_are_divided_into_rounds_that_keep_layers_whole(platform: Any, monkeypatch: Any) -> None:
    """One expert is sent to and from each rank before a step; the layer changes once it has all."""
    monkeypatch.setitem(_ROUND_BYTES, "cpu", 1)
    meeting, placement = Meeting(), trivial_placement(LAYERS, COUNT, PLACES)
    every = [ExpertPlaces(placement.copy(), COUNT, 2, "static", torch.device("cpu")) for _ in range(2)]
    layers = [made(platform, "floats", places, rank) for rank, places in enumerate(every)]
    balancers = [
        Rebalancer(places, RebalanceSettings(iterations=4), Pair(meeting, rank), [0, 1, 2])
        for rank, places in enumerate(every)
    ]
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1)).to(BF16)
    expected, ends = [one(x).float() + other(x).float() for one, other in zip(*layers, strict=True)], list[int]()
    counts = torch.tensor([[10, 20, 900, 30, 40, 50], [0] * 6, [900, 700, 9, 9, 9, 9]])

    def step(rank: int) -> int:
        rebalanced = balancers[rank].before_step()
        balancers[rank].add(counts)
        return 0 if rebalanced is None else rebalanced.moved

    with ThreadPoolExecutor(2) as pool:
        while not any(ends):
            ends = list(pool.map(step, range(2)))
            for old, one, other in zip(expected, *layers, strict=True):
                assert (one(x).float() + other(x).float() - old).norm() < 1e-2 * old.norm()
    assert ends == [balancers[0].moved] * 2
    assert balancers[0]._steps > 4 + LAYERS  # more than one step a layer
    assert all(
        (one.placement == other.placement).all() for one, other in zip(every[0].layers, every[1].layers, strict=True)
    )


def test_experts_whose_operators_hold_numbers_of_their_own_are_refused(platform: Any, monkeypatch: Any) -> None:
    def static(weight: Tensor) -> Int8Weight:
        found = quantize_int8(weight)
        return Int8Weight(found.values, found.scales, StaticActivation(torch.tensor(0.1)), dtype=BF16)

    monkeypatch.setitem(KINDS, "static", static)
    places = ExpertPlaces(trivial_placement(LAYERS, COUNT, PLACES), COUNT, 2, "static", torch.device("cpu"))
    made(platform, "static", places, 0)
    with pytest.raises(ConfigError, match=r"cannot be moved: .*static scales .*leave --enable-eplb out"):
        Rebalancer(places, RebalanceSettings(), Pair(Meeting(), 0), [0, 1, 2])


class Unlike(Pair):
    """Its other rank has experts of another form."""

    def all_gather_rows(self, x: Tensor) -> Tensor:
        return torch.cat([x, x + 1])


def test_experts_of_different_forms_are_refused(platform: Any, monkeypatch: Any) -> None:
    """On ranks that are to send each other experts, and in one layer."""

    def refused(message: str, group: Group) -> None:
        places = ExpertPlaces(trivial_placement(LAYERS, COUNT, PLACES), COUNT, 2, "static", torch.device("cpu"))
        made(platform, "floats", places, 0)
        with pytest.raises(ConfigError, match=message):
            Rebalancer(places, RebalanceSettings(), group, [0, 1, 2])

    refused("cannot be moved: ranks store them in different formats; leave", Unlike(Meeting(), 0))
    forms = itertools.cycle([quantize_int8, quantize_int8, lambda weight: weight])
    monkeypatch.setitem(KINDS, "floats", lambda weight: next(forms)(weight))
    refused("cannot be moved: those of a layer are stored in different formats; leave", Pair(Meeting(), 0))


@pytest.mark.parametrize("threshold", [0.5, 1.0])
def test_ranks_that_are_used_well_keep_their_experts(threshold: float, platform: Any) -> None:
    """They are used above the threshold, or no placement would be 5 % better."""
    places = ExpertPlaces(trivial_placement(LAYERS, COUNT, PLACES), COUNT, 2, "static", torch.device("cpu"))
    made(platform, "floats", places, 0)
    balancer = Rebalancer(places, RebalanceSettings(4, 1, threshold), Alone(), [0, 1, 2])
    for _ in range(9):
        balancer.before_step()
        balancer.add(torch.tensor([[26, 26, 53, 50, 50, 47]] * 3))
    assert balancer.moved == 0
    assert (np.stack([layer.placement for layer in places.layers]) == trivial_placement(LAYERS, COUNT, PLACES)).all()
