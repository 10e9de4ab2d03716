"""What the stages of a pipeline run as native programs."""

from __future__ import annotations

import msgspec
import pytest

from app.understudy import MODEL_DIR
from app.understudy.drafts import draft_path
from kernels.contract.speculation import SpeculativeSettings
from tests.kernels.distributed.ranks import run, run_ranks
from tests.kits.native import require_native


@pytest.mark.parametrize("topk", [1, 3])
def test_the_last_stage_runs_passes_of_drafts_as_programs(topk):
    """In bfloat16, where a CPU's native operators have programs: chains and trees of the included model's head."""
    require_native()
    settings = SpeculativeSettings("EAGLE3", str(draft_path("EAGLE3")), num_steps=3, topk=topk, num_draft_tokens=4)
    prompts = [[300 + token % 7 for token in range(12)], [400 + token % 5 for token in range(9)]]
    job = {"model": str(MODEL_DIR), "prompts": prompts, "length": 60, "options": {"dtype": "bfloat16"}}
    whole = run(job | {"rendezvous": ""}, 0, 1)
    (first,), (last,) = run_ranks([job | {"stages": 2, "speculation": msgspec.to_builtins(settings)}])
    assert first["tokens"] == last["tokens"]
    assert [each[:60] for each in last["tokens"]] == whole["tokens"]
    assert max(map(max, last["accepted"])) > 1
    assert last["eager_drafts"] == 0
