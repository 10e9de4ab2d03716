"""Options of ``vllm serve``: each is taken, has the value that always holds, or is refused with what to do."""

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
        {"weight_nz_mode": None, "enable_dsa_cp": None, "eplb_config": {}},
    ],
)
def test_members_with_the_value_that_holds_change_nothing(config: dict[str, object]) -> None:
    given = load_arguments([], {}, {"model": "m", "additional_config": config})
    assert msgspec.structs.replace(given, additional_config={}) == load_arguments(["m"], {})


def test_all_members_that_are_refused_are_named() -> None:
    config = {"weight_nz_mode": True, "rl_config": {"enabled": True}, "config_key": {}}
    with pytest.raises(ArgumentError) as caught:
        load_arguments([], {}, {"additional_config": config})
    assert [problem.partition(": ")[2].partition(":")[0] for problem in caught.value.problems] == [
        "weight_nz_mode",
        "rl_config.enabled",
        "config_key",
    ]


def test_a_runner_overrides_and_contradicts_as_a_flag_does(tmp_path: Path) -> None:
    file = tmp_path / "troupe.yaml"
    file.write_text("runner: pooling\n")
    assert load_arguments(["m", "--config", str(file)], {}).is_embedding
    assert not load_arguments(["m", "--config", str(file), "--runner", "generate"], {}).is_embedding
    assert not load_arguments(["m", "--runner", "pooling", "--runner", "generate"], {}).is_embedding
    with pytest.raises(ArgumentError, match="--is-embedding: contradicts --runner"):
        load_arguments(["m", "--runner", "generate", "--is-embedding"], {})
