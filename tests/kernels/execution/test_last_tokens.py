"""Behind the last layer's keys and values a step with prompts runs the last token of each row, and no other."""

import numpy as np
import pytest
import torch

from kernels.contract.step import SlotSampling


class Counted:
    """A layer's feed-forward that keeps how many tokens it was given."""

    def __init__(self, mlp):
        self.mlp, self.tokens = mlp, []

    def add(self, x, residual):
        self.tokens.append(len(residual))
        return self.mlp.add(x, residual)


@pytest.fixture
def counted(reference, drive, monkeypatch):
    """A driver, and what counts the tokens of the first layer's feed-forward and of the last one's."""
    driver = drive(reference("qwen3").path)
    layers = driver.runner._loaded.model.layers
    found = [Counted(layer.mlp) for layer in (layers[0], layers[-1])]
    for layer, one in zip((layers[0], layers[-1]), found, strict=True):
        monkeypatch.setattr(layer, "mlp", one)
    return driver, *found


def test_the_last_layer_ends_with_the_last_token_of_each_row(counted, prompts):
    driver, first, last = counted
    for slot, prompt in enumerate(prompts(300, 60, 4), start=1):
        driver.admit(slot, prompt[:250])
    driver.step([(3, 4)])
    first.tokens.clear()
    last.tokens.clear()
    driver.step([(3, 1), (1, 250), (2, 50)])  # a decode, a whole prompt and a chunk of one
    assert (first.tokens, last.tokens) == ([301], [3])


def test_all_tokens_run_through_where_prompts_are_scored(counted, prompts):
    driver, first, last = counted
    one, two = prompts(250, 60)
    driver.admit(1, one)
    driver.admit(2, two, sampling=SlotSampling(temperature=0.0, prompt_logprobs=0))
    driver.step([(1, 250), (2, 60)])
    assert (first.tokens, last.tokens) == ([310], [310])


@pytest.mark.parametrize("name", ["llama3.1", "qwen2-window", "qwen3-moe-some"])
def test_what_is_wanted_is_what_all_tokens_give(name, reference, drive, prompts, monkeypatch):
    """Logits of the same rows, with the other tokens and without."""
    kept = []
    for scored in (-1, 0):
        driver = drive(reference(name).path, seed=3)
        logits = driver.runner._loaded.model.logits
        found = []
        monkeypatch.setattr(
            driver.runner._loaded.model,
            "logits",
            lambda hidden, logits=logits, found=found: found.append(logits(hidden)) or found[-1],
        )
        one, two, three = prompts(30, 200, 70)
        driver.admit(1, one)
        driver.step([(1, 30)])
        driver.admit(2, two)
        driver.admit(3, three, sampling=SlotSampling(temperature=0.0, prompt_logprobs=scored))
        driver.step([(1, 1), (2, 200), (3, 40)])
        kept.append((found[-1], driver.tokens[1][30:], driver.tokens[2][200:]))
    (few, *few_tokens), (every, *every_tokens) = kept
    assert few.shape == every.shape == (2, few.shape[1])
    torch.testing.assert_close(few, every, rtol=1e-4, atol=1e-4)
    assert few_tokens == every_tokens
    assert np.isfinite(few.numpy()).all()
