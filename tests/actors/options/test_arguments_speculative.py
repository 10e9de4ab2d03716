"""Arguments of speculative decoding: names, the JSON object, and which go together."""

import pytest

from actors.options import ArgumentError, Arguments

TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}


def problem(**keywords: object) -> str:
    with pytest.raises(ArgumentError) as caught:
        Arguments.from_keywords(**keywords)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "algorithm"),
    [
        *[(name, name) for name in ("EAGLE", "EAGLE3", "MTP", "DFLASH", "STANDALONE", "NGRAM")],
        ("NEXTN", "EAGLE"),
        ("nextn", "EAGLE"),
        ("eagle3", "EAGLE3"),
        ("draft_model", "STANDALONE"),
        ("deepseek_mtp", "MTP"),
        ("step3p5_mtp", "MTP"),
    ],
)
def test_algorithms_have_the_names_that_recipes_use(given: str, algorithm: str) -> None:
    assert Arguments.from_keywords(speculative_algorithm=given).speculative_algorithm == algorithm


@pytest.mark.parametrize("name", ["medusa", "MEDUSA", "suffix", "something"])
def test_another_algorithm_is_refused_with_the_ones_there_are(name: str) -> None:
    assert "STANDALONE or NGRAM" in problem(speculative_algorithm=name)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (
            '{"method": "eagle3", "model": "d", "num_speculative_tokens": 3}',
            {"algorithm": "EAGLE3", "draft_model_path": "d", "num_steps": 3},
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
            {
                "algorithm": "NGRAM",
                "num_draft_tokens": 8,
                "ngram_max_match_window_size": 4,
                "ngram_min_match_window_size": 2,
            },
        ),
        ({"method": "dflash", "model": "d", "num_speculative_tokens": 7}, {"num_draft_tokens": 8}),
        (
            {"algorithm": "EAGLE", "num_steps": 3, "eagle_topk": 4, "speculative_num_draft_tokens": 16},
            {"algorithm": "EAGLE", "num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 16},
        ),
        (
            {"method": "mtp", "revision": None, "quantization": "unquant", "adaptive": True},
            {"adaptive": True, "draft_model_quantization": "unquant"},
        ),
    ],
)
def test_one_object_stands_for_several_arguments(config: object, fields: dict[str, object]) -> None:
    arguments = Arguments.from_keywords(speculative_config=config)
    for name, value in fields.items():
        assert getattr(arguments, f"speculative_{name}") == value


def test_the_object_is_checked_like_arguments_of_their_own() -> None:
    assert "there is no key 'methd'" in problem(speculative_config={"methd": "eagle"})
    assert "there is no key 'config'" in problem(speculative_config={"config": {}})
    assert "speculative_config num_speculative_tokens: must be an integer" in problem(
        speculative_config={"method": "eagle", "num_speculative_tokens": "many"}
    )
    assert "num_speculative_tokens must be an integer" in problem(
        speculative_config={"method": "ngram", "num_speculative_tokens": "7"}
    )
    assert "contradicts speculative_algorithm" in problem(
        speculative_algorithm="EAGLE", speculative_config={"method": "ngram"}
    )
    assert "use bf16 weights" in problem(speculative_config={"method": "eagle3", "model": "d", "quantization": "mxfp8"})
    assert "must be a JSON object" in problem(speculative_config="[")
    assert "speculative_enforce_eager has no effect with speculative_algorithm NGRAM" in problem(
        speculative_config={"method": "ngram", "enforce_eager": True}
    )
    assert "device decides how experts run" in problem(speculative_config={"method": "mtp", "moe_backend": "triton"})


def test_an_object_put_straight_into_the_values_is_not_lost_in_silence() -> None:
    with pytest.raises(ArgumentError, match="speculative_config without speculative_algorithm"):
        Arguments(speculative_config={"method": "eagle"})


@pytest.mark.parametrize(
    ("keywords", "rule"),
    [
        ({"speculative_num_steps": 3}, "without speculative_algorithm has no effect"),
        ({"speculative_algorithm": "EAGLE", **TREE, "speculative_num_steps": None}, "speculative_num_steps is missing"),
        ({"speculative_algorithm": "EAGLE", **TREE, "speculative_num_draft_tokens": None}, "draft_tokens is missing"),
        ({"speculative_algorithm": "EAGLE", **TREE, "speculative_eagle_topk": None}, "eagle_topk is missing"),
        ({"speculative_algorithm": "EAGLE3", **TREE, "speculative_eagle_topk": 1}, "must be 4 or left out, not 16"),
        ({"speculative_algorithm": "EAGLE3", **TREE, "speculative_num_draft_tokens": 38}, "more than the 37 nodes"),
        ({"speculative_algorithm": "EAGLE3", **TREE, "speculative_num_draft_tokens": 3}, "at least 4"),
        (
            {
                "speculative_algorithm": "EAGLE",
                "speculative_num_steps": 20,
                "speculative_eagle_topk": 4,
                "speculative_num_draft_tokens": 64,
            },
            "more than the 64",
        ),
        ({"speculative_algorithm": "NGRAM", "speculative_num_steps": 3}, "only with EAGLE, EAGLE3, MTP or STANDALONE"),
        ({"speculative_algorithm": "NGRAM", "speculative_draft_model_path": "d"}, "no effect with"),
        ({"speculative_algorithm": "EAGLE3", "speculative_token_map": "m"}, "only with EAGLE, MTP or STANDALONE"),
        ({"speculative_algorithm": "EAGLE", "eagle3_layers_to_capture": "1 2"}, "only with EAGLE3"),
        ({"speculative_algorithm": "EAGLE3", "eagle3_layers_to_capture": "1 1"}, "each layer once"),
        ({"speculative_algorithm": "EAGLE3", "enable_multi_layer_eagle": True}, "only with EAGLE or MTP"),
        ({"speculative_algorithm": "EAGLE", "speculative_dflash_block_size": 8}, "only with DFLASH"),
        ({"speculative_algorithm": "EAGLE", "speculative_ngram_match_type": "PROB"}, "only with NGRAM"),
        ({"speculative_algorithm": "EAGLE", "speculative_draft_model_revision": "x"}, "draft_model_path"),
        ({"speculative_algorithm": "EAGLE", "speculative_adaptive_config": "x"}, "needs speculative_adaptive"),
        (
            {
                "speculative_algorithm": "DFLASH",
                "speculative_dflash_block_size": 8,
                "speculative_num_draft_tokens": 16,
            },
            "are the same setting",
        ),
        (
            {
                "speculative_algorithm": "DFLASH",
                "speculative_dflash_block_size": 8,
                "speculative_dflash_draft_window_size": 7,
            },
            "at least the block size, 8",
        ),
        (
            {"speculative_algorithm": "NGRAM", "speculative_ngram_min_match_window_size": 13},
            "max_match_window_size, 12",
        ),
        (
            {
                "speculative_algorithm": "NGRAM",
                "speculative_ngram_match_type": "PROB",
                "speculative_ngram_min_bfs_breadth": 2,
            },
            "min_bfs_breadth has no effect with speculative_ngram_match_type PROB",
        ),
        ({"speculative_algorithm": "NGRAM", "speculative_ngram_min_bfs_breadth": 11}, "max_bfs_breadth, 10"),
        (
            {
                "speculative_algorithm": "NGRAM",
                "speculative_ngram_min_match_window_size": 4,
                "speculative_ngram_branch_length": 4,
            },
            "give at least 5",
        ),
        (
            {"speculative_algorithm": "EAGLE", "device": "cpu", "speculative_attention_mode": "decode"},
            "speculative_attention_mode contradicts device cpu",
        ),
        (
            {"speculative_algorithm": "EAGLE", "device": "cuda", "speculative_draft_attention_backend": "ascend"},
            "speculative_draft_attention_backend contradicts device cuda",
        ),
        ({"speculative_algorithm": "EAGLE", "speculative_accept_threshold_single": 0}, "above 0"),
        ({"speculative_algorithm": "EAGLE", "speculative_accept_threshold_acc": 1.5}, "up to 1"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_rule(keywords: dict[str, object], rule: str) -> None:
    assert rule in problem(**keywords)


@pytest.mark.parametrize(
    "keywords",
    [
        {"speculative_algorithm": "EAGLE", **TREE},
        {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3},
        {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4},
        {"speculative_algorithm": "EAGLE3", **TREE, "speculative_num_draft_tokens": 37},
        {"speculative_algorithm": "EAGLE3", "eagle3_layers_to_capture": "2 16 29"},
        {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 16, "speculative_ngram_max_bfs_breadth": 4},
        {"speculative_algorithm": "DFLASH", "speculative_dflash_block_size": 8, "speculative_num_draft_tokens": 8},
        {"speculative_algorithm": "STANDALONE", "speculative_token_map": "m", "speculative_adaptive": True},
    ],
)
def test_compatible_options_are_accepted(keywords: dict[str, object]) -> None:
    Arguments.from_keywords(**keywords)
