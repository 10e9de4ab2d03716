"""DeepSeek V4's head for the token after the next, which reads all residual streams."""

from __future__ import annotations

import torch

from kernels.contract.speculation import SpeculativeSettings
from tests.kits.speculation.drafting import drafted
from tests.kits.speculation.stream_heads import StreamHead

THREE = SpeculativeSettings("MTP", num_steps=3, topk=1, num_draft_tokens=4)


def test_the_head_drafts_its_formula_and_changes_no_token(reference, drive, prompts, tmp_path):
    """Prompts are longer than windows."""
    model, (text,) = reference("deepseek-v4"), prompts(40, seed=3)
    head = StreamHead(model, tmp_path / "model")
    driver = drive(tmp_path / "model", speculation=THREE)
    found = drafted(driver, text, THREE)
    assert driver.tokens[1] == model.greedy(text, len(driver.tokens[1]))
    assert len(found) == 5
    for root, tokens in found:
        known = torch.tensor(driver.tokens[1][: root + 1])
        with torch.inference_mode():
            streams, read, path = head.states(known[:-1]), known[1:], []
            for _ in range(THREE.num_steps):
                made = head.run(read, streams)
                path.append(head.best(made[-1]))
                streams, read = torch.cat((streams, made[-1:])), torch.cat((read, torch.tensor(path[-1:])))
        assert tokens == path
