from __future__ import annotations

import shlex

import pytest

from actors.engine.configuration import metric_options
from actors.options import ArgumentError, Arguments
from app.cli.arguments import load_arguments


def test_values_come_as_words_of_the_command_line() -> None:
    line = (
        "m --bucket-time-to-first-token 0.1 1 10 --bucket-inter-token-latency 0.01,0.1 "
        "--bucket-e2e-request-latency 5 --collect-tokens-histogram --prompt-tokens-buckets tse 1000 2 4 "
        "--generation-tokens-buckets custom 10 100 --tokenizer-metrics-allowed-custom-labels team tier "
        "--metrics-names vllm,sglang"
    )
    given = load_arguments(shlex.split(line), {})
    options = metric_options(given)
    assert options.first_token_buckets == (0.1, 1.0, 10.0)
    assert options.inter_token_buckets == (0.01, 0.1)
    assert options.duration_buckets == (5.0,)
    assert options.prompt_token_buckets == (996, 998, 1000, 1002, 1004)
    assert options.generation_token_buckets == (10, 100)
    assert options.custom_labels == ("team", "tier")
    assert options.foreign_names == ("vllm", "sglang")
    assert options.collect_tokens
    assert options.enabled


def test_keywords_take_lists() -> None:
    given = Arguments.from_keywords(model="m", bucket_time_to_first_token=[1, 2.5], metrics_names=["sglang"])
    assert given.bucket_time_to_first_token == (1.0, 2.5)
    assert given.metrics_names == ("sglang",)


@pytest.mark.parametrize(
    ("keywords", "reported"),
    [
        ({"bucket_time_to_first_token": [2, 1]}, "must ascend"),
        ({"bucket_time_to_first_token": [0]}, "numbers above 0"),
        ({"bucket_inter_token_latency": "fast"}, "numbers above 0"),
        ({"prompt_tokens_buckets": "tse 1", "collect_tokens_histogram": True}, "tse 1000 2 8"),
        ({"generation_tokens_buckets": "custom 1"}, "needs collect_tokens_histogram"),
        ({"tokenizer_metrics_allowed_custom_labels": ["le"]}, "is not a valid custom label"),
        ({"tokenizer_metrics_allowed_custom_labels": ["a b"]}, "is not a valid custom label"),
        ({"tokenizer_metrics_allowed_custom_labels": ["a", "a"]}, "each label once"),
        ({"metrics_names": "tgi"}, "sglang or vllm"),
        ({"metrics_names": "vllm", "enable_metrics": False}, "needs enable_metrics"),
        ({"collect_tokens_histogram": True, "enable_metrics": False}, "needs enable_metrics"),
        ({"export_metrics_to_file": True}, "need each other"),
        ({"export_metrics_to_file_dir": "d"}, "need each other"),
        ({"decode_log_interval": -1}, "decode_log_interval"),
        ({"gc_warning_threshold_secs": -1}, "gc_warning_threshold_secs"),
    ],
)
def test_what_cannot_be_meant_is_refused(keywords: dict[str, object], reported: str) -> None:
    with pytest.raises(ArgumentError, match=reported):
        Arguments.from_keywords(model="m", **keywords)
