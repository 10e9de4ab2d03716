"""Several multi-token prediction heads, against the same computed from scratch in plain torch."""

from __future__ import annotations

import pytest
import torch

from kernels.contract.errors import ConfigError
from kernels.speculation.drafters.mtp import MtpDrafter
from tests.kits.speculation.drafting import HIDDEN, Drafting, make_target, seeded, write
from tests.kits.speculation.layouts import (
    DRAFT,
    PlainDeepSeek,
    PlainMimo,
    deepseek_shapes,
    mimo_shapes,
    renamed,
)
from tests.kits.speculation.mtp import chained


@pytest.fixture(params=["mimo", "deepseek"])
def drafting(request, tmp_path):
    def make(heads=3, **settings):
        (tmp_path / "target").mkdir()
        target, own = make_target(tmp_path / "target")
        shapes, prefix, plain = (
            (mimo_shapes, "mtp_layers", PlainMimo)
            if request.param == "mimo"
            else (deepseek_shapes, "layers", PlainDeepSeek)
        )
        prefixes = [f"{prefix}.{6 + index}" for index in range(heads)]
        weights = seeded({name: shape for head in prefixes for name, shape in shapes(head).items()}, 31)
        write(tmp_path / "draft", DRAFT | {"num_nextn_predict_layers": heads}, renamed(weights))
        settings = {"num_steps": heads, "num_draft_tokens": heads + 1, "multi_layer": True} | settings
        made = Drafting(
            MtpDrafter, target, HIDDEN, algorithm="MTP", draft_model_path=str(tmp_path / "draft"), **settings
        )
        return made, plain(weights, own), prefixes

    return make


def test_each_head_drafts_a_token(drafting):
    made, plain, prefixes = drafting()
    made.observe((0, 1), (1, 20))
    for chunks in ([(0, 1), (1, 3), (2, 30)], [(0, 2), (1, 1)], [(0, 1), (1, 4), (2, 17)], [(2, 1)]):
        made.observe(*chunks)
        for row, (tokens, parents) in enumerate(made.draft(0, 1, 2) if made.seen[2] else made.draft(0, 1)):
            assert tokens == [int(made.tokens[row, made.seen[row]]), *chained(made, plain, prefixes, row, 3)]
            assert parents == [-1, 0, 1, 2]


def test_what_was_not_drafted_from_is_found_as_well(drafting):
    made, plain, prefixes = drafting()
    for chunk in (9, 1, 1, 5, 1):
        made.observe((0, chunk))
    ((tokens, _),) = made.draft(0)
    assert tokens[1:] == chained(made, plain, prefixes, 0, 3)


def test_a_slot_starts_empty(drafting):
    made, plain, prefixes = drafting()
    made.observe((0, 9), (1, 4))
    made.admit(0)
    made.observe((0, 6))
    ((tokens, _), (other, _)) = made.draft(0, 1, limits=[2, 3])
    assert tokens[1:] == chained(made, plain, prefixes, 0, 2)
    assert other[1:] == chained(made, plain, prefixes, 1, 3)


@pytest.mark.parametrize("computed", [0, 16])
def test_what_was_computed_by_others_alone_is_not_drafted_from(computed, drafting):
    made, plain, prefixes = drafting()
    made.observe((0, 20), (1, 16))
    made.admit(0, computed)
    (nothing, _), (other, _) = made.draft(0, 1)
    assert len(nothing) == 1
    assert other[1:] == chained(made, plain, prefixes, 1, 3)
    made.observe((0, 1), (1, 1))
    assert all(len(tokens) == 4 for tokens, _ in made.draft(0, 1))


def test_one_head_runs_for_every_step_unless_configured(drafting):
    made, plain, prefixes = drafting(multi_layer=False)
    made.observe((0, 9))
    ((tokens, _),) = made.draft(0)
    path = []
    for _ in range(3):
        states, read = made.features[0, :9], made.tokens[0, 1:10]
        for token in [*path, None]:
            found = plain.run(read, states, prefixes[0])
            states, read = torch.cat((states, found[-1:])), torch.cat((read, torch.tensor([token or 0])))
        path.append(int(plain.head(found[-1:]).argmax()))
    assert tokens[1:] == path


@pytest.mark.parametrize(
    ("settings", "reported"),
    [({"num_steps": 4}, "lower --speculative-num-steps"), ({"topk": 2}, "--speculative-eagle-topk 1")],
)
def test_heads_that_are_not_there_are_refused(settings, reported, drafting):
    with pytest.raises(ConfigError, match=reported):
        drafting(**settings)
