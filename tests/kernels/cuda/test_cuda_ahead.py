"""Guesses made ahead in a graph of a GPU are those that are made once the host knows what was accepted."""

from __future__ import annotations

import pytest
import torch

from kernels.platforms.cuda import CudaPlatform
from kernels.speculative.settings import SpeculativeSettings
from tests.kernels.speculative.layouts import make_layout
from tests.kernels.speculative.test_ahead import GREEDY, guessing
from tests.kernels.speculative.test_drafts_in_a_runner import ASKED, LENGTH
from tests.kernels.speculative.test_lossless_runner import truth

OPTIONS = {"device": "cuda", "page_size": 16, "max_step_tokens": 256}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("topk", "nodes"), [(3, 10), (1, 5)])
def test_a_graph_drafts_the_same(topk, nodes, drive, tmp_path, monkeypatch):
    _, algorithm, target, draft, _, _ = make_layout("eagle3", tmp_path)
    settings = SpeculativeSettings(algorithm, str(draft), num_steps=4, topk=topk, num_draft_tokens=nodes)
    said, _ = truth(drive, target, ASKED, GREEDY, LENGTH, **OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(CudaPlatform, "capture_guesses", lambda self, run: None)
        told = guessing(drive(target, speculation=settings, **OPTIONS), said, GREEDY)
    ahead = drive(target, speculation=settings, **OPTIONS)
    assert ahead.runner._speculator.drafter.reach() > 0
    assert guessing(ahead, said, GREEDY) == told
