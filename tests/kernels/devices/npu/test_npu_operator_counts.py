"""How many operators a captured decode launches in each layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench._npu_counts import (
    AROUND,
    GOALS,
    KINDS,
    OTHERS,
    OTHERS_AROUND,
    OWN_AROUND,
    OWN_GOALS,
    layer_operators,
    operators_around,
)
from tests.kits.simulated_npu import SPEC

ROOT = Path(__file__).parents[4]


before_a5 = pytest.mark.skipif(
    SPEC.split(":")[0].upper() == "A5", reason="counted on A2 and A3, whose operators are alike"
)


@before_a5
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own", [False, True])
def test_a_layer_launches_no_more_operators(kind, own, tmp_path):
    operators = layer_operators(kind, tmp_path, own)
    assert len(operators) == (OWN_GOALS if own else GOALS)[kind], operators


@before_a5
@pytest.mark.parametrize("own", [False, True])
def test_a_step_launches_no_more_operators_around_its_layers(own, tmp_path):
    around = operators_around(tmp_path, own)
    counts = {name: (len(launched), in_graphs) for name, (launched, in_graphs) in around.items()}
    assert counts == (OWN_AROUND if own else AROUND)


def test_the_counts_in_the_documents_are_these():
    text = (ROOT / ".github/docs/ascend.md").read_text()
    for kind, (one, other) in OTHERS.items():
        assert f"| {kind} | {GOALS[kind]} | {OWN_GOALS[kind]} | {one} | {other} |" in text
    for name, (one, other) in OTHERS_AROUND.items():
        launched, in_graphs = AROUND[name]
        assert f"| {name} | {launched} | {in_graphs} | {OWN_AROUND[name][1]} | ~{one} | ~{other} |" in text
