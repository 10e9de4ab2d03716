"""Routing by Zipf's law, for benchmarks of models with made-up routers."""

from __future__ import annotations

import pytest
import torch

from kernels.devices.elementwise import Elementwise
from kernels.devices.experts import ExpertLayers, Experts, ExpertWeights, Routing
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.linear import LinearLayers
from tests.bench._device_rows import Row
from tests.bench._skewed_routing import skewed_logits, skewed_routing

TOKENS, COUNT, CHOSEN = 4000, 32, 4


def layer(dtype: torch.dtype = torch.float32) -> Experts:
    fallbacks = Fallbacks()
    layers = ExpertLayers(LinearLayers(Elementwise(torch.device("cpu")), fallbacks), fallbacks)
    generator = torch.Generator().manual_seed(1)
    gate_up, down = torch.randn(16, 8, generator=generator).to(dtype), torch.randn(8, 8, generator=generator).to(dtype)
    router = torch.randn(COUNT, 8, generator=generator).to(dtype)
    return layers.make(router, None, [ExpertWeights(gate_up, None, down, None)] * COUNT, Routing(CHOSEN, True))


def shares(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1).bincount(minlength=COUNT) / len(logits)


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_first_choices_follow_zipfs_law_of_the_exponent(exponent: float) -> None:
    expected = torch.arange(1, COUNT + 1) ** -exponent
    torch.testing.assert_close(
        shares(skewed_logits(COUNT, 100_000, exponent)), expected / expected.sum(), atol=0.005, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_made_inside_are_skewed_and_others_are_not(dtype: torch.dtype) -> None:
    x = torch.randn(TOKENS, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    with skewed_routing(1.0, TOKENS):
        skewed, second = layer(dtype), layer(dtype)
    assert skewed(x[:9]).shape == (9, 8)
    assert not torch.equal(skewed.choose(x), second.choose(x))
    for each in (skewed, second):
        taken = each.choose(x).flatten().bincount(minlength=COUNT) / TOKENS
        assert taken[0] > 0.5
        assert taken[-8:].mean() < 0.07
    taken = layer(dtype).choose(x).flatten().bincount(minlength=COUNT) / TOKENS
    assert taken.min() > 0.02
    assert taken.max() < 0.4


def test_steps_with_more_tokens_than_the_table_are_refused() -> None:
    with skewed_routing(1.0, 10):
        skewed = layer()
    with pytest.raises(ValueError, match="a step has 11 tokens"):
        skewed(torch.zeros(11, 8))


def test_speeds_compare_times_and_rates() -> None:
    fast, slow = Row("30b", "step 64", (2.0,)), Row("30b", "step 64", (4.0,), "zipf 1")
    assert slow.speed(fast) == 0.5
    assert slow.name == "30b step 64 zipf 1"
    assert "| step 64 zipf 1 | 4.00 ms |" in slow.line()
    assert Row("30b", "offline 64", (90.0,)).speed(Row("30b", "offline 64", (100.0,))) == 0.9
