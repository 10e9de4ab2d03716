"""Logits in float32 of a model in bfloat16, on a simulated NPU."""

from __future__ import annotations

import torch

from kernels.models.layers.vocabulary import VocabularyHead


def test_logits_are_not_rounded(reference, drive, prompts, monkeypatch):
    (prompt,) = prompts(20)
    given, answers = [], []
    call = VocabularyHead.__call__

    def watched(self, hidden):
        given.append(hidden.cpu())
        answers.append(call(self, hidden))
        return answers[-1]

    monkeypatch.setattr(VocabularyHead, "__call__", watched)
    model = reference("qwen3")
    driver = drive(
        model.path, device="npu", page_size=128, max_total_tokens=1024, dtype="bfloat16", fp32_head=True,
        disable_graphs=True,
    )  # fmt: skip
    driver.admit(1, prompt)
    assert len(driver.generate(1, 24)) == 24
    exact = given[-1].float() @ model.model.lm_head.weight.detach().bfloat16().float().T
    assert answers[-1].dtype == torch.float32
    torch.testing.assert_close(answers[-1].cpu(), exact, rtol=1e-4, atol=1e-4)
