"""A token's step of Mamba 2 in kernels is that of plain torch, and it compiles for the GPUs it is made for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
from torch import Tensor

from kernels.core.batch import StateSegments
from kernels.devices.cuda.state_space import CudaStateSpace
from kernels.devices.state_cache import states_before
from kernels.devices.state_space import SpaceInputs, SpaceTokens, space_step
from kernels.models.layers.recurrent import CausalConvolution
from tests.kernels.devices.cuda.compiled import SHARED, compiling, empty

PAGES, TAPS = 7, 4


def inputs_of(heads: int, channels: int, make: Callable[..., Tensor]) -> SpaceInputs:
    """What a layer makes of five tokens; the convolution's inputs stand in wider rows."""
    return SpaceInputs(make(5, channels + 3)[:, :channels], make(5, heads).abs(), -make(heads).abs(), make(heads))


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "state"), [(6, 2, 5, 7), (8, 1, 16, 32), (2, 2, 64, 128)], ids=["odd", "one", "wide"]
)
@pytest.mark.parametrize("biased", [False, True])
def test_a_token_in_kernels_and_its_states_are_torchs(
    heads: int, groups: int, dim: int, state: int, biased: bool, device: torch.device
) -> None:
    torch.manual_seed(heads)
    inner, shared = heads * dim, groups * state
    channels = inner + 2 * shared
    inputs = inputs_of(heads, channels, lambda *shape: torch.randn(shape, device=device))
    bias = torch.randn(channels, device=device) if biased else None
    convolution = CausalConvolution(torch.randn(channels, 1, TAPS, device=device), bias)
    cache = [
        torch.randn(PAGES, TAPS - 1, channels, device=device),
        torch.randn(PAGES, heads, dim, state, device=device),
    ]
    for states in cache:
        states[0] = torch.nan  # the null page, which the row that begins does not read
    tokens, sources, targets = (torch.tensor(x, device=device) for x in ([[4], [0], [2]], [0, 5, 3], [6, 1, 3]))
    rows, at = StateSegments(tokens, sources, targets, fresh=True), tokens[:, 0]
    before, states = states_before(cache, rows)
    mixed, before = convolution(inputs.mixed[tokens], before)
    x, b, c = mixed.split((inner, shared, shared), 2)
    taken = SpaceTokens(
        x.unflatten(2, (heads, dim)),
        b.unflatten(2, (groups, state)),
        c.unflatten(2, (groups, state)),
        inputs.steps[tokens],
        inputs.rates,
        inputs.skips,
    )
    expected, states = space_step(taken, states)
    wanted, out = [each.clone() for each in cache], torch.full((5, inner), 7.0, device=device)
    for each, after in zip(wanted, (before, states), strict=True):
        each[targets] = after
    assert CudaStateSpace().step(inputs, convolution.weight, bias, cache, rows, out)
    torch.testing.assert_close(out[at], expected.reshape(3, inner), atol=1e-4, rtol=1e-4)
    for mine, each in zip(cache, wanted, strict=True):
        torch.testing.assert_close(mine, each, atol=1e-4, rtol=1e-4, equal_nan=True)
    assert (out[[1, 3]] == 7.0).all()


@pytest.mark.parametrize("writes", [False, True])
def test_a_few_tokens_in_kernels_are_those_of_single_steps(writes: bool, device: torch.device) -> None:
    """Two and three draft tokens of two rows, the first of which begins."""
    torch.manual_seed(1)
    heads, dim, state = 6, 5, 7
    channels = heads * dim + 2 * state
    inputs = inputs_of(heads, channels, lambda *shape: torch.randn(shape, device=device))
    weight, bias = torch.randn(TAPS, channels, device=device), torch.randn(channels, device=device)
    cache = [
        torch.randn(PAGES, TAPS - 1, channels, device=device),
        torch.randn(PAGES, heads, dim, state, device=device),
    ]
    kept, expected = [each.clone() for each in cache], torch.zeros(5, heads * dim, device=device)
    for tokens, pages, target in (([3, 4], [0, 6], 6), ([0, 1, 2], [5, 1, 1], 1)):
        for token, page in zip(tokens, pages, strict=True):
            at = torch.tensor([[token], [page], [target]], device=device)
            one = StateSegments(at[:1], at[1], at[2], fresh=True)
            assert CudaStateSpace().step(inputs, weight, bias, kept, one, expected)
    rows = [torch.tensor(x, device=device) for x in ([[3, 4, 4], [0, 1, 2]], [0, 5], [6, 1], [2, 3])]
    tokens, sources, targets, lengths = rows
    few = StateSegments(tokens, sources, targets if writes else None, True, lengths, few=True)
    before, out = [each.clone() for each in cache], torch.zeros_like(expected)
    assert CudaStateSpace().step(inputs, weight, bias, cache, few, out)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    for found, each in zip(cache, kept if writes else before, strict=True):
        torch.testing.assert_close(found, each, atol=1e-4, rtol=1e-4)


def test_chunks_and_large_states_are_left_to_torch(device: torch.device) -> None:
    inputs = inputs_of(1, 1032, lambda *shape: torch.ones(shape, device=device))
    at = torch.arange(3, device=device)
    weight, out = torch.zeros(TAPS, 1032, device=device), torch.zeros(5, 8, device=device)
    cache = [torch.zeros(PAGES, TAPS - 1, 1032, device=device), torch.zeros(PAGES, 1, 8, 512, device=device)]
    wide = [cache[0], torch.zeros(PAGES, 1, 8, 513, device=device)]
    chunk, rows = StateSegments(at.view(1, 3), at[:1], at[:1]), StateSegments(at.view(3, 1), at, at)
    assert not CudaStateSpace().step(inputs, weight, None, cache, chunk, out)
    assert not CudaStateSpace().step(inputs, weight, None, wide, rows, out)


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
@pytest.mark.parametrize("capability", SHARED)
def test_steps_of_mamba_compile_without_spills(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Nemotron-H's and of Falcon-H1's heads."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with compiling(monkeypatch, capability) as kernels:
        for heads, groups, dim, state in ((128, 8, 80, 128), (24, 1, 64, 256)):
            channels = heads * dim + 2 * groups * state

            def make(*shape: int) -> Tensor:
                return empty(*shape, dtype=torch.float32)

            inputs = SpaceInputs(empty(5, channels, dtype=torch.bfloat16), make(5, heads), make(heads), make(heads))
            tokens, pages = empty(3, 1, dtype=torch.int64), empty(3, dtype=torch.int64)
            cache = [make(9, TAPS - 1, channels), make(9, heads, dim, state)]
            drafts = StateSegments(empty(3, 4, dtype=torch.int64), pages, None, lengths=pages, few=True)
            for rows in (StateSegments(tokens, pages, pages), drafts):
                assert CudaStateSpace().step(
                    inputs, make(TAPS, channels), make(channels), cache, rows, make(5, heads * dim)
                )
    assert {each.kernel for each in kernels} == {"_convolve", "_step"}
    for each in kernels:
        assert each.shared <= SHARED[capability], each
        assert not each.spilled, each
