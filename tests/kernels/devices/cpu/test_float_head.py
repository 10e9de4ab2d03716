"""Logits in float32 of a model in bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.contract.step import SlotSampling
from kernels.devices.cpu.dense_linear import bf16_is_fast
from kernels.devices.cpu.device import CpuDevice
from kernels.models.layers.vocabulary import VocabularyHead
from kernels.weights.quantization.weights import quantize_int8
from tests.kernels.distributed.ranks import run_ranks

SCORED = SlotSampling(temperature=0.0, prompt_logprobs=0)


@pytest.mark.parametrize("name", ["qwen3", "llama2"])  # tied to the embeddings, and not
def test_logits_are_not_rounded(name, reference, drive, prompts, monkeypatch):
    (prompt,) = prompts(40)
    given, answers = [], []
    call = VocabularyHead.__call__

    def watched(self, hidden):
        given.append(hidden.clone())
        answers.append(call(self, hidden))
        return answers[-1]

    monkeypatch.setattr(VocabularyHead, "__call__", watched)
    dtypes = []
    for fp32_head in (False, True):
        driver = drive(reference(name).path, dtype="bfloat16", fp32_head=fp32_head)
        given.clear()
        answers.clear()
        driver.admit(1, prompt, sampling=SCORED)
        result = driver.step([(1, len(prompt))])
        dtypes.append(answers[-1].dtype)
        assert len(driver.generate(1, 50)) == 50
    assert dtypes == [torch.bfloat16, torch.float32]
    model = reference(name).model
    exact = given[0].float() @ model.lm_head.weight.detach().bfloat16().float().T
    torch.testing.assert_close(answers[0], exact, rtol=1e-5, atol=1e-5)
    scores = np.frombuffer(result.prompt_logprobs, np.float32)
    if len(given[0]) == len(prompt):
        expected = exact.log_softmax(-1)[torch.arange(39), torch.tensor(prompt[1:])]
        np.testing.assert_allclose(scores, expected.numpy(), atol=1e-4)


def test_what_it_takes(reference, drive):
    """4 bytes a weight more where the embeddings are kept too, 2 where bfloat16 is not."""
    for name, each in (("qwen3", 4), ("llama2", 2)):
        seen = []
        for fp32_head in (False, True):
            driver = drive(reference(name).path, dtype="bfloat16", fp32_head=fp32_head)
            seen.append(driver.runner._device.linear.dequantized_bytes)
        vocab = reference(name).model.config.vocab_size
        assert seen[1] - seen[0] == each * vocab * 48


def test_a_quantized_output_layer_is_widened():
    weight = quantize_int8(torch.randn(24, 32))
    head = CpuDevice(threads=1).linear.make_float_head(weight, False)
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    torch.testing.assert_close(head(x), x.float() @ weight.dequantize(torch.float32).T)


def test_two_ranks_generate_what_one_generates(reference, drive, prompts):
    path, texts = reference("parallel-qwen3").path, prompts(5, 23)
    job = {"model": str(path), "prompts": texts, "length": 40, "options": {"fp32_head": True}}
    (first,), (second,) = run_ranks([job])
    alone = drive(path, fp32_head=True)
    for slot, text in enumerate(texts, start=1):
        alone.admit(slot, text)
        alone.generate(slot, 40)
    assert first["tokens"] == second["tokens"] == [alone.tokens[1], alone.tokens[2]]


@pytest.mark.skipif(not bf16_is_fast(), reason="bfloat16 is computed in float32 here")
def test_the_model_in_the_box_has_one_in_programs_too(drive):
    from app.understudy import MODEL_DIR

    prompt = [5, 60, 900, 33, 2041, 77]
    outputs = []
    for fp32_head in (False, True):
        driver = drive(MODEL_DIR, dtype="bfloat16", fp32_head=fp32_head, max_slots=5)
        driver.admit(1, prompt)
        outputs.append(driver.generate(1, 26))
    same = np.mean(np.array(outputs[0]) == np.array(outputs[1]))
    assert same > 0.3  # two tokens may be as likely to within what bfloat16 rounds
