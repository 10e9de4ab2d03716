"""Mamba 2 in chunks is the same as token by token, which float64 computes as the paper writes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.devices.state_space import SpaceTokens, space_chunks, space_scan

HEADS, GROUPS, DIM, STATE = 6, 2, 5, 7


def tokens(rows: int, count: int) -> SpaceTokens:
    torch.manual_seed(count)
    b, c = torch.randn(2, rows, count, GROUPS, STATE)
    steps = torch.nn.functional.softplus(torch.randn(rows, count, HEADS))
    return SpaceTokens(torch.randn(rows, count, HEADS, DIM), b, c, steps, -torch.rand(HEADS), torch.randn(HEADS))


def written_out(given: SpaceTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    x, steps, rates, skips = (part.double() for part in (given.x, given.steps, given.rates, given.skips))
    b, c = (part.double().repeat_interleave(HEADS // GROUPS, 2) for part in (given.b, given.c))
    state, found = state.double(), []
    for at in range(x.shape[1]):
        step = steps[:, at, :, None, None]
        state = (step * rates[:, None, None]).exp() * state + step * torch.einsum("nhp,nhs->nhps", x[:, at], b[:, at])
        found.append(torch.einsum("nhps,nhs->nhp", state, c[:, at]) + skips[:, None] * x[:, at])
    return torch.stack(found, 1), state


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200])
def test_chunks_equal_the_recurrence_token_by_token(count: int) -> None:
    given, state = tokens(3, count), torch.randn(3, HEADS, DIM, STATE)
    expected, after = written_out(given, state)
    for run in (space_scan, space_chunks):
        found, left = run(given, state.clone())
        torch.testing.assert_close(found.double(), expected, atol=5e-5, rtol=1e-4)
        torch.testing.assert_close(left.double(), after, atol=5e-5, rtol=1e-4)


def test_chunks_equal_those_of_transformers() -> None:
    nemotron = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    given, state = tokens(2, 150), torch.randn(2, HEADS, DIM, STATE)
    found, left = space_scan(given, state.clone())
    expected, after = nemotron.mamba2_chunk_scan(
        given.x,
        given.steps,
        given.rates,
        given.b,
        given.c,
        chunk_size=32,
        D=given.skips,
        initial_states=state,
        return_final_states=True,
    )
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(left, after, atol=5e-5, rtol=1e-4)


def test_a_total_decay_stays_finite() -> None:
    """A decay of e^-300 must not become a division by it."""
    given = tokens(1, 130)
    steps = torch.where(given.steps > 1.0, 300.0, given.steps)
    hard = SpaceTokens(given.x / 100, given.b, given.c, steps, given.rates, given.skips)
    state = torch.ones(1, HEADS, DIM, STATE)
    expected, after = written_out(hard, state)
    found, left = space_scan(hard, state.clone())
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=1e-3)
    torch.testing.assert_close(left.double(), after, atol=2e-2, rtol=1e-3)
