"""Dense families on two ranks, quantized, and with what config.json may leave out; ``test_equality`` compares them with
transformers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import transformers

from kernels.contract.errors import ConfigError
from kernels.models import stablelm
from kernels.models.config import local_config
from kernels.models.config_loader import parse_config
from kernels.models.layers.rotary import rotary_order
from tests.kits.driver import COMMON, DENSE
from tests.kits.parity import scored

CONFIG = COMMON | {"num_hidden_layers": 4}


def read(architecture, **more):
    return parse_config(CONFIG | {"architectures": [f"{architecture}ForCausalLM"]} | more)


@pytest.mark.parametrize(("ranks", "expected"), [(1, [[0, 1]]), (2, [[0], [1]]), (4, [[0], [0], [1], [1]])])
def test_ranks_take_the_norms_of_their_key_heads(ranks, expected):
    config = local_config(read("StableLm", vocab_size=212, hidden_size=64, qk_layernorm=True), ranks)
    makes = [SimpleNamespace(mesh=SimpleNamespace(rank=rank, size=ranks)) for rank in range(ranks)]
    found = [[head for part, head in stablelm._own_heads(config, make) if part[0] == "k"] for make in makes]
    assert found == expected


def test_quantized_heads_are_put_in_order(reference, drive, prompts):
    """Rows of quantized weights stay where they are; the products are put in the order of the rotation."""
    model, (prompt,) = reference("glm"), prompts(20)
    found = scored(drive(model.path, quantization="int8"), prompt, [20])
    expected = model.logprobs(prompt).numpy()
    exact = scored(drive(model.path), prompt, [20])
    assert np.abs(found - expected).mean() < 0.1 * np.abs(expected - expected.mean(1, keepdims=True)).mean()
    assert np.abs(found - exact).max() > 0  # it was quantized


@pytest.mark.parametrize(
    ("more", "says"),
    [({"alibi": True}, "alibi is not supported"), ({"activation": "relu"}, "activation 'relu' is not")],
)
def test_what_falcon_is_not_run_with_is_refused(more, says):
    with pytest.raises(ConfigError, match=says):
        read("Falcon", **more)


def test_capped_scores_refuse_invariant_results(reference, drive):
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM has attn_logit_softcapping"):
        drive(reference("gemma2").path, invariant=True)


@pytest.mark.parametrize(
    ("architecture", "more", "windows"),
    [
        ("Gemma2", {}, [8, 0, 8, 0]),
        ("Gemma3", {"sliding_window_pattern": 3}, [8, 8, 0, 8]),
        ("Cohere2", {}, [8, 8, 8, 0]),
        ("Olmo3", {}, [8, 8, 8, 0]),
        ("Exaone4", {"sliding_window_pattern": "LG"}, [8, 0, 8, 0]),
        ("SmolLM3", {"use_sliding_window": True, "no_rope_layers": [1, 0, 0, 1]}, [0, 8, 8, 0]),
        ("Starcoder2", {}, [8, 8, 8, 8]),
    ],
)
def test_windows_follow_the_pattern_of_the_family(architecture, more, windows):
    assert list(read(architecture, sliding_window=8, **more).windows) == windows


@pytest.mark.parametrize("name", sorted({name for name, _ in DENSE.values()}))
def test_what_config_json_leaves_out_is_as_in_transformers(name):
    theirs = getattr(transformers, f"{name}Config")(**CONFIG | {"hidden_size": 64, "pad_token_id": 0})
    ours = read(name.removesuffix("Text"), hidden_size=64)

    def first_of(*keys):
        return next((found for key in keys if (found := getattr(theirs, key, None)) is not None), None)

    rope, window = theirs.rope_parameters, getattr(theirs, "sliding_window", None)
    rope = rope.get("full_attention", rope)
    kinds = first_of("layer_types") or ["full_attention"] * 4
    assert ours.norm_eps == (first_of("rms_norm_eps", "layer_norm_eps", "norm_epsilon") or 1e-5)
    assert ours.head_dim == (first_of("head_dim") or 16)
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.qkv_bias == bool(first_of("attention_bias", "use_qkv_bias", "use_bias"))
    assert (ours.rope.theta, ours.rope.kind) == (rope["rope_theta"], rope["rope_type"])
    assert ours.rotary_dim == int(ours.head_dim * rope.get("partial_rotary_factor", 1.0))
    if name != "Ministral":  # nothing and null are the same there
        assert list(ours.windows) == [window if kind == "sliding_attention" else 0 for kind in kinds]


def test_patterns_of_windows_end_in_their_only_full_layer():
    with pytest.raises(ConfigError, match="sliding_window_pattern must be a number, or some L and then one G"):
        read("Exaone4", sliding_window=8, sliding_window_pattern="GLLL")


def test_first_name_of_longrope_is_read():
    factors = {"short_factor": 6 * [1.0], "long_factor": 6 * [2.0]}
    assert read("Phi3", rope_scaling={"type": "yarn"} | factors).rope.kind == "longrope"


def test_layers_without_positions_are_named_by_the_family():
    assert set(read("SmolLM3").ropes) == {3}
    assert set(read("Cohere2", sliding_window=8).ropes) == {3}
    assert not read("Exaone4", sliding_window=None).ropes
    assert set(read("Exaone4", sliding_window=8, layer_types=4 * ["full_attention"]).ropes) == {0, 1, 2, 3}
    with pytest.raises(ConfigError, match="no_rope_layers must have 0 or 1 for each layer"):
        read("SmolLM3", no_rope_layers=[1])


def test_old_keys_of_local_and_global_rotations_are_read():
    config = read("Gemma3", sliding_window=8, rope_theta=1e6, rope_local_base_freq=5e3,
                  rope_scaling={"rope_type": "linear", "factor": 8.0})  # fmt: skip
    assert (config.rope.theta, config.rope.factor, config.rope.kind) == (1e6, 8.0, "linear")
    assert {(rope.theta, rope.kind) for rope in config.ropes.values()} == {(5e3, "default")}


def test_caps_are_the_familys_unless_they_are_null():
    assert (read("Gemma2").attention_softcap, read("Gemma2").logit_softcap) == (50.0, 30.0)
    assert read("Gemma2", attn_logit_softcapping=None).attention_softcap == 0


def test_bidirectional_attention_with_caps_is_refused():
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        read("Gemma2", use_bidirectional_attention=True)


@pytest.mark.parametrize(
    ("rotary", "pairs", "order"),
    [
        (8, False, None),
        (8, True, [0, 2, 4, 6, 1, 3, 5, 7]),
        (4, False, [0, 1, 4, 5, 2, 3, 6, 7]),
        (4, True, [0, 2, 4, 5, 1, 3, 6, 7]),
    ],
)
def test_numbers_that_rotate_together_stand_half_a_head_apart(rotary, pairs, order):
    assert rotary_order(8, rotary, pairs) == order
