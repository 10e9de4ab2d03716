"""Each scheduling and memory argument reaches the planner or the runner; their own tests show what it does there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.engine.configuration import planner_config, runner_config
from actors.options import Arguments
from actors.workers.placement import Placement
from kernels.contract.speculation import AdaptiveSettings, SpeculativeSettings

CPU = Placement("cpu")


@pytest.mark.parametrize(
    ("keywords", "field", "value"),
    [
        ({"max_running_requests": 7}, "max_running", 7),
        ({"max_running_requests": 7}, "max_slots", 8),
        ({"chunked_prefill_size": 900}, "step_tokens", 900),
        ({"chunked_prefill_size": 100, "max_running_requests": 300}, "step_tokens", 300),
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 64}, "step_tokens", 4096),
        ({"chunked_prefill_size": -1}, "chunked", False),
        ({"max_prefill_tokens": 99}, "max_prefill_tokens", 99),
        ({"prefill_max_requests": 3}, "prefill_max_requests", 3),
        ({"disable_overlap_schedule": True}, "overlap", False),
        ({"disable_radix_cache": True}, "use_cache", False),
        ({"schedule_policy": "lpm"}, "policy", "lpm"),
        ({"schedule_conservativeness": 0.5}, "conservativeness", 0.5),
        ({"enable_priority_scheduling": True}, "priority_scheduling", True),
        (
            {"enable_priority_scheduling": True, "schedule_low_priority_values_first": True},
            "low_priority_values_first",
            True,
        ),
        (
            {"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": 3},
            "preemption_threshold",
            3,
        ),
    ],
)
def test_planner(keywords: dict[str, Any], field: str, value: object) -> None:
    default = planner_config(Arguments(model_path="m"), 4096, CPU)
    assert getattr(default, field) != value
    assert getattr(planner_config(Arguments.from_keywords(model="m", **keywords), 4096, CPU), field) == value


@pytest.mark.parametrize(
    ("keywords", "field", "value"),
    [
        ({"dtype": "float32"}, "dtype", "float32"),
        ({"load_format": "dummy"}, "load_format", "dummy"),
        ({"json_model_override_args": {"rope_theta": 5}}, "config_overrides", '{"rope_theta":5}'),
        ({"max_running_requests": 7}, "max_slots", 8),
        ({"page_size": 32}, "page_size", 32),
        ({"max_total_tokens": 4096}, "max_total_tokens", 4096),
        ({"max_mamba_cache_size": 99}, "max_states", 99),
        ({"mamba_full_memory_ratio": 0.9}, "state_memory_ratio", 0.9),
        ({"mamba_track_interval": 256}, "snapshot_tokens", 256),
        ({"mem_fraction_static": 0.25}, "mem_fraction_static", 0.25),
        ({"chunked_prefill_size": 900}, "max_step_tokens", 900),
        ({"cpu_threads": 1}, "threads", 1),
        ({"random_seed": 5}, "random_seed", 5),
        ({"quantization": "w8a8_int8"}, "quantization", "int8"),
        ({"quantization": "awq"}, "quantization", "awq"),
        ({"attention_backend": "torch_native"}, "attention_backend", "torch_native"),
        ({"prefill_attention_backend": "ascend"}, "prefill_attention_backend", "ascend"),
        ({"decode_attention_backend": "ascend"}, "decode_attention_backend", "ascend"),
        ({"sampling_backend": "pytorch"}, "sampling_backend", "pytorch"),
        ({"tp": 2}, "tp_size", 2),
        ({"tensor_parallel_size": 4}, "tp_size", 4),
        ({"disable_cuda_graph": True}, "disable_graphs", True),
        ({"enforce_eager": True}, "disable_graphs", True),
        ({"cuda_graph_bs": (1, 6)}, "graph_rows", (1, 6)),
        ({"cuda_graph_bs": "1 6"}, "graph_rows", (1, 6)),
        ({"cuda_graph_max_bs": 12}, "graph_max_rows", 12),
        ({"disable_cuda_graph_padding": True}, "disable_graph_padding", True),
        ({"piecewise_cuda_graph_tokens": "64 512"}, "graph_tokens", (64, 512)),
        ({"piecewise_cuda_graph_max_tokens": 1024}, "graph_max_tokens", 1024),
        ({"enforce_piecewise_cuda_graph": True}, "all_prompt_graphs", True),
        ({"disable_piecewise_cuda_graph": True}, "disable_prompt_graphs", True),
    ],
)
def test_runner(keywords: dict[str, Any], field: str, value: object) -> None:
    model = Path("m")
    assert getattr(runner_config(Arguments(model_path="m"), model, 4096, CPU), field) != value
    assert getattr(runner_config(Arguments.from_keywords(model="m", **keywords), model, 4096, CPU), field) == value


def test_both_learn_of_drafts() -> None:
    """The planner of how many, where they adapt to what they bring; else it plans as many as the runner makes."""
    for enabled, reported in ((True, '{"ema_alpha": 0.5}'), (False, None)):
        draft_tokens = SpeculativeSettings("NGRAM", adaptive=AdaptiveSettings(enabled, '{"ema_alpha": 0.5}'))
        assert planner_config(Arguments(model_path="m"), 4096, CPU, draft_tokens).adaptive == reported
        assert runner_config(Arguments(model_path="m"), Path("m"), 4096, CPU, draft_tokens).speculation == draft_tokens
    assert planner_config(Arguments(model_path="m"), 4096, CPU).adaptive is None


def test_chunks_suit_the_device_unless_configured() -> None:
    gpu = Placement("cuda")
    for arguments, tokens in (
        (Arguments(model_path="m"), 2048),
        (Arguments(model_path="m", chunked_prefill_size=64), 256),
    ):
        assert planner_config(arguments, 4096, gpu).step_tokens == tokens
        assert runner_config(arguments, Path("m"), 4096, gpu).max_step_tokens == tokens
        assert planner_config(arguments, 4096, gpu).tail_tokens == 0
    for arguments, tokens, tail in (
        (Arguments(model_path="m"), 512, 64),
        (Arguments(model_path="m", chunked_prefill_size=512), 512, 0),
    ):
        planned = planner_config(arguments, 4096, CPU)
        assert (planned.step_tokens, planned.tail_tokens) == (tokens, tail)
        assert runner_config(arguments, Path("m"), 4096, CPU).max_step_tokens == tokens + tail


def test_a_hung_kernel_is_noticed_before_its_worker_is_killed_for_silence() -> None:
    for arguments in (Arguments(model_path="m"), Arguments(model_path="m", watchdog_timeout=6.0)):
        config = runner_config(arguments, Path("m"), 4096, CPU)
        assert 0 < config.op_timeout < arguments.watchdog_timeout
