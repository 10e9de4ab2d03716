"""Every type of causal language model that transformers builds gives its results, or is refused, as the table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kits.fallback import RUNS, TABLE, compare, refusal_of
from tests.kits.tiny_architectures import architectures

pytestmark = pytest.mark.long

KNOWN = json.loads(TABLE.read_text(encoding="utf-8"))
KINDS = sorted(KNOWN.keys() & architectures().keys())  # of another version of transformers, some


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_results_are_transformers_or_refused_as_listed(kind: str, tmp_path: Path) -> None:
    if KNOWN[kind]["result"] == RUNS:
        compare(kind, tmp_path)
    else:
        assert refusal_of(kind, tmp_path)


def test_the_table_has_sixty_architectures() -> None:
    assert len({entry["architecture"] for entry in KNOWN.values() if entry["result"] == RUNS}) >= 60
