"""Places the experts of expert-parallel layers on ranks, by the tokens that each takes (EPLB).

A rank has as many places as every other; there may be more places than experts (redundant experts). The heaviest
experts get the copies that are left over, and the copies are packed so that ranks have equal loads (DeepSeek-V3,
arXiv 2412.19437, section 3.4; github.com/deepseek-ai/EPLB describes the two policies). Pure functions of numpy arrays:
the same counts always give the same placement, so that ranks compute it alone and agree.

A placement is int64 [layers, places]: the expert in each place, rank after rank. The tokens of an expert are divided
equally over its copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kernels.contract.errors import ConfigError
from kernels.contract.expert_settings import DispatchAlgorithm

__all__ = [
    "ExpertMove",
    "Placement",
    "dispatch_table",
    "expert_moves",
    "keep_places",
    "place_experts",
    "rank_loads",
    "read_location",
    "trivial_placement",
    "utilization",
]

Counts = npt.NDArray[np.int64] | npt.NDArray[np.float64]
Placement = npt.NDArray[np.int64]


def trivial_placement(layers: int, experts: int, places: int) -> Placement:
    """The experts in their order, and again from the first on in redundant places."""
    return np.tile(np.arange(places) % experts, (layers, 1))


def place_experts(counts: Counts, places: int, ranks: int, *, nodes: int = 1, groups: int = 1) -> Placement:
    """Place experts so that ranks have balanced loads. ``counts`` [layers, experts]: the tokens that each took.

    ``groups``: of experts, from which routing chooses first. If the ``nodes`` of the ranks divide them, those of a
    group stay on one node (hierarchical policy); otherwise all ranks are packed at once (global policy). Within a rank,
    places have no order. Raises ConfigError for numbers that do not fit.
    """
    layers, experts = counts.shape
    _check(experts, places, ranks, nodes, groups)
    loads = counts.astype(np.float64)
    if groups % nodes:
        nodes = groups = 1
    result = np.empty((layers, places), dtype=np.int64)
    size = experts // groups
    for layer in range(layers):
        whole = loads[layer].reshape(groups, size).sum(1)
        begin = 0
        for chosen in _pack(whole, np.arange(groups), nodes):
            local = (chosen[:, None] * size + np.arange(size)).ravel()
            slots = _pack_copies(loads[layer, local], places // nodes, ranks // nodes)
            result[layer, begin : begin + len(slots)] = local[slots]
            begin += len(slots)
    return result


def rank_loads(counts: Counts, placement: Placement, ranks: int) -> npt.NDArray[np.float64]:
    """The tokens of each rank [layers, ranks]."""
    layers, experts = counts.shape
    copies = np.stack([np.bincount(row, minlength=experts) for row in placement])
    shares = counts / np.maximum(copies, 1)
    placed: npt.NDArray[np.float64] = np.take_along_axis(shares, placement, 1)
    loads: npt.NDArray[np.float64] = placed.reshape(layers, ranks, -1).sum(2)
    return loads


def utilization(counts: Counts, placement: Placement, ranks: int) -> npt.NDArray[np.float64]:
    """Of each layer [layers] the mean of its ranks' tokens, divided by their maximum; 1 without tokens."""
    loads = rank_loads(counts, placement, ranks)
    highest = loads.max(1)
    return np.where(highest > 0, loads.mean(1) / np.maximum(highest, 1e-300), 1.0)


def keep_places(old: Placement, new: Placement, ranks: int) -> Placement:
    """``new`` with the places of each rank in another order: experts that were on the rank in ``old`` stay where they
    were, so that only the others move."""
    layers, places = new.shape
    result = np.full_like(new, -1)
    size = places // ranks
    for layer in range(layers):
        for begin in range(0, places, size):
            before, coming = old[layer, begin : begin + size], new[layer, begin : begin + size].tolist()
            row = result[layer, begin : begin + size]
            for place, expert in enumerate(before.tolist()):
                if expert in coming:
                    coming.remove(expert)
                    row[place] = expert
            row[row < 0] = coming
    return result


class ExpertMove(NamedTuple):
    """The expert in place ``source`` before is needed in the places ``targets``, all of one rank."""

    source: int
    targets: tuple[int, ...]


def expert_moves(old: Placement, new: Placement, ranks: int) -> list[ExpertMove]:
    """What makes ``new`` [places] of ``old``, one layer's: of each rank and expert at most one move, from a place of
    the same rank where there is one; else copies on other ranks take turns."""
    size, result = len(new) // ranks, list[ExpertMove]()
    places: dict[int, list[int]] = {}
    for place, expert in enumerate(old.tolist()):
        places.setdefault(expert, []).append(place)
    for rank in range(ranks):
        wanted: dict[int, list[int]] = {}
        for place in range(rank * size, (rank + 1) * size):
            if new[place] != old[place]:
                wanted.setdefault(int(new[place]), []).append(place)
        for expert, targets in wanted.items():
            copies = places[expert]
            near = [place for place in copies if place // size == rank]
            result.append(ExpertMove(near[0] if near else copies[rank % len(copies)], tuple(targets)))
    return result


_DYNAMIC_ROWS = 64


@cache
def _shuffled_rows(experts: int) -> npt.NDArray[np.int64]:
    rows = np.tile(np.arange(_DYNAMIC_ROWS)[:, None], (1, experts))
    return np.random.default_rng(0).permuted(rows, axis=0)


def dispatch_table(places: Placement, experts: int, ranks: int, algorithm: DispatchAlgorithm) -> npt.NDArray[np.int32]:
    """The place of each expert for row r of a pass in row ``r % rows`` of the result [rows, experts]. ``places``: the
    expert in each place of a layer.

    static: a row for each rank, which takes the copy that it has; ranks without one take turns. dynamic: tokens are
    divided equally over all copies, in an order of chance that is the same on all ranks.
    """
    size = len(places) // ranks
    copies = [np.flatnonzero(places == expert).astype(np.int32) for expert in range(experts)]
    if algorithm == "dynamic":
        chance = _shuffled_rows(experts)
        return np.stack([own[chance[:, expert] % len(own)] for expert, own in enumerate(copies)], 1)
    result = np.empty((ranks, experts), dtype=np.int32)
    for expert, own in enumerate(copies):
        left = 0
        for rank in range(ranks):
            near = own[own // size == rank]
            result[rank, expert] = near[0] if len(near) else own[left % len(own)]
            left += not len(near)
    return result


_MAX_FILE = 256 << 20
"""Bytes of a file that says where experts are."""


class _Location(msgspec.Struct):
    physical_to_logical_map: list[list[int]] | None = None
    logical_count: list[Any] | None = None


def read_location(location: str, shape: tuple[int, int], sparse: Sequence[int], places: int, ranks: int) -> Placement:
    """The placement [sparse layers, places] that ``location`` says. ``shape``: layers of the model, and experts of
    each; ``sparse``: the layers that have experts.

    A JSON object or the path of a file of one. ``physical_to_logical_map`` [layers, places]: the expert in each place,
    rank after rank. ``logical_count`` [layers, experts] or [steps, layers, experts]: the tokens that each took, as the
    recorder of expert distribution writes them; experts are placed by ``place_experts``. Raises ConfigError.
    """
    layers, experts = shape
    _check(experts, places, ranks, 1, 1)
    if location == "trivial":
        return trivial_placement(len(sparse), experts, places)
    try:
        found = msgspec.json.decode(_read(location), type=_Location)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ConfigError(f"--init-expert-location: {error}") from error
    if found.physical_to_logical_map is not None:
        rows = found.physical_to_logical_map
        if len(rows) != layers or any(len(row) != places for row in rows):
            raise ConfigError(
                f"--init-expert-location: physical_to_logical_map must be {layers} lists of {places} numbers: for "
                "each layer of the model, the logical expert of each physical expert"
            )
        if any(set(rows[layer]) != set(range(experts)) for layer in sparse):
            raise ConfigError(
                "--init-expert-location: each list of physical_to_logical_map must contain all experts "
                f"0 to {experts - 1}"
            )
        return np.array([rows[layer] for layer in sparse], dtype=np.int64)
    if found.logical_count is None:
        raise ConfigError("--init-expert-location: give trivial, or JSON with physical_to_logical_map or logical_count")
    try:
        counts = np.array(found.logical_count, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        counts = np.empty(0, dtype=np.int64)
    counts = counts.sum(0) if counts.ndim == 3 else counts
    if counts.shape != (layers, experts) or (counts < 0).any():
        raise ConfigError(
            f"--init-expert-location: logical_count must be {layers} lists of {experts} counts: for each layer of the "
            "model, the tokens of each expert"
        )
    return place_experts(counts[list(sparse)], places, ranks)


def _read(location: str) -> bytes:
    if location.lstrip().startswith("{"):
        return location.encode()
    try:
        if Path(location).stat().st_size > _MAX_FILE:
            raise ConfigError(f"--init-expert-location: {location} is larger than {_MAX_FILE >> 20} MiB")
        return Path(location).read_bytes()
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(f"--init-expert-location: {location} cannot be read: {reason}") from error


def _check(experts: int, places: int, ranks: int, nodes: int, groups: int) -> None:
    if places < experts:
        raise ConfigError(f"{places} places are too few for {experts} experts")
    if ranks % nodes:
        raise ConfigError(f"{ranks} ranks cannot be divided over {nodes} nodes")
    if places % ranks:
        raise ConfigError(
            f"{places} places cannot be divided over {ranks} ranks: change the number of redundant experts"
        )
    if experts % groups:
        raise ConfigError(f"{experts} experts cannot be divided into {groups} groups")


def _pack(loads: npt.NDArray[np.float64], items: Placement, bins: int) -> list[Placement]:
    """Divide items into bins of equally many: the heaviest first, each to the lightest bin with room. A bin does not
    get an equal item again where another has room. ``items``: their kinds."""
    if bins == 1:
        return [items]
    size = len(loads) // bins
    order = np.argsort(-loads, kind="stable")
    sums, free = np.zeros(bins), np.full(bins, size)
    content: list[list[int]] = [[] for _ in range(bins)]
    for item in order.tolist():
        kind = int(items[item])
        costs = [(kind in content[one], sums[one], one) for one in range(bins) if free[one]]
        chosen = min(costs)[2]
        content[chosen].append(kind)
        sums[chosen] += loads[item]
        free[chosen] -= 1
    return [np.array(one, dtype=np.int64) for one in content]


def _pack_copies(loads: npt.NDArray[np.float64], places: int, ranks: int) -> Placement:
    """The expert in each of ``places`` on ``ranks``, of ``loads`` [experts]."""
    copies = np.ones(len(loads), dtype=np.int64)
    weights = loads + 1e-9 * max(loads.max(), 1.0)  # experts without tokens share places equally
    for _ in range(places - len(loads)):
        # A second copy on a rank takes nothing from another rank.
        useful = np.where(copies < ranks, weights / copies, -copies)
        copies[int(useful.argmax())] += 1
    items = np.repeat(np.arange(len(loads)), copies)
    return np.concatenate(_pack((loads / copies)[items], items, ranks))
