"""What stands between a draft's passes on a GPU, or by Triton's interpreter, against the same in plain torch."""

from __future__ import annotations

import pytest
import torch

from kernels.devices.cuda.attention.plan import plan_draft
from kernels.devices.cuda.drafting import candidates as parts
from kernels.devices.cuda.drafting.candidates import candidates
from kernels.devices.cuda.drafting.tree_builder import CudaTreeBuilder
from kernels.devices.draft_kernels import AcceptedTokens, TreeShape
from kernels.speculation.draft_sampler import DraftSampler
from kernels.speculation.early_draft import TorchGrowing

PAGE, COLUMNS, WIDE, SLOTS = 16, 9, 40, 12


def few(logits, count):
    """The lowest id of equals wins."""
    order = logits.float().sort(dim=-1, descending=True, stable=True)[1][:, :count]
    return order, logits.float().log_softmax(-1).gather(1, order).nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def numbers(*shape, coarse, generator):
    """``coarse``: most are like another."""
    found = torch.randn(shape, generator=generator) * 3
    return (found / 2).round() * 2 if coarse else found


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("coarse", [False, True], ids=["apart", "ties"])
def test_the_top_few_are_found(count, coarse, device, monkeypatch):
    monkeypatch.setattr(parts, "_SMALL", 64)
    generator = torch.Generator().manual_seed(count)
    logits = numbers(5, 333, coarse=coarse, generator=generator)
    logits[1] = -torch.inf
    logits[1, 77] = 2.0
    logits[2, 100:] = 0.0
    logits[2, ::2] = -0.0
    logits[3, 5] = torch.nan
    ids, scores = candidates(logits.to(device)[:, :300], count)
    expected, expected_scores = few(logits[:, :300], count)
    kept = [0, 1, 2, 4]
    assert torch.equal(ids.cpu()[kept], expected[kept])
    torch.testing.assert_close(scores.cpu(), expected_scores)
    assert ids.min() >= 0
    assert ids.max() < 300


def test_more_candidates_are_torchs(device):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).to(device)
    ids, scores = candidates(logits, 20)
    expected, expected_scores = few(logits.cpu(), 20)
    assert torch.equal(ids.cpu(), expected)
    torch.testing.assert_close(scores.cpu(), expected_scores)
    with pytest.raises(ValueError, match="51 candidates of 50"):
        parts.find_parts(logits, 51)


@pytest.mark.parametrize("coarse", [False, True], ids=["apart", "ties"])
@pytest.mark.parametrize(
    ("topk", "steps", "nodes", "rows", "vocab", "mapped"),
    [
        (1, 3, 4, 3, 50, False),
        (1, 1, 2, 1, 50, True),
        (2, 5, 16, 2, 50, True),
        (3, 1, 4, 2, 40, False),
        (4, 3, 16, 4, 130, True),
        (4, 2, 64, 1, 60, False),
        (8, 3, 64, 1, 90, False),
    ],
)
def test_the_same_is_grown(topk, steps, nodes, rows, vocab, mapped, coarse, device, monkeypatch):
    monkeypatch.setattr(parts, "_SMALL", 64)
    generator = torch.Generator().manual_seed(topk + 10 * steps)
    ids = torch.randperm(3 * vocab, generator=generator)[:vocab] if mapped else None
    shape = TreeShape(steps, topk, nodes, topk % 2, PAGE, (0, 20), ids if ids is None else ids.to(device))
    levels = steps + 1
    host = torch.zeros((rows, 2 + COLUMNS), dtype=torch.int64)
    host[:, 0] = torch.randint(0, 40, (rows,), generator=generator)
    host[:, 1] = torch.randperm(SLOTS, generator=generator)[:rows]
    host[:, 2:] = torch.randint(1, 99, (rows, COLUMNS), generator=generator)
    outcome = torch.randint(0, levels, (rows, 2 + levels), generator=generator)
    outcome[:, 0] = torch.tensor([1, -2, 0, levels][:rows]).clamp(-levels, levels)
    tokens = torch.randint(0, 50, (rows, levels), generator=generator)
    features = torch.randn(rows * levels, 24, generator=generator)
    head = numbers(WIDE, vocab, coarse=coarse, generator=generator)
    mix, start = torch.randn(WIDE, WIDE, generator=generator), torch.randn(24, WIDE, generator=generator)

    def given(on):
        own = host.to(on)
        states = torch.zeros((SLOTS, WIDE), device=on)
        parts_ = (tensor.clone().to(on) for tensor in (outcome, tokens, features))
        return AcceptedTokens(own[:, 0], own[:, 1], own[:, 2:], *parts_, states)

    def plan(*numbers):
        return plan_draft(*numbers, PAGE)

    one, two = given("cpu"), given(device)
    draft_tokens = DraftSampler(ids, lambda logits: (few(logits, 1)[0][:, 0], None), few)
    growths = (TorchGrowing(shape, one, plan, draft_tokens), CudaTreeBuilder(shape, two))

    def same(first, second):
        for name in ("token_ids", "positions", "cache_index", "states"):
            assert torch.equal(getattr(first, name), getattr(second, name).cpu()), name
        assert first.plans.keys() == second.plans.keys()
        for window, plan in first.plans.items():
            expected, found = plan.drafts, second.plans[window].drafts
            assert torch.equal(expected.state, found.state.cpu())
            assert (expected.tokens, expected.context) == (found.tokens, found.context)
            assert (expected.bits is None) == (found.bits is None)
            assert expected.bits is None or torch.equal(expected.bits, found.bits.cpu())
        return first.states

    def logits(states):
        """Coarse ones are the same after every node, so that paths tie as well."""
        found = head[: len(states)] if coarse else states @ head
        return found, found.to(device)

    seen = same(*(growth.observe() for growth in growths)) @ start
    assert torch.equal(one.features * (outcome[:, 0] > 0).repeat_interleave(levels)[:, None], two.features.cpu())
    states = growths[0].start(seen)
    assert torch.equal(states, growths[1].start(seen.to(device)).cpu())
    assert torch.equal(one.states, two.states.cpu())
    for _ in range(steps - 1):
        found = logits(states)
        batches = [
            growth.level(expected, states.to(expected.device)) for growth, expected in zip(growths, found, strict=True)
        ]
        states = torch.tanh(same(*batches) @ mix)
    trees = [growth.tree(part) for growth, part in zip(growths, logits(states), strict=True)]
    for name in ("tokens", "parents", "depths", "bits"):
        assert torch.equal(getattr(trees[0], name), getattr(trees[1], name).cpu()), name
    assert trees[0].linear == trees[1].linear == (topk == 1)
