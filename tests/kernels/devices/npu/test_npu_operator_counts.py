"""How many operators a captured decode launches in each layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench._npu_counts import GOALS, KINDS, OTHERS, OWN_GOALS, layer_operators
from tests.kits.simulated_npu import SPEC

ROOT = Path(__file__).parents[4]


@pytest.mark.skipif(SPEC.split(":")[0].upper() == "A5", reason="counted on A2 and A3, whose operators are alike")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own", [False, True])
def test_a_layer_launches_no_more_operators(kind, own, tmp_path):
    operators = layer_operators(kind, tmp_path, own)
    assert len(operators) == (OWN_GOALS if own else GOALS)[kind], operators


def test_the_counts_in_the_documents_are_these():
    text = (ROOT / ".github/docs/ascend.md").read_text()
    for kind, (one, other) in OTHERS.items():
        assert f"| {kind} | {GOALS[kind]} | {OWN_GOALS[kind]} | {one} | {other} |" in text
