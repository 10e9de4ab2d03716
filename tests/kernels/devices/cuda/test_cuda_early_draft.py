"""Early drafting in a CUDA graph yields the same draft tokens as drafting after the host knows the accepted ones."""

from __future__ import annotations

import pytest
import torch

from kernels.contract.speculation import SpeculativeSettings
from kernels.devices.cuda.capture import CudaCapture
from tests.kits.speculation.early_drafts import GREEDY, drafting
from tests.kits.speculation.layouts import make_layout
from tests.kits.speculation.lossless import truth
from tests.kits.speculation.runner_drafts import LENGTH, PROMPTS

OPTIONS = {"device": "cuda", "page_size": 16, "max_step_tokens": 256}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("topk", "nodes"), [(3, 10), (1, 5)])
def test_a_graph_drafts_the_same(topk, nodes, drive, tmp_path, monkeypatch):
    _, algorithm, target, draft, _, _ = make_layout("eagle3", tmp_path)
    settings = SpeculativeSettings(algorithm, str(draft), num_steps=4, topk=topk, num_draft_tokens=nodes)
    expected, _ = truth(drive, target, PROMPTS, GREEDY, LENGTH, **OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(CudaCapture, "draft", lambda self, run: None)
        reported = drafting(drive(target, speculation=settings, **OPTIONS), expected, GREEDY)
    ahead = drive(target, speculation=settings, **OPTIONS)
    assert ahead.runner._loaded.speculator.drafter.early_positions() > 0
    assert drafting(ahead, expected, GREEDY) == reported
