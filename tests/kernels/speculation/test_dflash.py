"""DFlash's blocks, against the same computed from scratch in plain torch."""

from __future__ import annotations

import pytest
import torch

from kernels.contract.errors import ConfigError
from kernels.contract.speculation import SpeculativeSettings
from kernels.core.noise import exponential_noise, keys_at, seed_key
from kernels.models.config_loader import read_config
from kernels.speculation.drafters.dflash import DflashDrafter, default_layers
from tests.kits.speculation.dflash import DFLASH, SHAPES, block
from tests.kits.speculation.drafting import HIDDEN, Drafting, Plain, make_target, seeded, write


@pytest.fixture
def drafting(tmp_path):
    def make(config=None, weights=None, **settings):
        (tmp_path / "target").mkdir()
        target, own = make_target(tmp_path / "target")
        weights = seeded(SHAPES, 41) if weights is None else weights
        write(tmp_path / "draft", DFLASH | (config or {}), weights)
        settings = {"num_draft_tokens": 6, "num_steps": 5, "draft_model_path": str(tmp_path / "draft")} | settings
        made = Drafting(DflashDrafter, target, 2 * HIDDEN, algorithm="DFLASH", **settings)
        return made, Plain(weights), own["model.embed_tokens.weight"]

    return make


@pytest.mark.parametrize("capacity", [96, 32], ids=["granted", "spare"])
def test_a_block_is_what_follows_from_scratch(capacity, drafting):
    made, plain, table = drafting()
    made.observe((0, 1), (1, 20))
    made.observe((0, 1), (1, 3), (2, 25))
    made.observe((1, 1), (2, 3))
    for _ in range(2):
        for row, (tokens, parents) in enumerate(made.draft(0, 1, 2, capacity=capacity)):
            expected = block(made, plain, table, row, 6).argmax(-1).tolist()
            assert tokens == [int(made.tokens[row, made.seen[row]]), *expected]
            assert parents == [-1, 0, 1, 2, 3, 4]
        made.observe((0, 2), (1, 1), (2, 1))


def test_a_block_may_be_larger_than_what_is_verified(drafting):
    made, plain, table = drafting(block_size=8)
    assert (made.drafter.depth, made.drafter.max_nodes) == (5, 6)
    made.observe((0, 10), (1, 3))
    (one, _), (two, _) = made.draft(0, 1, limits=[63, 2])
    assert one[1:] == block(made, plain, table, 0, 8).argmax(-1).tolist()[:5]
    assert two[1:] == block(made, plain, table, 1, 8).argmax(-1).tolist()[:2]


def test_a_window_hides_what_is_far(drafting):
    made, plain, table = drafting(draft_window=16)
    made.observe((0, 50), (1, 5))
    for row, (tokens, _) in enumerate(made.draft(0, 1)):
        assert tokens[1:] == block(made, plain, table, row, 6, window=16).argmax(-1).tolist()
        assert row or tokens[1:] != block(made, plain, table, row, 6).argmax(-1).tolist()


def test_sampled_rows_draft_with_the_targets_noise(drafting):
    made, plain, table = drafting()
    made.observe((0, 10))
    keys = torch.tensor([seed_key(3)], dtype=torch.int32)
    ((tokens, _),) = made.draft(0, noise=(keys, torch.tensor([0.8])))
    at = keys_at(keys.expand(5, -1), 11 + torch.arange(5))
    scores = (
        block(made, plain, table, 0, 6) / 0.8
        - exponential_noise(at[:, None], torch.arange(96, dtype=torch.int32)).log()
    )
    assert tokens[1:] == scores.argmax(-1).tolist()


def test_the_layers_it_reads(drafting, tmp_path):
    drafting()
    settings = SpeculativeSettings("DFLASH", draft_model_path=str(tmp_path / "draft"))
    assert DflashDrafter.captured_layers(settings, read_config(tmp_path / "target")) == (1, 3)
    assert default_layers(36, 5) == (1, 9, 17, 25, 33)
    assert default_layers(32, 1) == (16,)


@pytest.mark.parametrize(
    ("config", "reported"),
    [
        ({"dflash_config": {"mask_token_id": 96, "target_layer_ids": [1, 3]}}, "mask_token_id must be a token"),
        ({"dflash_config": {"target_layer_ids": [1, 3]}}, "mask_token_id must be a token"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 6]}}, "target's layers 0 to 5"),
        ({"dflash_config": DFLASH["dflash_config"] | {"conv_kernel_size": 4}}, "conv_kernel_size 4 is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "full attention"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 2, 3]}}, r"fc.weight has shape \[32, 64\]"),
    ],
)
def test_other_models_are_refused(config, reported, drafting):
    with pytest.raises((ConfigError, RuntimeError), match=reported):
        drafting(config)


def test_a_block_has_a_size(drafting):
    with pytest.raises(ConfigError, match="2 to 64, not 65"):
        drafting(block_size=65)
