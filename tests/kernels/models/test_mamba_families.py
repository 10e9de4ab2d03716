"""Families with Mamba 2 and with short convolutions: their caches, ranks, and what is refused.

``test_equality`` compares them with transformers, ``test_cache_groups`` shares their prefixes.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from kernels.contract.caches import CacheGroup, Paged, State, Window
from kernels.contract.errors import ConfigError
from kernels.models import lfm3
from kernels.models.config import RopeConfig, local_config
from kernels.models.config_loader import parse_config, read_config
from kernels.models.registry import caches
from tests.kits.driver import BAMBA, COMMON, CONVOLUTIONS, FALCON, GRANITE_HYBRID, LFM3, NEMOTRON
from tests.kits.parity import scored

CONFIGS: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": BAMBA,
    "FalconH1ForCausalLM": FALCON,
    "GraniteMoeHybridForCausalLM": GRANITE_HYBRID | {"num_local_experts": 4},
    "Lfm2ForCausalLM": CONVOLUTIONS,
    "Lfm3ForCausalLM": LFM3,
    "NemotronHForCausalLM": NEMOTRON,
}


def parse(architecture: str, **change: Any) -> Any:
    return parse_config(COMMON | CONFIGS[architecture] | {"architectures": [architecture]} | change)


@pytest.mark.parametrize("name", ["bamba", "falcon-h1", "granite-4", "lfm2-moe", "lfm3", "nemotron-3"])
def test_quantized_projections_are_close(name, reference, drive, prompts):
    model, (prompt,) = reference(name), prompts(20)
    found = scored(drive(model.path, quantization="int8"), prompt, [13, 7])
    expected, exact = model.logprobs(prompt).numpy(), scored(drive(model.path), prompt, [20])
    assert np.abs(found - expected).mean() < 0.2 * np.abs(expected - expected.mean(1, keepdims=True)).mean()
    assert np.abs(found - exact).max() > 0  # it was quantized


def test_each_kind_of_layer_keeps_what_it_needs(reference):
    attention = Paged(2, 12, 12)
    states = State(((3, 48 + 2 * 2 * 10), (8, 6, 10)))
    falcon = caches(read_config(reference("falcon-h1").path))
    assert falcon == (CacheGroup(attention, (0, 1, 2)), CacheGroup(states, (0, 1, 2)))
    nemotron = caches(read_config(reference("nemotron-h").path))
    assert nemotron == (CacheGroup(Paged(2, 16, 16), (2,)), CacheGroup(states, (0, 3)))
    lfm2 = caches(read_config(reference("lfm2").path))
    assert lfm2 == (CacheGroup(attention, (2,)), CacheGroup(State(((2, 48),)), (0, 1, 3)))


def test_lfm3_rotates_whole_heads_of_layers_with_a_window():
    """As transformers, which reads no ``partial_rotary_factor`` there, and rotations of the kinds of layers alone."""
    local, full = {"rope_theta": 77.0, "partial_rotary_factor": 0.5}, {"rope_theta": 900.0}
    both = parse("Lfm3ForCausalLM", rope_parameters={"full_attention": full, "sliding_attention": local})
    assert both.rope == RopeConfig(77.0)
    one = parse("Lfm3ForCausalLM", layer_types=5 * ["full_attention"], rope_parameters={"full_attention": full})
    assert one.ropes[0] == both.ropes[2]


def test_published_spellings_of_layers_are_read():
    given = {"layers_block_type": None, "hybrid_override_pattern": "M-*ME", "attention_head_dim": 16, "head_dim": None}
    assert parse("NemotronHForCausalLM", **given) == parse("NemotronHForCausalLM")
    kinds = ["mamba", "attention", "mamba"]
    assert parse("GraniteMoeHybridForCausalLM", layer_types=kinds) == parse("GraniteMoeHybridForCausalLM")
    given = {"layer_types": None, "full_attn_idxs": [2], "block_ff_dim": 80, "intermediate_size": None}
    assert parse("Lfm2ForCausalLM", **given) == parse("Lfm2ForCausalLM")


def test_lfm3_alternates_attention_where_config_json_names_no_kinds():
    raw = {key: value for key, value in LFM3.items() if key not in ("layer_types", "sliding_window")}
    own = lfm3.caches(parse_config(COMMON | raw | {"architectures": ["Lfm3ForCausalLM"], "num_hidden_layers": 7}))
    attention = Paged(2, 16, 16)
    groups = CacheGroup(attention, (2, 6)), CacheGroup(Window(attention, 256), (4,))
    assert own == (*groups, CacheGroup(State(((6, 48),)), (0, 1, 3, 5)))


def test_lfm3_reads_the_usual_rotation_of_windows_as_transformers_does():
    ropes = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    assert parse("Lfm3ForCausalLM", rope_parameters=ropes).rope.theta == 1e6
    assert parse("Lfm3ForCausalLM", rope_parameters=None).rope.theta == 1e4


@pytest.mark.parametrize("text", ['[0.0, {"__float__": "Infinity"}]', "[0.0, Infinity]", "null"])
def test_an_infinite_step_is_read_in_each_spelling(text):
    assert parse("FalconH1ForCausalLM", time_step_limit=json.loads(text)) == parse("FalconH1ForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "change", "says"),
    [
        ("BambaForCausalLM", {"attn_layer_indices": 1}, "attn_layer_indices must be a list of layers"),
        ("FalconH1ForCausalLM", {"mamba_d_head": 7}, "mamba_n_heads 8 of mamba_d_head 7 numbers do not make up 48"),
        ("FalconH1ForCausalLM", {"mamba_n_groups": 3}, "mamba_n_heads 8 is not a multiple of mamba_n_groups 3"),
        ("FalconH1ForCausalLM", {"ssm_multipliers": [1.0]}, "ssm_multipliers must be 5 numbers"),
        ("FalconH1ForCausalLM", {"time_step_limit": [0.2, 0.1]}, "time_step_limit must be two rising numbers"),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["conv"] * 3}, "layer_types must say"),
        ("Lfm2ForCausalLM", {"layer_types": None, "full_attn_idxs": 3}, "full_attn_idxs must be a list of layers"),
        ("Lfm3ForCausalLM", {"layer_types": ["full_attention"] * 4 + ["mamba"]}, "layer_types must say conv or"),
        ("Lfm3ForCausalLM", {"sliding_window": None}, "sliding_window must not be null"),
        (
            "Lfm3ForCausalLM",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {}}},
            "use proportional or default",
        ),
        ("Lfm3ForCausalLM", {"rope_parameters": {"rope_theta": 10000.0}}, "an object for each of full_attention and"),
        ("NemotronHForCausalLM", {"layers_block_type": ["moe", 3]}, "layers_block_type must be a list of"),
        ("NemotronHForCausalLM", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported"),
        (
            "NemotronHForCausalLM",
            {"layers_block_type": None, "hybrid_override_pattern": "MX"},
            "hybrid_override_pattern must be of M",
        ),
    ],
)
def test_what_is_wrong_with_the_sizes_is_named(architecture, change, says):
    with pytest.raises(ConfigError, match=says):
        parse(architecture, **change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mamba_num_heads": 6, "n_groups": 1}, "6 heads of Mamba in 1 groups cannot be divided"),
        ({"mamba_num_heads": 12, "n_groups": 6}, "12 heads of Mamba in 6 groups cannot be divided"),
        ({}, "Mamba's norms over 24 of 48 numbers cannot be divided"),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused(change, says):
    whole = parse("NemotronHForCausalLM", vocab_size=212, **change)
    with pytest.raises(ConfigError, match=says):
        local_config(whole, 4)
