"""The gated delta rule in chunks is the same as token by token, which float64 computes as the paper writes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.devices import delta_rule as delta_rule_module
from kernels.devices.delta_rule import DeltaTokens, Scan, delta_chunks, delta_rule

HEADS, K_DIM, V_DIM = 3, 6, 5


def tokens(rows: int, count: int, decays: int) -> DeltaTokens:
    torch.manual_seed(count)
    q, k = (torch.nn.functional.normalize(torch.randn(rows, count, HEADS, K_DIM), dim=-1) for _ in range(2))
    v = torch.randn(rows, count, HEADS, V_DIM)
    return DeltaTokens(q, k, v, -torch.rand(rows, count, HEADS, decays), 2 * torch.rand(rows, count, HEADS))


def written_out(given: DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, decay, beta = (x.double() for x in (given.q, given.k, given.v, given.decay, given.beta))
    state, found = state.double(), []
    for at in range(q.shape[1]):
        state = decay[:, at, :, :, None].exp() * state
        error = v[:, at] - torch.einsum("nhkv,nhk->nhv", state, k[:, at])
        state = state + torch.einsum("nh,nhk,nhv->nhkv", beta[:, at], k[:, at], error)
        found.append(torch.einsum("nhkv,nhk->nhv", state, q[:, at]))
    return torch.stack(found, 1), state


@pytest.mark.parametrize("decays", [1, K_DIM], ids=["head", "channel"])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 64, 65, 150])
def test_chunks_equal_the_rule_token_by_token(count: int, decays: int) -> None:
    given, state = tokens(2, count, decays), torch.randn(2, HEADS, K_DIM, V_DIM)
    expected, after = written_out(given, state)
    for run in (delta_rule, delta_chunks):
        found, left = run(given, state.clone())
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(left.double(), after, atol=2e-5, rtol=1e-4)


def test_long_rows_with_decays_of_channels_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    given, state = tokens(2, 70, K_DIM), torch.randn(2, HEADS, K_DIM, V_DIM)
    whole, after = delta_chunks(given, state)
    calls: list[int] = []
    chunks = delta_rule_module._chunks

    def counted(part: DeltaTokens, before: Tensor, size: int, scan: Scan) -> tuple[Tensor, Tensor]:
        calls.append(part.q.shape[1])
        return chunks(part, before, size, scan)

    monkeypatch.setattr(delta_rule_module, "_NUMBERS", 2 * 2 * HEADS * K_DIM * 16 * 16)
    monkeypatch.setattr(delta_rule_module, "_chunks", counted)
    found, left = delta_chunks(given, state)
    assert calls == [32, 32, 6]
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(left, after, atol=1e-5, rtol=1e-4)


def test_repeated_keys_and_total_decay_stay_finite() -> None:
    """Equal keys make the triangular system as hard as it gets; a decay of e^-500 must not become a division by it."""
    given = tokens(1, 64, 1)
    same = given.k[:, :1].expand(-1, 64, -1, -1)
    hard = DeltaTokens(given.q, same, given.v, torch.where(given.decay < -0.9, -500.0, 0.0), given.beta.clamp(max=1.0))
    expected, after = written_out(hard, torch.ones(1, HEADS, K_DIM, V_DIM))
    found, left = delta_rule(hard, torch.ones(1, HEADS, K_DIM, V_DIM))
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(left.double(), after, atol=2e-5, rtol=1e-4)
