"""Whole models of the CPU's operators beside float64: step by step, in programs, and in native calls of many steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from tests.kits.driver import VOCAB
from tests.kits.native import MISSING, require_native

FAMILIES = ["native-qwen3", "native-mistral", "native-moe"]
ALL = SlotSampling(temperature=0.0, logprobs=VOCAB)
LIMITS = {"": 0.3, "int8": 0.4}
"""Root mean squares of errors of likely tokens' log-probabilities: logits are up to 30, and activations are rounded to
bf16 some twenty times, each time by 2^-9 of themselves; keys and values of int8 by a 250th of a head's largest."""
LIKELY = -8.0
NEAR = 0.7
"""Log-probabilities that rounding may swap: several times the usual error, of hundreds of tokens. More only where it
swaps experts, of one token in twenty."""


@pytest.fixture(scope="module")
def exact(reference):
    """Log-probabilities float64 after each token of a text, by the same weights in bf16."""
    models = {}

    def logprobs(name, tokens):
        if name not in models:
            model = reference(name).model
            config = type(model.config)(**model.config.to_dict())
            config._experts_implementation = "eager"  # others have no float64
            models[name] = type(model)(config).eval()
            models[name].load_state_dict(model.state_dict())
            models[name].bfloat16().double()
        with torch.inference_mode():
            return models[name](torch.tensor([tokens])).logits[0].double().log_softmax(-1).numpy()

    return logprobs


@pytest.fixture(autouse=True)
def compiled():
    if not MISSING:
        require_native()


@pytest.mark.parametrize("cache", ["", "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_models_log_probabilities_are_those_of_float64(name, cache, reference, exact, drive, prompts):
    """Prompts whole and in chunks, decodes and both in one step."""
    driver = drive(reference(name).path, dtype="bfloat16", kv_cache_dtype=cache)
    vocab = driver.info.vocab_size
    for slot, prompt in enumerate(prompts(90, 30, 1, 60), 1):
        driver.admit(slot, prompt, sampling=SlotSampling(temperature=0.0, logprobs=vocab))
    found = {}
    for rows in (
        [(1, 50), (2, 30)],
        [(1, 40), (2, 1), (3, 1)],
        *[[(1, 1), (2, 1), (3, 1), (4, 20)]] * 3,
        [(4, 1), (1, 1)],
    ):
        before = {slot: len(driver.tokens[slot]) for slot, _ in rows}
        result = driver.step(rows)
        assert not result.failed
        ids = np.frombuffer(result.top_ids, np.int32).reshape(-1, vocab)
        logprobs = np.empty(ids.shape, np.float32)
        np.put_along_axis(logprobs, ids, np.frombuffer(result.top_logprobs, np.float32).reshape(-1, vocab), 1)
        reached = [
            slot for slot, _ in sorted(rows, key=lambda row: row[1] != 1) if len(driver.tokens[slot]) > before[slot]
        ]
        for slot, each in zip(reached, logprobs, strict=True):
            found[slot, before[slot]] = each
    errors = []
    for slot in (1, 2, 3, 4):
        expected = exact(name, driver.tokens[slot])
        for (owner, length), logprobs in found.items():
            if owner == slot:
                likely = expected[length - 1] > LIKELY
                errors.append((logprobs - expected[length - 1])[likely])
    assert np.sqrt(np.square(np.concatenate(errors)).mean()) < LIMITS[cache]


@pytest.mark.parametrize("algorithm", ["", "NGRAM"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_of_native_calls_are_those_of_float64(name, algorithm, reference, exact, drive, prompts):
    """Each is the most likely after those before it, but for near ties; also where draft tokens were accepted."""
    options = {"speculation": SpeculativeSettings(algorithm, num_draft_tokens=5)} if algorithm else {}
    driver = drive(reference(name).path, dtype="bfloat16", **options)
    texts = prompts(20, 3, 70)
    for slot, prompt in enumerate(texts, 1):
        driver.admit(slot, prompt)
    driver.step([(slot, len(prompt)) for slot, prompt in enumerate(texts, 1)])
    drafts = dict.fromkeys((1, 2, 3), 4) if algorithm else None
    for _ in range(40):
        assert not driver.step([(slot, 1) for slot in (1, 2, 3)], drafts).failed
    for slot, prompt in enumerate(texts, 1):
        tokens = driver.tokens[slot]
        assert len(tokens) >= len(prompt) + 41
        logprobs = exact(name, tokens)[len(prompt) - 1 : -1]
        chosen = np.take_along_axis(logprobs, np.array(tokens[len(prompt) :])[:, None], 1)[:, 0]
        assert (logprobs.max(1) - chosen > NEAR).mean() <= 0.05
