"""Qwen 4: caches, blocks of tokens that are chosen, n-grams, and what is refused; ``test_equality`` compares the family
with transformers.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels.contract.caches import CacheGroup, Latent, Paged, State
from kernels.contract.errors import ConfigError
from kernels.contract.speculation import SpeculativeSettings
from kernels.devices import block_sparse_attention
from kernels.models.config_loader import parse_config
from kernels.models.layers.ngram_embedding import NgramConfig, NgramEmbedding
from kernels.models.registry import caches
from kernels.speculation.load import captured_layers
from tests.kits.driver import COMMON, QWEN4
from tests.kits.parity import scored
from tests.kits.planned_runner import PAGE, Line

CONFIG = COMMON | QWEN4 | {"architectures": ["Qwen4ExpForCausalLM"]}


def test_layers_keep_index_keys_beside_pages_and_two_states():
    states, ngrams = State(((3, 2 * 2 * 12 + 4 * 10), (4, 12, 10))), State((((3 - 1) * 3, 2 * 48), (2,)))
    assert caches(parse_config(CONFIG)) == (
        CacheGroup(Latent(12, 0), (3,)),
        CacheGroup(Paged(2, 16, 16), (3,)),
        CacheGroup(states, (0, 1, 2)),
        CacheGroup(ngrams, (0, 2)),
    )


@pytest.mark.parametrize(("name", "numbers"), [("qwen4", 1 << 25), ("qwen4", 3000), ("qwen4-plain", 1 << 20)])
def test_long_prompts_attend_to_the_chosen_blocks(name, numbers, reference, drive, prompts, monkeypatch):
    """With all queries in one product, and with some."""
    monkeypatch.setattr(block_sparse_attention, "_CPU_NUMBERS", numbers)
    model, (prompt,) = reference(name), prompts(240)
    found = scored(drive(model.path), prompt, [5, 135, 1, 99])
    np.testing.assert_allclose(found, model.logprobs(prompt).numpy(), atol=2e-4, rtol=1e-4)


def test_of_equal_scores_the_first_blocks_are_chosen(reference, drive, prompts, monkeypatch):
    """However a prompt is divided: a single index head scores half of all blocks 0. transformers takes any of them."""
    model, (prompt,) = reference("qwen4-one-index-head"), prompts(120)
    plain = torch.Tensor.topk

    def first(scores, count, **options):
        if scores.ndim > 1:
            return plain(scores, count, **options)
        values, indices = scores.sort(descending=True, stable=True)
        return SimpleNamespace(values=values[:count], indices=indices[:count])

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", first)
        expected = model.logprobs(prompt).numpy()
    for chunks in ([120], [*40 * [1], 7, 73]):
        np.testing.assert_allclose(scored(drive(model.path), prompt, chunks), expected, atol=2e-3, rtol=1e-4)


def test_short_and_long_rows_share_a_step(reference, drive, prompts):
    model, texts = reference("qwen4"), prompts(5, 60, 40)
    driver = drive(model.path)
    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text)
    driver.step([(1, 5), (2, 30)])
    driver.step([(1, 1), (2, 30), (3, 40)])
    for slot, text in enumerate(texts, start=1):
        assert driver.generate(slot, len(text) + 9) == model.greedy(text, len(text) + 9)


def test_states_with_snapshots_at_other_places_share_a_prefix(reference, prompts):
    model, (shared, end) = reference("qwen4"), prompts(130, 9)
    line = Line(model.path, {"max_total_tokens": 2048}, max_running=2)
    pages = [group.page_tokens for group in line.info.bounded_groups]
    assert pages[0] > pages[1] >= PAGE
    for number, text in enumerate((shared, shared + end)):
        line.submit(number, text, 6)
        line.play()
        assert model.continues(text, line.outputs[number])
    assert line.cached[1] == len(shared) // pages[0] * pages[0] > 0


def test_hashes_of_the_published_sizes_are_those_of_transformers():
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    config = NgramConfig((1, 5), 3, 8, 2048, 4, 20_000_000, 128, 512, 1234, 0, 248320)
    for place in (0, 1):
        built = modeling._build_layer_multipliers(248320, 3, place, 1234).tolist()
        assert config.multipliers(place) == built
    found = [size for sizes in config.primes for size in sizes]
    assert found[::5] == [modeling._find_nth_prime_after(19_999_999, 1 + 5 * head) for head in range(7)]
    assert config.rows(1) == -(-sum(found[16:]) // 128) * 128


def test_drafts_that_read_a_single_stream_are_refused():
    with pytest.raises(ConfigError, match="2 residual streams, and drafts that read hidden states"):
        captured_layers(SpeculativeSettings("EAGLE3", capture_layers=(1,)), parse_config(CONFIG))


def test_ranks_that_do_not_divide_a_heads_embedding_are_refused():
    config = parse_config(CONFIG)
    builder = SimpleNamespace(mesh=SimpleNamespace(size=4), ops=SimpleNamespace(torch_device="cpu"))
    with pytest.raises(ConfigError, match="ple_embed_dim 24 of 4 heads cannot be divided by --tensor-parallel-size 4"):
        NgramEmbedding(builder, config.ngrams, 0, "model.layers.0.ple", 2, 1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"indexer_kv_heads": 2}, "indexer_kv_heads 2 is not supported"),
        ({"indexer_budget": 18}, "indexer_budget 18 is not a multiple of indexer_compress_ratio 4"),
        ({"indexer_head_dim": None}, "indexer_head_dim must be a whole number"),
        ({"indexer_head_dim": 6}, "indexer_head_dim 6 is less than the 8 numbers"),
        ({"ple_layer_ids": [4]}, "ple_layer_ids must be a list of layers of linear_attention"),
        ({"eos_token_id": None}, "ple_layer_ids needs an eos_token_id"),
        ({"ple_embed_dim": 26}, "ple_embed_dim 26 is not a multiple of the heads"),
        ({"seed": "a"}, "seed must be a whole number"),
        ({"hc_count": 1}, "hc_count must be 2 or more"),
        ({"output_gate_type": "tanh"}, "output_gate_type 'tanh' is not supported"),
        ({"vocab_size": 1 << 25}, "vocab_size of at most 16777216"),
    ],
)
def test_what_is_wrong_with_the_sizes_is_named(change, says):
    with pytest.raises(ConfigError, match=says):
        parse_config(CONFIG | change)
