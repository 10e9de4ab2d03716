"""Context parallelism: ranks divide the tokens of prompts, whose sparse attention each runs with all heads."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32DecoderLayer

from kernels.contract.config import CONTEXT_PARALLEL_TOKENS as MIN_TOKENS
from kernels.contract.errors import ConfigError
from kernels.contract.speculation import SpeculativeSettings
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.core.layer_context import LayerContext
from kernels.distributed.context_parallel import ContextParallel, divide_rows, divide_tokens
from kernels.distributed.group import Group
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.adapters import adapted_modules, end_modules, merged, save_adapter
from tests.kits.speculation import latent_heads

OPTIONS = {"context_parallel": True}


@pytest.mark.parametrize(
    ("name", "size", "experts"),
    [
        ("deepseek-v3.2", 2, 1),
        ("mistral-large4", 2, 2),
        pytest.param("deepseek-v3.2", 4, 4, marks=pytest.mark.long),
    ],
)
def test_ranks_that_divide_prompts_generate_what_one_device_does(name, size, experts, reference, prompts):
    """In chunks beside which others decode; with experts in both divisions."""
    model, texts = reference(f"parallel-{name}"), prompts(70, 90, 80)
    job = {"model": str(model.path), "prompts": texts, "new": 8, "chunk": 67}
    jobs = [job | {"options": OPTIONS | {"ep_size": experts}}, job | {"prompts": texts[:1], "new": 1}]
    for divided, heads in run_ranks(jobs, size):
        assert divided["tokens"] == [model.greedy(text, len(text) + 8) for text in texts]
        assert divided["weight_bytes"] > heads["weight_bytes"]  # attention is whole


def test_ranks_that_divide_prompts_verify_draft_tokens(reference, prompts, tmp_path):
    """Of a head and of n-grams: the second prompt repeats itself."""
    model, texts = reference("parallel-deepseek-v3.2"), prompts(70, 10)
    texts[1] = texts[1][:5] * 16
    latent_heads.with_head(model, DeepseekV32DecoderLayer, tmp_path / "model")
    settings = SpeculativeSettings("MTP", num_steps=2, num_draft_tokens=3), SpeculativeSettings("NGRAM")
    job = {"model": str(tmp_path / "model"), "prompts": texts, "length": 110, "chunk": 67, "options": OPTIONS}
    first, second = run_ranks([job | {"speculation": msgspec.to_builtins(each)} for each in settings])
    for divided, other in zip(first, second, strict=True):
        assert divided["tokens"] == other["tokens"]
        assert [tokens[:110] for tokens in divided["tokens"]] == [model.greedy(text, 110) for text in texts]
    most = [max(map(max, divided["accepted"])) for divided in first]
    assert max(most) > 1, most


def test_ranks_that_divide_prompts_add_the_adapters_of_all_tokens(reference, drive, prompts, tmp_path):
    """In whole attention, in divided layers, at both ends; decodes and a prompt of others in one step. The second is of
    DoRA."""
    path, texts = reference("parallel-deepseek-v3.2").path, prompts(70, 90, 80)
    files = [save_adapter(tmp_path / "1", adapted_modules(path) | end_modules(path), 1)]
    files.append(save_adapter(tmp_path / "2", adapted_modules(path, ("kv_b_proj", ".experts.")), 2, use_dora=True))
    job = {"model": str(path), "prompts": texts, "length": 96, "chunk": 67, "options": OPTIONS}
    targets = ["all", "dora", "embed_tokens", "lm_head", "experts", "kv_b_proj"]
    job |= {"adapters": [str(file) for file in files], "targets": targets}
    ((first,), (second,)) = run_ranks([job])
    assert first["tokens"] == second["tokens"]
    for text, file, tokens in zip(texts, (*files, None), first["tokens"], strict=True):
        alone = drive(merged(path, tmp_path / f"merged-{len(text)}", file))
        alone.admit(1, text)
        alone.generate(1, 96)
        assert tokens[:96] == alone.tokens[1][:96]


def test_each_rank_runs_an_early_and_a_late_block():
    assert [part.tolist() for part in divide_tokens(9, 2)] == [[0, 1, 2, 7, 8], [3, 4, 5, 6]]
    parts = divide_tokens(203, 4)
    assert sorted(np.concatenate(parts).tolist()) == list(range(203))
    assert {len(part) for part in parts} <= {50, 51}


def test_rows_are_cut_where_a_rank_skips_tokens():
    pages = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=np.int32)
    rows = AttentionRows(np.array([9, 0, 3]), np.array([1, 5, 6]), pages, decodes=1)
    first, second = (divide_rows(rows, part) for part in divide_tokens(12, 2))
    assert (first.starts.tolist(), first.counts.tolist()) == ([9, 0, 6], [1, 2, 3])
    assert first.pages.tolist() == pages.tolist()
    assert (second.starts.tolist(), second.counts.tolist()) == ([2, 3], [3, 3])
    assert second.pages.tolist() == pages[1:].tolist()
    assert (first.decodes, second.decodes) == (0, 0)


class First(Group):
    """Rank 0 of two, of which the other gives ``other``."""

    size = 2

    def __init__(self) -> None:
        self.other = torch.zeros(0)

    def all_gather_rows(self, x):
        return torch.cat((x, self.other))


def batch_of(count):
    tokens = torch.arange(count)
    rows = AttentionRows(np.zeros(1, dtype=np.int64), np.array([count]), np.arange(9, dtype=np.int32)[None], 0)
    return ForwardBatch(tokens, tokens, tokens.flip(0), {0: planned(rows, 0)}, rows=rows)


def planned(rows, window):
    return window, rows.starts.tolist(), rows.counts.tolist()


def test_cache_writes_of_other_ranks_are_shared():
    group, count = First(), MIN_TOKENS
    context, cache = ContextParallel(group, torch.from_numpy, planned), torch.zeros(count // 16, 16, 2)
    part = context.enter(batch_of(count))
    own, other = (torch.from_numpy(tokens) for tokens in divide_tokens(count, 2))
    assert torch.equal(part.token_ids, own)
    assert part.plans == {0: (0, [0, 3 * count // 4], [count // 4, count // 4])}  # what a GPU's kernels read
    assert torch.equal(part.cache_index, count - 1 - own)
    vectors = torch.arange(2.0 * count).view(count, 2)
    cache.view(count, 2)[part.cache_index] = vectors[own]
    group.other = vectors[other]
    context.share(cache)
    assert torch.equal(cache.view(count, 2), vectors.flip(0))
    assert torch.equal(context.gather(vectors[own]), vectors)
    assert torch.equal(context.around(lambda x: x * 2, None)(vectors[own]), vectors[own] * 2)


def test_adapters_read_the_rows_of_the_tokens_that_a_layer_runs():
    nothing: Any = None
    rows, group, count = LayerContext(nothing, torch.device("cpu")), First(), MIN_TOKENS
    context, batch = ContextParallel(group, torch.from_numpy, planned), batch_of(count)
    rows.open(count // 16, 16)
    rows.assign(np.array([0]), 2)  # of the last 16 tokens: the batch fills the cache from its end
    rows.enter(batch.cache_index)
    context.enter(batch)
    own, other = (torch.from_numpy(tokens) for tokens in divide_tokens(count, 2))
    places = rows.rows
    assert places.tolist() == [0] * (count - 16) + [2] * 16
    rows.divide(own)
    assert torch.equal(rows.rows, places[own])
    group.other, seen = torch.zeros(len(other), 1), []
    context.around(lambda x: (seen.append(rows.rows), x)[1], rows)(torch.zeros(len(own), 1))
    assert torch.equal(seen[0], places)
    assert torch.equal(rows.rows, places[own])
    rows.select(torch.tensor([count - 1, 0]))
    assert rows.rows.tolist() == [2, 0]


def test_a_pass_with_few_tokens_is_whole_on_every_rank():
    context, batch = ContextParallel(First(), torch.from_numpy, planned), batch_of(MIN_TOKENS - 1)
    context.enter(batch_of(MIN_TOKENS))
    assert context.enter(batch) is batch
    assert torch.equal(context.select(batch.token_ids), batch.token_ids)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("parallel-deepseek-v3", {}, "has no sparse attention"),
        ("parallel-deepseek-v3.2", {"dp_size": 2}, "--enable-dp-attention"),
    ],
)
def test_what_cannot_be_divided_is_refused(name, change, says, reference, drive):
    with pytest.raises(ConfigError, match=says):
        drive(reference(name).path, tp_size=2, context_parallel=True, rendezvous="127.0.0.1:1", **change)
