"""The tokens of a runner without draft tokens, for comparison."""

from __future__ import annotations

import numpy as np

from kernels.contract.step import SlotSampling

__all__ = [
    "SAMPLINGS",
    "truth",
]

SAMPLINGS = {
    "greedy": SlotSampling(temperature=0.0),
    "sampled": SlotSampling(temperature=0.9, seed=5),
    "cut": SlotSampling(temperature=1.2, top_p=0.9, top_k=40, min_p=0.01, seed=6),
    "penalized": SlotSampling(
        temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3, seed=7
    ),
    "worded": SlotSampling(
        temperature=0.0, bad_words=((3, 4), (7, 8, 9), *(((i, i + 1)) for i in range(0, 200, 2))), min_tokens=9,
        stop_ids=tuple(range(100)),
    ),
    "scored": SlotSampling(temperature=0.7, logprobs=3, seed=8, bias_ids=(4, 9), bias_values=(2.0, -3.0)),
}  # fmt: skip


_known = {}


def truth(drive, path, prompts, samplings, length, **options):
    """Every prompt's sequence of ``length`` tokens and its scores, each alone, without draft tokens. What one test has
    found is kept for the others."""
    key = str(path), repr((prompts, samplings, length, options))
    if key not in _known:
        _known[key] = _generate(drive(path, **options), prompts, samplings, length)
    outputs, scores = _known[key]
    return [list(tokens) for tokens in outputs], list(scores)


def _generate(driver, prompts, samplings, length):
    outputs, scores = [], []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        driver.admit(1, prompt, sampling=sampling)
        found = []
        while len(driver.tokens[1]) < length:
            result = driver.step([(1, driver.pending(1))])
            assert not result.failed
            found.append(np.frombuffer(result.logprobs, np.float32))
        outputs.append(list(driver.tokens[1]))
        scores.append(np.concatenate(found))
        driver.release(1)
    return outputs, scores
