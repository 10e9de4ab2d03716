"""Families whose layers keep states: ranks, quantized weights, and what is refused; ``test_equality`` compares the
families with transformers, ``test_cache_groups`` shares their prefixes.
"""

from __future__ import annotations

import numpy as np
import pytest

from kernels.contract.caches import CacheGroup, Paged, State
from kernels.contract.errors import ConfigError
from kernels.contract.speculation import SpeculativeSettings
from kernels.execution.layer_groups import check_groups
from kernels.models.config_loader import parse_config, read_config
from kernels.models.registry import caches
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.driver import COMMON, DELTA, SHARED
from tests.kits.parity import scored

CONFIG = COMMON | SHARED | DELTA | {"architectures": ["Qwen3NextForCausalLM"]}


@pytest.mark.parametrize("name", ["parallel-qwen3-next"])
def test_two_ranks_compute_what_one_does(name, reference, prompts):
    model, (text,) = reference(name), prompts(23)
    first, second = run_ranks([{"model": str(model.path), "prompts": [text], "length": 32}])
    assert first[0]["tokens"] == second[0]["tokens"] == [model.greedy(text, 32)]


def test_attention_keeps_tokens_and_delta_nets_keep_states(reference):
    config = read_config(reference("qwen3-next").path)
    states = State(((3, 2 * 2 * 12 + 4 * 10), (4, 12, 10)))
    assert caches(config) == (CacheGroup(Paged(2, 16, 16), (3,)), CacheGroup(states, (0, 1, 2, 4)))


def test_quantized_projections_are_close(reference, drive, prompts):
    model, (prompt,) = reference("qwen3-next"), prompts(20)
    found = scored(drive(model.path, quantization="int8"), prompt, [20])
    expected, exact = model.logprobs(prompt).numpy(), scored(drive(model.path), prompt, [20])
    assert np.abs(found - expected).mean() < 0.2 * np.abs(expected - expected.mean(1, keepdims=True)).mean()
    assert np.abs(found - exact).max() > 0  # it was quantized


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"speculation": SpeculativeSettings("NGRAM")}, "leave --speculative-algorithm out"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype is for keys and values"),
        ({"invariant": True}, "leave --enable-deterministic-inference out"),
    ],
)
def test_options_without_a_form_for_states_are_refused(options, says, reference, drive):
    with pytest.raises(ConfigError, match=says):
        drive(reference("qwen3-next").path, **options)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must say linear_attention or full_attention"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
    ],
)
def test_what_is_wrong_with_the_sizes_is_named(change, says):
    with pytest.raises(ConfigError, match=says):
        parse_config(CONFIG | change)


def test_a_group_of_a_layer_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="the cache groups hold layers"):
        check_groups([CacheGroup(Paged(1, 2, 2), (0, 3))], 3)
    check_groups([CacheGroup(Paged(1, 2, 2), (0, 2)), CacheGroup(State(((2,),)), (0,))], 4)
