"""Heads on the target: what they draft, against the same computed from scratch in plain torch."""

from __future__ import annotations

import json

import pytest
import torch

from kernels.core.noise import exponential_noise, keys_at, seed_key
from tests.kits.speculation.drafting import Drafting
from tests.kits.speculation.layouts import make_layout

LAYOUTS = ["eagle", "eagle-two-layers", "eagle3", "eagle3-layers", "mimo", "deepseek"]


@pytest.fixture
def drafting(tmp_path):
    def make(name, **settings):
        drafter, algorithm, target, draft, width, plain = make_layout(name, tmp_path)
        made = Drafting(
            drafter,
            target,
            width,
            algorithm=algorithm,
            draft_model_path="" if draft is None else str(draft),
            **settings,
        )
        return made, plain

    return make


def greedy(made, plain, row, steps):
    """The chain of argmax tokens."""
    seen = made.seen[row]
    path = []
    for _ in range(steps):
        path.append(int(plain.ids[plain.after(made.features[row, :seen], made.tokens[row, : seen + 1], path).argmax()]))
    return path


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_chain_is_what_follows_from_scratch(name, drafting):
    made, plain = drafting(name, num_steps=4, topk=1, num_draft_tokens=5)
    made.observe((0, 1), (1, 20))
    made.observe((0, 1), (1, 3), (2, 30))  # a decode, accepted draft tokens, and a prompt's first chunk
    made.observe((1, 1), (2, 17))
    for _ in range(2):
        for row, (tokens, parents) in enumerate(made.draft(0, 1, 2)):
            assert tokens == [int(made.tokens[row, made.seen[row]]), *greedy(made, plain, row, 4)]
            assert parents == [-1, 0, 1, 2, 3]
        made.observe((0, 2), (2, 4))  # what was drafted is written over


@pytest.mark.parametrize("name", ["eagle", "eagle3", "deepseek"])
@pytest.mark.parametrize("capacity", [96, 32], ids=["granted", "spare"])
def test_a_tree_holds_the_most_probable_paths(name, capacity, drafting):
    made, plain = drafting(name, num_steps=4, topk=3, num_draft_tokens=9)
    made.observe((0, 30), (1, 21))
    for _ in range(2):
        for row, (tokens, parents) in enumerate(made.draft(0, 1, capacity=capacity)):
            seen = made.seen[row]

            def after(path, row=row, seen=seen):
                return plain.after(made.features[row, :seen], made.tokens[row, : seen + 1], path)

            level, candidates = [([], 0.0)], []
            for _ in range(4):
                grown = []
                for path, score in level:
                    best = after(path).topk(3)
                    grown += [
                        ([*path, int(plain.ids[index])], score + float(value))
                        for value, index in zip(best.values, best.indices, strict=True)
                    ]
                candidates += grown
                level = sorted(grown, key=lambda found: -found[1])[:3]
            expected = sorted(candidates, key=lambda found: -found[1])[:8]
            paths = {0: []}
            for node in range(1, len(tokens)):
                paths[node] = [*paths[parents[node]], tokens[node]]
            assert [paths[node] for node in range(1, 9)] == [path for path, _ in expected]
        made.observe((0, 1), (1, 1))


def test_limits_and_steps_shorten_what_is_drafted(drafting):
    made, plain = drafting("eagle", num_steps=4, topk=1, num_draft_tokens=5)
    made.observe((0, 5), (1, 9))
    (one, _), (two, _) = made.draft(0, 1, limits=[1, 3])
    assert one[1:] == greedy(made, plain, 0, 1)
    assert two[1:] == greedy(made, plain, 1, 3)
    ((one, _),) = made.draft(0, steps=2)
    assert one[1:] == greedy(made, plain, 0, 2)


def test_a_tree_of_few_steps_is_small(drafting):
    made, _ = drafting("eagle", num_steps=4, topk=3, num_draft_tokens=9)
    made.observe((0, 5), (1, 9))
    (one, parents), (two, _) = made.draft(0, 1, steps=1, limits=[63, 2])
    assert (len(one), len(two)) == (4, 3)
    assert parents == [-1, 0, 0, 0]


@pytest.mark.parametrize("topk", [1, 2])
def test_sampled_rows_draft_with_the_targets_noise(topk, drafting):
    made, plain = drafting("eagle3", num_steps=2, topk=topk, num_draft_tokens=3)
    made.observe((0, 12), (1, 5))
    keys = torch.tensor([seed_key(3), seed_key(4)], dtype=torch.int32)
    (sampled, parents), (other, _) = made.draft(0, 1, noise=(keys, torch.tensor([0.7, 0.0])))
    assert other[1] == greedy(made, plain, 1, 1)[0]
    path = []
    for step in range(2 if topk == 1 else 1):
        scores = plain.after(made.features[0, :12], made.tokens[0, :13], path) / 0.7
        scores = scores - exponential_noise(keys_at(keys[:1], torch.tensor([13 + step])), plain.ids.int()).log()
        path.append(int(plain.ids[scores.argmax()]))
    assert sampled[1 : 1 + len(path)] == path
    assert parents[1] == 0


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("computed", [0, 16])
def test_what_was_computed_by_others_alone_is_not_drafted_from(computed, topk, drafting):
    made, _ = drafting("eagle", num_steps=2, topk=topk, num_draft_tokens=3)
    made.observe((0, 20), (1, 16))
    made.admit(0, computed)
    (nothing, _), (other, _) = made.draft(0, 1)
    assert (len(nothing), len(other)) == (1, 3)
    made.observe((0, 1), (1, 1))
    (one, _), _ = made.draft(0, 1)
    assert len(one) == 3


def test_a_token_map_cuts_the_head_down(drafting, tmp_path):
    ids = [3, 90, 14, 15, 9, 2, 6, 5, 35, 8]
    (tmp_path / "map.json").write_text(json.dumps(ids))
    made, plain = drafting("eagle-token-map", num_steps=3, num_draft_tokens=4, token_map=str(tmp_path / "map.json"))
    plain.ids = torch.tensor(ids)
    made.observe((0, 8))
    ((tokens, _),) = made.draft(0)
    assert tokens[1:] == greedy(made, plain, 0, 3)
    assert set(tokens[1:]) <= set(ids)


def test_what_a_draft_takes_is_counted(drafting):
    made, plain = drafting("eagle3", num_steps=2, num_draft_tokens=3)
    assert made.drafter.parameters == sum(part.numel() for part in plain.weights.values())
    assert made.drafter.weight_bytes == 4 * made.drafter.parameters
    assert made.drafter.cache_bytes == 2 * 2 * 16 * 4
    assert (made.drafter.depth, made.drafter.max_nodes) == (2, 3)
