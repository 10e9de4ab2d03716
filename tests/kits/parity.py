"""Compares a platform's results with those of transformers."""

from __future__ import annotations

import numpy as np
import torch

from kernels.contract.step import SlotSampling
from tests.kits.driver import VOCAB


def distribution(ids: bytes, logprobs: bytes, rows: int, vocab: int = VOCAB) -> np.ndarray:
    """All of the vocabulary's log-probabilities, [rows, vocab], from a result that lists every token."""
    found = np.full((rows, vocab), np.nan, dtype=np.float32)
    order = np.frombuffer(ids, dtype=np.int32).reshape(rows, vocab)
    np.put_along_axis(found, order, np.frombuffer(logprobs, dtype=np.float32).reshape(rows, vocab), axis=1)
    return found


def scored(driver, prompt, chunks, vocab=VOCAB):
    """Log-probabilities [prompt, vocab] of a prompt run in chunks."""
    driver.admit(1, prompt, sampling=SlotSampling(temperature=0.0, logprobs=vocab, prompt_logprobs=vocab))
    parts = []
    for count in chunks:
        result = driver.step([(1, count)])
        rows = int(np.frombuffer(result.prompt_counts, dtype=np.int32).sum())
        parts.append(distribution(result.prompt_top_ids, result.prompt_top_logprobs, rows, vocab))
    parts.append(distribution(result.top_ids, result.top_logprobs, 1, vocab))
    return np.concatenate(parts)


def half_precision(model):
    half = type(model.model)(model.model.config).to(torch.bfloat16).eval()
    half.load_state_dict(model.model.state_dict())
    return half


def traffic(driver, prompts):
    """Run prompts that arrive at different times, in chunks beside decodes; returns the tokens of each."""
    texts = prompts(40, 3, 145, 1, 70, seed=5)
    goal = {slot: len(text) + 12 for slot, text in enumerate(texts, start=1)}
    driver.admit(1, texts[0])
    waiting = list(enumerate(texts, start=1))[1:]
    while waiting or any(len(driver.tokens[slot]) < goal[slot] for slot in driver.tokens):
        if waiting:
            slot, text = waiting.pop(0)
            driver.admit(slot, text)
        rows = [
            (slot, min(60, driver.pending(slot)))
            for slot in driver.tokens
            if len(driver.tokens[slot]) < goal[slot] or driver.pending(slot) > 1
        ]
        assert not driver.step(rows).failed
    return texts, {slot: tokens[: goal[slot]] for slot, tokens in driver.tokens.items()}
