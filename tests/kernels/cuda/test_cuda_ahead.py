"""Guesses made ahead in a graph of a GPU are those that are made once the host knows what was accepted."""

from __future__ import annotations

import json

import pytest
import torch

from kernels.cuda.scaled import Scaled
from kernels.platforms.cuda import CudaPlatform
from kernels.speculative.settings import SpeculativeSettings
from tests.bench.device_speculative import write_draft
from tests.kernels.cuda.test_cuda_absent import CONFIG
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_draft_ends_the_norm_that_its_last_product_began(drive, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    draft = write_draft(CONFIG, tmp_path)
    settings = SpeculativeSettings("EAGLE3", str(draft), 3, 4, 16, load_format="dummy")
    options = OPTIONS | {"load_format": "dummy", "dtype": "bfloat16", "page_size": 64, "graph_rows": (1,)}
    model = drive(tmp_path, speculation=settings, max_total_tokens=1 << 12, **options).runner._speculator.drafter._model
    down, head = model.layer.mlp.down, model.ends.head
    down.linear._choices = head.linear._choices = None  # whatever is quicker for so small a model
    with torch.inference_mode():
        inner = torch.randn(4, CONFIG["intermediate_size"], device="cuda", dtype=torch.bfloat16)
        begun, states = down(inner, torch.randn(4, CONFIG["hidden_size"], device="cuda").bfloat16())
        assert isinstance(begun, Scaled)
        apart, model._begun = model.logits(states.clone()), (states, begun)
        found = model.logits(states)
    assert (found.float() - apart.float()).norm() < 2e-2 * apart.float().norm()
