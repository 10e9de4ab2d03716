"""The routing of experts on a GPU against plain torch."""

from __future__ import annotations

import pytest
import torch

from kernels.devices.cuda.moe import routing
from kernels.devices.cuda.moe.routing import route, sum_experts
from kernels.devices.experts import Routing, choose
from tests.kits.cuda.caches import near

_FORMS = {
    "softmax": {"normalized": False},
    "normalized": {"normalized": True},
    "scaled": {"normalized": True, "scale": 2.5},
    "sigmoid": {"normalized": True, "scores": "sigmoid", "correction": True},
    "mixer": {"normalized": False, "scores": "mixer", "jitter": 0.2},
    "groups": {"normalized": False, "groups": 4, "top_groups": 2, "scale": 16.0},
    "pairs": {
        "normalized": True, "scores": "sigmoid", "correction": True, "groups": 4, "top_groups": 2, "pair_sum": True,
    },
}  # fmt: skip


def _routing(device, form, count, chosen):
    given = dict(_FORMS[form])
    if given.get("correction"):
        given["correction"] = torch.randn(count, generator=torch.Generator().manual_seed(5)).to(device)
    return Routing(chosen, **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize(("tokens", "count", "chosen"), [(1, 64, 6), (7, 24, 3), (37, 128, 8)])
def test_experts_and_weights_are_those_of_torch(device, dtype, form, tokens, count, chosen):
    given = _routing(device, form, count, chosen)
    order = torch.stack([torch.randperm(count) for _ in range(tokens)])  # no two logits of a token are equal
    logits = (order / 16 - 2).to(dtype).to(device)
    weights, experts = choose(logits, given)
    found = route(logits, given)
    assert torch.equal(found.experts.sort(-1).values.long(), experts.sort(-1).values)
    by_expert = found.weights.gather(1, found.experts.long().argsort(-1))
    torch.testing.assert_close(by_expert, weights.gather(1, experts.argsort(-1)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("most", [8192, 0], ids=["one-pass", "sorted"])
@pytest.mark.parametrize("tokens", [1, 50, 400])
def test_pairs_stand_in_the_order_of_experts(device, most, tokens, monkeypatch):
    monkeypatch.setattr(routing, "_MAX_PAIRS", most)
    found = route(torch.randn(tokens, 24, device=device), Routing(3, False))
    flat = found.experts.flatten()
    assert torch.equal(found.order.long(), flat.argsort(stable=True))
    assert torch.equal(found.counts.long(), flat.bincount(minlength=24))


@pytest.mark.parametrize("most", [8192, 0], ids=["one-pass", "sorted"])
def test_passes_that_only_compile_choose_known_experts(device, most, monkeypatch):
    def garbage(shape, **options):
        return torch.full(shape, 1 << 30, **options)

    class Unlaunched(dict):
        def __missing__(self, grid):
            return lambda *arguments, **options: None

    for name, value in (("_MAX_PAIRS", most), ("is_precompiling", lambda: True), ("route_kernel", Unlaunched())):
        monkeypatch.setattr(routing, name, value)
    monkeypatch.setattr(torch, "empty", garbage)
    experts = route(torch.randn(9, 24, device=device), Routing(3, False)).experts
    assert ((experts >= 0) & (experts < 24)).all()


@pytest.mark.parametrize("form", _FORMS)
def test_a_token_that_is_not_finite_has_no_finite_weight(device, form):
    logits = torch.randn(3, 24, device=device)
    logits[1, 5] = torch.nan
    found = route(logits, _routing(device, form, 24, 3))
    spoiled = found.weights[1].isnan()
    assert spoiled.any() if form == "mixer" else spoiled.all()  # which weighs experts one after the other
    assert found.weights[[0, 2]].isfinite().all()
    assert ((found.experts >= 0) & (found.experts < 24)).all()
    assert all(len(set(row)) == 3 for row in found.experts.tolist())


@pytest.mark.parametrize("hidden", [48, 1100])
def test_results_of_experts_are_summed_by_weight(device, hidden):
    results, weights = torch.randn(15, hidden, device=device), torch.rand(5, 3, device=device)
    near(sum_experts(results, weights), (results.view(5, 3, hidden) * weights.unsqueeze(2)).sum(1))
