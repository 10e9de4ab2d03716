"""Command lines of ``vllm serve``: each name is taken, asks for what is so anyway, or is refused with what to do."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from actors.options import ARGUMENTS, ArgumentError
from app.cli.arguments import load_arguments

_LINES = [
    tuple(line.split(" -> "))
    for line in (Path(__file__).parent / "vllm_names.txt").read_text().splitlines()
    if not line.startswith("#")
]
_FIELDS = {argument.field for argument in ARGUMENTS}


@pytest.mark.parametrize(("words", "becomes"), _LINES, ids=[words for words, _ in _LINES])
def test_a_vllm_option_is_accepted_or_refused_with_a_remedy(words: str, becomes: str) -> None:
    plain = load_arguments(["m"], {})
    if becomes in _FIELDS:
        assert getattr(load_arguments(["m", *words.split(" ")], {}), becomes) != getattr(plain, becomes)
    elif becomes == "=":
        assert load_arguments(["m", *words.split(" ")], {}) == plain
    else:
        with pytest.raises(ArgumentError) as caught:
            load_arguments(["m", *words.split(" ")], {})
        assert becomes in str(caught.value)
        assert "no such argument" not in str(caught.value)


def test_names_that_mean_the_reverse_follow_the_flag() -> None:
    assert not load_arguments(["m", "--disable-log-requests"], {}).log_requests
    assert load_arguments(["m", "--no-disable-log-requests"], {}).log_requests
    assert load_arguments(["m", "--disable-async-output-proc"], {}).disable_overlap_schedule


@pytest.mark.parametrize(
    "config",
    [
        {"weight_nz_mode": 2, "enable_weight_nz_layout": True, "enable_mlapo": True, "enable_fused_mc2": 0},
        {"ascend_compilation_config": {"enable_static_kernel": False, "fuse_norm_quant": True}},
        {"scheduler_config": {"enable_balance_scheduling": False, "profiling_chunk_config": {"enabled": False}}},
        {"enable_cpu_binding": "False", "dump_config": None, "pa_shape_list": []},
        {"eplb_config": {"dynamic_eplb": False, "eplb_policy_type": 1}},
    ],
)
def test_members_that_ask_for_what_is_so_change_nothing(config: dict[str, object]) -> None:
    given = load_arguments([], {}, {"model": "m", "additional_config": config})
    assert msgspec.structs.replace(given, additional_config={}) == load_arguments(["m"], {})


def test_all_members_that_are_refused_are_named() -> None:
    with pytest.raises(ArgumentError) as caught:
        load_arguments([], {}, {"additional_config": {"weight_nz_mode": True, "rl_config": {"enabled": True}}})
    assert [problem.partition(": ")[2].partition(":")[0] for problem in caught.value.problems] == [
        "weight_nz_mode",
        "rl_config.enabled",
    ]
