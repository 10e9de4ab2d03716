"""Sizes that a number of devices does not divide, refused from config.json alone and from a family's sizes."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.contract.divisions import check_divisions, stage_layers
from kernels.contract.errors import ConfigError
from kernels.models.config import local_config
from kernels.models.config_loader import parse_config
from tests.kits.published import CHATGLM

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("raw", [DENSE, EXPERTS])
@pytest.mark.parametrize(("ranks", "name"), [(5, "num_attention_heads 12"), (6, "num_key_value_heads 4")])
def test_config_json_alone_is_refused_in_the_words_of_a_worker(raw: dict[str, Any], ranks: int, name: str) -> None:
    with pytest.raises(ConfigError) as early:
        check_divisions(raw, "a name", stages=1, ranks=ranks)
    with pytest.raises(ConfigError) as late:
        local_config(parse_config(raw), ranks)
    assert str(late.value).startswith(name)
    assert str(late.value) == str(early.value).replace("of a name", f"of {raw['architectures'][0]}")


@pytest.mark.parametrize(("ranks", "fits"), [(3, "1, 2, 4"), (8, "1, 2, 4")])
def test_chatglms_names_of_sizes_are_read_before_a_worker_starts(ranks: int, fits: str) -> None:
    raw = (
        CHATGLM
        | {"num_attention_heads": 16, "multi_query_group_num": 4, "ffn_hidden_size": 80}
        | {"padded_vocab_size": 100}
    )
    with pytest.raises(ConfigError) as late:
        local_config(parse_config(raw), ranks)
    assert str(late.value).endswith(f"this model takes {fits}")
    if ranks == 3:
        with pytest.raises(ConfigError) as early:
            check_divisions(raw, "ChatGLMModel", stages=1, ranks=ranks)
        assert str(late.value) == str(early.value)
    with pytest.raises(ConfigError, match="of 3 layers cannot have --pipeline-parallel-size 4"):
        check_divisions(raw, "ChatGLMModel", stages=4, ranks=1)


def test_chatglms_sizes_are_named_in_a_worker_as_in_its_file() -> None:
    raw = CHATGLM | {"num_attention_heads": 16, "multi_query_group_num": 4, "ffn_hidden_size": 84}
    with pytest.raises(ConfigError, match=r"^ffn_hidden_size 84 of ChatGLM.* cannot be divided"):
        local_config(parse_config(raw), 8)
    shared = raw | {"num_attention_heads": 12, "multi_query_group_num": 3, "padded_vocab_size": 100}
    with pytest.raises(ConfigError, match=r"^multi_query_group_num 3 of ChatGLM.* do not divide one another"):
        local_config(parse_config(shared), 4)
    with pytest.raises(ConfigError, match=r"^num_attention_heads 16 is not a multiple of multi_query_group_num 3"):
        parse_config(shared | {"num_attention_heads": 16})
    for name in ("ffn_hidden_size", "padded_vocab_size", "multi_query_group_num", "num_layers"):
        with pytest.raises(ConfigError, match=f"^config.json: {name} must be a whole number"):
            parse_config(raw | {name: -1})


@pytest.mark.parametrize("ranks", [1, 2, 4, 12])
def test_sizes_that_divide_are_left_to_the_workers(ranks: int) -> None:
    check_divisions(DENSE, "any", stages=3, ranks=ranks)
    check_divisions(
        {"num_attention_heads": [12], "text_config": {"num_attention_heads": 5}}, "any", stages=9, ranks=ranks
    )


def test_sizes_beside_those_of_a_language_model_are_not_read() -> None:
    check_divisions(DENSE | {"text_config": {"num_attention_heads": 10}}, "any", stages=5, ranks=5)


def test_key_heads_of_latent_attention_are_not_divided() -> None:
    check_divisions(DENSE | {"kv_lora_rank": 16}, "any", stages=1, ranks=6)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 layers cannot have --pipeline-parallel-size 4: .* use at most 3"):
        check_divisions(DENSE, "any", stages=4, ranks=1)
    assert [stage_layers(3, stage, 2) for stage in (0, 1)] == [range(2), range(2, 3)]
