"""Properties of the placement of experts, over random loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.contract.errors import ConfigError
from kernels.contract.expert_placement import (
    dispatch_table,
    expert_moves,
    keep_places,
    place_experts,
    rank_loads,
    read_location,
    trivial_placement,
    utilization,
)

Floats = npt.NDArray[np.float64]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Floats, int, int, int, int]:
    """Counts [2, experts], places, ranks, nodes and groups."""
    nodes = draw(st.sampled_from([1, 2, 4]))
    ranks = nodes * draw(st.sampled_from([1, 2, 4]))
    groups = draw(st.sampled_from([1, 2, 4, 8]))
    experts = np.lcm(groups, ranks).item() * draw(st.integers(1, 4))
    places = experts + ranks * draw(st.integers(0, 3))
    seed = draw(st.integers(0, 2**32 - 1))
    skew = draw(st.sampled_from([0.0, 1.0, 3.0]))
    counts = np.random.default_rng(seed).pareto(1.0, (2, experts)) ** skew * 100
    return np.minimum(np.floor(counts), 1e12), places, ranks, nodes, groups


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_expert_has_a_copy_and_ranks_balanced_loads(case: tuple[Floats, int, int, int, int]) -> None:
    counts, places, ranks, _, _ = case
    placement = place_experts(counts, places, ranks)
    assert placement.shape == (2, places)
    assert (place_experts(counts, places, ranks) == placement).all()
    loads = rank_loads(counts, placement, ranks)
    assert np.allclose(loads.sum(1), counts.sum(1))
    for layer in range(2):
        copies = np.bincount(placement[layer], minlength=counts.shape[1])
        assert copies.min() >= 1
        assert copies.max() <= max(ranks, -(-places // counts.shape[1]))
        heaviest = (counts[layer] / copies).max()
        assert loads[layer].max() - loads[layer].mean() <= heaviest * (1 + 1e-9)
        # An expert gets a further copy only if none with fewer is heavier for each of its copies.
        for expert in np.flatnonzero(copies > 1):
            others = (counts[layer] / copies)[copies < ranks]
            assert not len(others) or counts[layer, expert] / (copies[expert] - 1) >= others.max() * (1 - 1e-6) - 1e-6


@settings(max_examples=100, deadline=None)
@given(cases())
def test_groups_stay_on_one_node_where_nodes_divide_them(case: tuple[Floats, int, int, int, int]) -> None:
    counts, places, ranks, nodes, groups = case
    placement = place_experts(counts, places, ranks, nodes=nodes, groups=groups)
    assert all(set(row) == set(range(counts.shape[1])) for row in placement.tolist())
    if groups % nodes:
        assert (placement == place_experts(counts, places, ranks)).all()
        return
    size = counts.shape[1] // groups
    for row in placement.reshape(2, nodes, -1):
        owned = [set((node // size).tolist()) for node in row]
        assert sum(map(len, owned)) == groups


def test_a_heavy_expert_is_copied_and_its_copies_are_apart() -> None:
    counts = np.array([[90, 10, 10, 10, 10, 10, 10, 10]], dtype=np.int64)
    placement = place_experts(counts, 12, 4)
    assert np.bincount(placement[0]).tolist() == [4, 2, 1, 1, 1, 1, 1, 1]
    assert all(0 in rank for rank in placement.reshape(4, 3).tolist())
    assert utilization(counts, trivial_placement(1, 8, 12), 4)[0] < 0.7
    assert utilization(counts, placement, 4)[0] > 0.9


def test_without_tokens_every_rank_is_used_fully() -> None:
    counts = np.zeros((1, 4), dtype=np.int64)
    assert utilization(counts, place_experts(counts, 4, 2), 2).tolist() == [1.0]


@settings(max_examples=50, deadline=None)
@given(cases())
def test_kept_places_move_only_what_comes_to_a_rank(case: tuple[Floats, int, int, int, int]) -> None:
    counts, places, ranks, _, _ = case
    old = trivial_placement(2, counts.shape[1], places)
    new = place_experts(counts, places, ranks)
    kept = keep_places(old, new, ranks)
    size = places // ranks
    assert (np.sort(kept.reshape(2, ranks, size)) == np.sort(new.reshape(2, ranks, size))).all()
    for before, after in zip(old.reshape(-1, size).tolist(), kept.reshape(-1, size).tolist(), strict=True):
        stays = sum(min(before.count(expert), after.count(expert)) for expert in set(after))
        assert sum(one == other for one, other in zip(before, after, strict=True)) == stays


@pytest.mark.parametrize(
    ("places", "ranks", "nodes", "groups", "message"),
    [
        (7, 1, 1, 1, "too few"),
        (9, 2, 1, 1, "cannot be divided over 2 ranks"),
        (8, 4, 3, 1, "over 3 nodes"),
        (8, 4, 1, 3, "into 3 groups"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(places: int, ranks: int, nodes: int, groups: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place_experts(np.ones((1, 8)), places, ranks, nodes=nodes, groups=groups)


@settings(max_examples=50, deadline=None)
@given(cases())
def test_moves_make_the_new_placement_of_the_old_one(case: tuple[Floats, int, int, int, int]) -> None:
    counts, places, ranks, _, _ = case
    old = trivial_placement(1, counts.shape[1], places)[0]
    new = keep_places(old[None], place_experts(counts[:1], places, ranks), ranks)[0]
    result, size, told = old.copy(), places // ranks, set()
    for move in expert_moves(old, new, ranks):
        (rank,) = {target // size for target in move.targets}
        here = old[rank * size : (rank + 1) * size]
        assert old[move.source] not in here or move.source // size == rank
        assert (rank, old[move.source]) not in told
        told.add((rank, old[move.source]))
        result[list(move.targets)] = old[move.source]
    assert (result == new).all()


def test_ranks_without_a_copy_take_turns_at_the_others() -> None:
    places = np.array([0, 1, 2, 3, 4, 0, 5, 6])
    table = dispatch_table(places, 7, 4, "static")
    assert table[:, 0].tolist() == [0, 0, 5, 5]  # ranks 0 and 2 have one
    assert table[:, 1].tolist() == [1, 1, 1, 1]


@settings(max_examples=50, deadline=None)
@given(cases(), st.sampled_from(["static", "dynamic"]))
def test_tokens_are_dispatched_to_copies_of_their_experts(
    case: tuple[Floats, int, int, int, int], algorithm: Literal["static", "dynamic"]
) -> None:
    counts, places, ranks, _, _ = case
    (row,) = place_experts(counts[:1], places, ranks)
    table = dispatch_table(row, counts.shape[1], ranks, algorithm)
    assert (row[table] == np.arange(counts.shape[1])).all()
    assert (dispatch_table(row, counts.shape[1], ranks, algorithm) == table).all()
    if algorithm == "dynamic":
        for expert in range(counts.shape[1]):
            taken = np.bincount(table[:, expert], minlength=places)[row == expert]
            assert taken.max() - taken.min() <= 1


def test_a_location_says_the_experts_of_places_or_their_counts(tmp_path: Path) -> None:
    said = {"physical_to_logical_map": [[0] * 6, [3, 2, 1, 0, 1, 2]]}
    placement = read_location(json.dumps(said), (2, 4), [1], 6, 2)
    assert placement.tolist() == [[3, 2, 1, 0, 1, 2]]
    counts = [[0, 0, 0, 0], [1, 100, 1, 1]]
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"logical_count": counts, "mode": "stat"}))
    placement = read_location(str(path), (2, 4), [1], 6, 2)
    assert (placement == place_experts(np.array(counts)[1:], 6, 2)).all()
    steps = json.dumps({"logical_count": [counts, counts]})
    assert (read_location(steps, (2, 4), [1], 6, 2) == placement).all()
    assert (read_location("trivial", (2, 4), [1], 6, 2) == trivial_placement(1, 4, 6)).all()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("{}", "give trivial, or JSON with physical_to_logical_map or logical_count"),
        ("{", "truncated"),
        ("no-such-file.json", "no-such-file.json cannot be read: No such file"),
        (json.dumps({"physical_to_logical_map": [[0, 1, 2, 3, 0, 1]]}), "2 lists of 6 numbers"),
        (json.dumps({"physical_to_logical_map": [[0, 1, 2, 3, 0]] * 2}), "2 lists of 6 numbers"),
        (json.dumps({"physical_to_logical_map": [[0, 1, 2, 2, 0, 1]] * 2}), "must contain all experts 0 to 3"),
        (json.dumps({"physical_to_logical_map": [[0, 1, 2, 3, 4, 1]] * 2}), "must contain all experts 0 to 3"),
        (json.dumps({"logical_count": [[1, 1, 1, 1]]}), "2 lists of 4 counts"),
        (json.dumps({"logical_count": [[1, 1, 1, -1]] * 2}), "2 lists of 4 counts"),
        (json.dumps({"logical_count": [["a"], {}]}), "2 lists of 4 counts"),
        ('{"logical_count": ' + "[" * 9999 + "]" * 9999 + "}", "--init-expert-location: maximum recursion depth"),
        ('{"logical_count": "\udc80"}', "--init-expert-location: .*surrogates not allowed"),
    ],
)
def test_a_location_that_does_not_fit_is_refused(said: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_location(said, (2, 4), [1], 6, 2)
