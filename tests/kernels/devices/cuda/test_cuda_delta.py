"""Kernels of gated delta nets, against plain torch, and whole families on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.core.batch import StateSegments
from kernels.devices.cuda import delta_rule
from kernels.devices.cuda.convolution import CudaConvolution, convolve_tokens
from kernels.devices.cuda.delta_rule import CudaDeltaRule, delta_tokens, scan
from kernels.devices.cuda.elementwise.norms import CudaNorm
from kernels.devices.delta_rule import DeltaChunks, DeltaInputs, DeltaRule, DeltaTokens, delta_chunks, delta_step
from kernels.devices.state_cache import states_before
from kernels.models.layers.delta_net import DeltaConfig, run_segments
from kernels.models.layers.recurrent import CausalConvolution
from tests.kits.driver import HYBRID
from tests.kits.parity import scored, traffic

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OPTIONS = {"device": "cuda", "page_size": 16, "max_total_tokens": 4096}
PAGES = 7


def segment(device: torch.device, fresh: bool) -> StateSegments:
    """Tokens of rows of a step. The first begins, if it is ``fresh``: it does not read the null page. The second leaves
    the snapshot that it reads as it is."""
    tokens, sources, targets = (
        torch.tensor(values, device=device) for values in ([[4], [0], [2]], [0 if fresh else 2, 5, 3], [6, 1, 3])
    )
    return StateSegments(tokens, sources, targets, fresh)


def draft_tokens(device: torch.device, writes: bool) -> StateSegments:
    """One, three and two tokens of three rows of a step of seven. The first row begins."""
    tokens = torch.tensor([[6, 6, 6], [0, 1, 2], [3, 4, 4]], device=device)
    sources, targets, lengths = (torch.tensor(x, device=device) for x in ([0, 5, 3], [6, 1, 3], [1, 3, 2]))
    return StateSegments(tokens, sources, targets if writes else None, True, lengths, few=True)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize(("taps", "by_channel"), [(2, False), (4, False), (4, True)])
def test_a_few_tokens_in_kernels_are_torchs(taps: int, by_channel: bool, writes: bool, device: torch.device) -> None:
    torch.manual_seed(taps)
    delta, rows = DeltaConfig(2, 4, 12, 10, taps), draft_tokens(device, writes)
    cache = [torch.randn(PAGES, *shape, device=device) for shape in delta.state().shapes]
    mixed, decays = torch.randn(7, delta.channels, device=device), -torch.rand(7, 4, 12 if by_channel else 1).to(device)
    inputs = DeltaInputs(mixed, mixed, torch.rand(7, 4, device=device), decays)
    convolution = CausalConvolution(torch.randn(delta.channels, 1, taps, device=device))
    expected, kept = torch.full((7, 4, 10), 7.0, device=device), [states.clone() for states in cache]
    run_segments(delta, DeltaRule(), convolution, inputs, kept, (rows,), out=expected)
    out = torch.full_like(expected, 7.0)
    assert CudaDeltaRule().step(inputs, convolution.weight, cache, rows, out, 2)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert (out[5] == 7.0).all()
    for states, each in zip(cache, kept, strict=True):
        torch.testing.assert_close(states, each, atol=1e-4, rtol=1e-4)


def test_kernels_run_fifteen_draft_tokens_and_their_root(device: torch.device) -> None:
    torch.manual_seed(5)
    tokens, page = torch.arange(17, device=device).view(1, 17), torch.zeros(1, dtype=torch.int64, device=device)
    mixed, states = torch.randn(17, 6, device=device), torch.randn(PAGES, 3, 6, device=device)
    convolution = CausalConvolution(torch.randn(6, 1, 4, device=device), activate=False)
    rows, out = StateSegments(tokens[:, :16], page, None, True, few=True), torch.zeros(17, 6, device=device)
    assert CudaConvolution().step(mixed, convolution.weight, None, states, rows, out)
    expected, _ = convolution(mixed[rows.tokens], torch.zeros(1, 3, 6, device=device))
    torch.testing.assert_close(out[:16], expected[0], atol=1e-5, rtol=1e-5)
    more = StateSegments(tokens, page, None, True, few=True)
    assert not CudaConvolution().step(mixed, convolution.weight, None, states, more, out)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("channels", [5, 600])
def test_a_convolved_token_and_its_state_are_torchs(
    channels: int, taps: int, fresh: bool, device: torch.device
) -> None:
    torch.manual_seed(channels)
    given, states = torch.randn(5, channels + 3, device=device), torch.randn(PAGES, taps - 1, channels, device=device)
    mixed, rows = given[:, :channels], segment(device, fresh)
    convolution = CausalConvolution(torch.randn(channels, 1, taps, device=device))
    (before,) = states_before([states], rows)
    expected, after = convolution(mixed[rows.tokens], before)
    kept = states.clone()
    kept[rows.targets] = after
    found = convolve_tokens(mixed, convolution.weight, states, rows)
    torch.testing.assert_close(found, expected[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, kept, atol=0, rtol=0)


def test_a_convolution_alone_is_torchs(device: torch.device) -> None:
    torch.manual_seed(3)
    mixed, states = torch.randn(5, 600, device=device), torch.randn(PAGES, 3, 600, device=device)
    rows, bias = segment(device, True), torch.randn(600, device=device)
    convolution = CausalConvolution(torch.randn(600, 1, 4, device=device), bias, activate=False)
    expected, after = convolution(mixed[rows.tokens], states_before([states], rows)[0])
    kept, out = states.clone(), torch.full((5, 600), 7.0, device=device)
    kept[rows.targets] = after
    assert CudaConvolution().step(mixed, convolution.weight, bias, states, rows, out)
    torch.testing.assert_close(out[rows.tokens], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, kept, atol=0, rtol=0)
    assert (out[[1, 3]] == 7.0).all()
    chunk = StateSegments(rows.tokens.view(1, 3), rows.sources[:1], rows.targets[:1])
    assert not CudaConvolution().step(mixed, convolution.weight, bias, states, chunk, out)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize(("heads", "share", "k_dim", "v_dim"), [(4, 2, 12, 10), (2, 1, 32, 64), (3, 3, 5, 33)])
def test_a_step_of_the_rule_and_its_state_are_torchs(
    heads: int, share: int, k_dim: int, v_dim: int, by_channel: bool, fresh: bool, device: torch.device
) -> None:
    torch.manual_seed(heads)
    rows, keys = segment(device, fresh), heads // share
    convolved = torch.randn(3, 2 * keys * k_dim + heads * v_dim, device=device)
    states = torch.randn(PAGES, heads, k_dim, v_dim, device=device)
    nothing = torch.empty(0, device=device)
    decays = -torch.rand(5, heads, k_dim if by_channel else 1, device=device)
    inputs = DeltaInputs(nothing, nothing, torch.rand(5, heads, device=device), decays)
    q, k, v = convolved.split((keys * k_dim, keys * k_dim, heads * v_dim), 1)

    def unit(x: Tensor) -> Tensor:
        return F.normalize(x.view(3, 1, keys, k_dim), dim=-1).repeat_interleave(share, 2)

    tokens = rows.tokens[:, 0]
    given = DeltaTokens(
        unit(q) * k_dim**-0.5,
        unit(k),
        v.view(3, 1, heads, v_dim),
        decays[tokens].unsqueeze(1),
        inputs.betas[tokens].unsqueeze(1),
    )
    expected, after = delta_step(given, states_before([states], rows)[0])
    kept, out = states.clone(), torch.full((5, heads, v_dim), 7.0, device=device)
    kept[rows.targets] = after
    delta_tokens(convolved, inputs, states, rows, out, share)
    torch.testing.assert_close(out[tokens], expected[:, 0], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(states, kept, atol=2e-5, rtol=2e-5)
    assert (out[[1, 3]] == 7.0).all()


def test_chunks_and_large_keys_are_left_to_torch(device: torch.device) -> None:
    nothing, rows = torch.empty(0, device=device), segment(device, False)
    inputs = DeltaInputs(nothing, nothing, nothing, nothing)
    weight = torch.zeros(4, 6, device=device)
    chunk = StateSegments(rows.tokens.view(1, 3), rows.sources[:1], rows.targets[:1])
    states = [torch.zeros(PAGES, 3, 6, device=device), torch.zeros(PAGES, 1, 300, 4, device=device)]
    assert not CudaDeltaRule().step(inputs, weight, [states[0], states[1][:, :, :8]], chunk, nothing, 1)
    assert not CudaDeltaRule().step(inputs, weight, states, rows, nothing, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_of_heads_are_torchs(dtype: torch.dtype, device: torch.device) -> None:
    """From where a softplus vanishes to where it is its input; betas and decays stand in wider rows."""
    wide = (
        torch.randn(6, 20, device=device) * torch.tensor([[1e-3], [1.0], [5.0], [20.0], [40.0], [80.0]], device=device)
    ).to(dtype)
    b, a = wide[:, 1:4], wide[:, 12:15]
    factor, offset = -torch.rand(3, device=device), torch.randn(3, device=device)
    mine, expected = (rule.head_gates(b, a, factor, offset) for rule in (CudaDeltaRule(), DeltaRule()))
    for part, plain in zip(mine, expected, strict=True):
        torch.testing.assert_close(part, plain, atol=0, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sigmoid", [False, True], ids=["silu", "sigmoid"])
@pytest.mark.parametrize("dim", [10, 128])
def test_norms_and_gates_in_a_kernel_are_those_apart(
    dim: int, sigmoid: bool, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(dim)
    out, wide = torch.randn(5, 3, dim, device=device).to(dtype), torch.randn(5, 3 * dim + 7, device=device).to(dtype)
    norm, gates = CudaNorm(torch.rand(dim, device=device).to(dtype), 1e-6), wide[:, 7:]
    mine = CudaDeltaRule().gated_norm(norm, out, gates, sigmoid)
    expected = DeltaRule().gated_norm(norm, out, gates, sigmoid)
    torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize(("heads", "k_dim", "v_dim", "count"), [(2, 32, 64, 100), (1, 16, 16, 64), (1, 128, 128, 129)])
def test_chunks_in_a_kernel_are_those_of_torch(
    heads: int,
    k_dim: int,
    v_dim: int,
    count: int,
    by_channel: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(count)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, count, heads, *shape, device=device)

    decay = -torch.rand(2, count, heads, k_dim if by_channel else 1, device=device)
    q, k = (F.normalize(normal(k_dim), dim=-1) for _ in range(2))
    tokens = DeltaTokens(q, k, normal(v_dim), decay, torch.rand(2, count, heads, device=device))
    state, scanned = torch.randn(2, heads, k_dim, v_dim, device=device), []

    def scan_in_a_kernel(chunks: DeltaChunks, before: Tensor) -> tuple[Tensor, Tensor]:
        scanned.append(chunks)
        return scan(chunks, before)

    mine, after = delta_chunks(tokens, state.clone(), scan_in_a_kernel)
    expected, left = delta_chunks(tokens, state.clone())
    assert scanned
    monkeypatch.setattr(delta_rule, "scan", lambda *_: scanned.clear())
    CudaDeltaRule().scan(scanned[0], state)
    assert not scanned  # by the kernel, as torch orders what it solves
    torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after, left, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("size", "k_dim", "v_dim"), [(9, 16, 16), (16, 12, 16), (16, 16, 10), (16, 256, 16)])
def test_chunks_of_odd_sizes_are_scanned_by_torch(
    size: int, k_dim: int, v_dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(1, 1, 2, *shape, device=device)

    changes, reads = zeros(size, v_dim + k_dim).split((v_dim, k_dim), -1)
    chunks = DeltaChunks(changes, reads, zeros(size, k_dim), zeros(size, size), zeros(size, k_dim), zeros(1))
    monkeypatch.setattr(delta_rule, "scan", None)
    results, _ = CudaDeltaRule().scan(chunks, torch.zeros(1, 1, k_dim, v_dim, device=device))
    assert results.shape == (1, 1, 2, size, v_dim)


@on_a_gpu
@pytest.mark.parametrize("name", HYBRID)
@pytest.mark.parametrize("chunks", [[181], [7, 140, 1, 1, 12, 20]], ids=["whole", "chunked"])
def test_float32_logits_match_at_every_position(name, chunks, reference, drive, prompts):
    model, (prompt,) = reference(name), prompts(181)
    found = scored(drive(model.path, **OPTIONS), prompt, chunks)
    np.testing.assert_allclose(found, model.logprobs(prompt).numpy(), atol=5e-4, rtol=2e-4)


@on_a_gpu
@pytest.mark.parametrize("name", HYBRID)
def test_float32_greedy_tokens_match_in_mixed_traffic(name, reference, drive, prompts):
    model = reference(name)
    texts, found = traffic(drive(model.path, **OPTIONS), prompts)
    for slot, text in enumerate(texts, start=1):
        assert found[slot] == model.greedy(text, len(text) + 12)
