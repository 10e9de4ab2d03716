"""Latent attention and states in plain torch, against the same computed from whole sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.contract.caches import Latent, State
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import StateSegments
from kernels.devices import state_cache
from kernels.devices.latent_attention import attend_latent
from kernels.devices.latent_cache import (
    NarrowLatent,
    make_latent,
    make_latent_cache,
    move_latent,
    read_latent,
    write_latent,
)
from kernels.devices.state_cache import advance_states, make_states, plan_segments

CPU = torch.device("cpu")


def rows(starts: list[int], counts: list[int], pages: list[list[int]]) -> AttentionRows:
    return AttentionRows(np.array(starts), np.array(counts), np.array(pages, dtype=np.int32), 0)


def test_latent_attention_reads_the_tokens_before_and_no_others() -> None:
    torch.manual_seed(0)
    cache = make_latent(8, 4, 6, torch.float32, CPU)
    cache.fill_(torch.nan)
    vectors, queries = torch.randn(7, 6), torch.randn(7, 3, 6)
    pages = torch.tensor([5, 2])
    index = pages.repeat_interleave(4)[:7] * 4 + torch.arange(7) % 4
    write_latent(cache, index, vectors)
    found = torch.cat(
        [
            attend_latent(queries[:5], cache, rows([0], [5], [[5, 2]]), 4, 0.5),
            attend_latent(queries[5:], cache, rows([5], [2], [[5, 2]]), 4, 0.5),
        ]
    )
    scores = torch.einsum("qhw,kw->hqk", queries, vectors) * 0.5
    scores.masked_fill_(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(found, torch.einsum("hqk,kd->qhd", scores.softmax(-1), vectors[:, :4]))


def test_states_are_kept_at_the_end_of_every_column() -> None:
    cache = make_states(State(((2,),)), 8, CPU)
    values = torch.arange(1.0, 12.0)

    def advance(segment: StateSegments, states: list[Tensor]) -> list[Tensor]:
        return [states[0] + segment.without_padding(values[segment.tokens]).sum(1, keepdim=True)]

    def bounded(starts: list[int], counts: list[int], pages: list[list[int]]) -> tuple[StateSegments, ...]:
        return plan_segments(
            np.array(starts),
            np.array(counts),
            np.array(pages, dtype=np.int32),
            4,
            lambda array: torch.from_numpy(array),
        )

    advance_states(cache, bounded([0, 0], [9, 2], [[3, 5, 1], [2, 0, 0]]), advance)
    assert cache[0][:, 0].tolist() == [0, 45, 21, 10, 0, 36, 0, 0]
    values = torch.tensor([100.0, 1000.0])
    advance_states(cache, bounded([8, 2], [1, 1], [[0, 5, 6], [2, 0, 0]]), advance)
    assert cache[0][6, 0] == 136  # on from the snapshot after 8 tokens, which stays
    assert cache[0][5, 0] == 36
    assert cache[0][2, 0] == 1021


def test_rows_of_equal_length_run_in_one_call() -> None:
    pages = np.array([[1, 4], [2, 0], [3, 0]], dtype=np.int32)
    starts, counts = np.array([3, 0, 1]), np.array([1, 1, 2])
    decodes, prompt = plan_segments(starts, counts, pages, 4, torch.from_numpy)
    assert decodes.tokens.tolist() == [[0], [1]]
    assert (decodes.sources.tolist(), decodes.targets.tolist()) == ([1, 0], [1, 2])  # the second begins
    assert decodes.fresh
    assert (prompt.tokens.tolist(), prompt.fresh) == ([[2, 3]], False)


def test_rows_of_similar_length_run_in_one_call() -> None:
    """Padded to the longest, unless half as much again would be padding; the results of padding go nowhere."""
    counts, pages = np.array([5, 1, 60, 50, 8]), 1 + np.arange(5, dtype=np.int32)[:, None]
    one, long, short = plan_segments(np.zeros(5, dtype=np.int64), counts, pages, 64, torch.from_numpy)
    assert (one.tokens.tolist(), one.lengths) == ([[5]], None)
    assert [segment.targets.tolist() for segment in (long, short) if segment.targets is not None] == [[3, 4], [1, 5]]
    assert short.lengths is not None
    assert short.lengths.tolist() == [5, 8]
    assert short.tokens.tolist() == [[0, 1, 2, 3, 4, 4, 4, 4], list(range(116, 124))]
    x = torch.arange(124.0)
    assert short.without_padding(short.take(x))[0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    out = torch.full((124, 1), -1.0)
    short.put(out, torch.arange(16.0).view(2, 8, 1))
    assert out[:6, 0].tolist() == [0, 1, 2, 3, 4, -1]
    assert out[116:, 0].tolist() == list(range(8, 16))
    apart = plan_segments(starts := np.zeros(3, dtype=np.int64), starts + 700, pages[:3], 700, torch.from_numpy)
    assert [len(segment.tokens) for segment in apart] == [2, 1]  # 2048 tokens
    part = short.part(1, 2)
    assert part.lengths is not None
    assert (part.tokens.shape, part.lengths.tolist(), part.sources.tolist()) == ((1, 8), [8], [0])


def test_the_states_of_a_call_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_cache, "_CALL_BYTES", 16)  # two rows of two numbers
    cache, calls = make_states(State(((2,),)), 6, CPU), []

    def advance(segment: StateSegments, states: list[Tensor]) -> list[Tensor]:
        calls.append(segment.tokens.flatten().tolist())
        return [states[0] + segment.tokens + 1]

    cache[0][1:] = 7.0
    pages = np.arange(1, 6, dtype=np.int32)[:, None]
    starts = np.array([1, 1, 0, 1, 0])
    advance_states(cache, plan_segments(starts, np.ones(5, dtype=np.int64), pages, 4, torch.from_numpy), advance)
    assert calls == [[0, 1], [2, 3], [4]]
    assert cache[0][1:, 0].tolist() == [8, 9, 3, 11, 5]


def test_a_fresh_row_ignores_what_its_page_held() -> None:
    cache = make_states(State(((2,),)), 4, CPU)
    cache[0].fill_(torch.nan)
    segments = plan_segments(np.array([0]), np.array([2]), np.array([[3]], dtype=np.int32), 4, torch.from_numpy)
    advance_states(cache, segments, lambda segment, states: [states[0] + segment.tokens.shape[1]])
    assert cache[0][3].tolist() == [2, 2]


@pytest.mark.parametrize(("kept", "step"), [(torch.int8, 1 / 254), (torch.float8_e4m3fn, 1 / 16)])
def test_each_part_of_a_narrow_vector_has_its_scale(kept: torch.dtype, step: float) -> None:
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(5, 14, generator=generator) * torch.tensor([1.0] * 8 + [50.0] * 6)
    cache = make_latent_cache(Latent(8, 6), 3, 4, torch.float32, CPU, kept, torch.float32)
    assert isinstance(cache, NarrowLatent)
    index = torch.tensor([4, 5, 6, 7, 8])
    write_latent(cache, index, vectors)
    off = (read_latent(cache, index) - vectors).abs()
    for part in (slice(0, 8), slice(8, 14)):
        largest = vectors[:, part].abs().amax(1, keepdim=True)
        assert bool((off[:, part] <= step * largest * 1.01).all())
    move_latent([cache], index[:2], index[3:])
    torch.testing.assert_close(read_latent(cache, index[3:]), read_latent(cache, index[:2]))
    assert not read_latent(cache, torch.arange(4)).any()
