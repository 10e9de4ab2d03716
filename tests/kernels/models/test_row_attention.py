"""Attention that plain torch computes from rows on the host: draft tokens of chains and trees, and caches of 8 bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels.contract.speculation import SpeculativeSettings
from kernels.core.attention_rows import AttentionRows
from kernels.devices.row_attention import attend_rows
from tests.kits.parity import scored

NAMES = ["baichuan-alibi", "gemma2", "gemma4", "gpt-oss", "grok", "llama4", "mimo-v2-flash"]


@pytest.mark.parametrize("name", NAMES)
def test_draft_tokens_are_verified(name, reference, drive, prompts):
    """Those of a tree, in which several texts follow the same suffix."""
    model, texts = reference(name), prompts(20, 90)
    settings = SpeculativeSettings("NGRAM", num_draft_tokens=8)
    options = {"page_size": 16, "max_slots": 6, "threads": 1}
    driver = drive(model.path, speculation=settings, **options)
    said = model.greedy(texts[0], 60)
    for slot, text in enumerate((*texts, said, said[:30] + texts[1][:3]), start=1):  # whose suffixes were seen
        driver.admit(slot, text)
        driver.step([(slot, len(text))])
    for _ in range(12):
        driver.step([(slot, 1) for slot in (1, 2)], drafts={1: 7, 2: 7})
    assert len(driver.tokens[1]) > 33
    for slot, text in enumerate(texts, start=1):
        assert driver.tokens[slot] == model.greedy(text, len(driver.tokens[slot]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kept", ["int8", "fp8_e4m3"])
def test_a_cache_of_8_bits_is_near(name, kept, reference, drive, prompts):
    model, (prompt,) = reference(name), prompts(90)
    result = scored(drive(model.path, page_size=16, kv_cache_dtype=kept), prompt, [50, 1, 30, 9])
    exact = scored(drive(model.path, page_size=16), prompt, [50, 1, 30, 9])
    spread = np.abs(exact - exact.mean(1, keepdims=True)).mean()
    assert 0 < np.abs(result - exact).mean() < (0.2 if kept == "int8" else 0.5) * spread


@pytest.mark.parametrize("window", [0, 3, 7, -4, -8])
def test_a_path_of_a_tree_sees_what_a_chain_of_its_tokens_sees(window):
    """With biases, growing scores, windows and chunks, whose distances count along the path."""
    generator, page_size, start = torch.Generator().manual_seed(2), 4, 10
    prefix, nodes = (torch.randn(count, 2, 1, 8, generator=generator) for count in (start, 5))
    queries = torch.randn(5, 2, 8, generator=generator)
    paths = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 3, 4]]
    bits = torch.tensor([[sum(1 << node for node in path) for path in paths]])
    given = {"slopes": torch.tensor([0.3, 0.7]), "growth_length": 8}
    pages = np.arange(8, dtype=np.int32)[None]

    def attended(queries, keys_values, count, tree):
        rows = AttentionRows(np.array([start]), np.array([count]), pages, 0, int(tree is not None), tree)
        return attend_rows(queries, lambda places: keys_values[places], rows, page_size, window, 0.4, 2.0, **given)

    result = attended(queries, torch.cat((prefix, nodes)), 5, bits)
    for node, path in enumerate(paths):
        chain = attended(queries[path], torch.cat((prefix, nodes[path])), len(path), None)
        torch.testing.assert_close(result[node], chain[-1])
    assert math.isfinite(float(result.sum()))
