"""Values: read, checked, refused, described."""

import math
from pathlib import Path

import msgspec
import pytest

from actors.engine.configuration import runner_config
from actors.options import ARGUMENTS, Argument, ArgumentError, Arguments
from actors.workers.placement import Placement
from app.cli.arguments import load_arguments


def problem(**keywords: object) -> str:
    with pytest.raises(ArgumentError) as caught:
        Arguments.from_keywords(**keywords)
    return str(caught.value)


def test_keywords_by_every_kind_of_name() -> None:
    arguments = Arguments.from_keywords(
        model="m", max_num_seqs=8, enable_prefix_caching=False, hf_overrides={"a": 1}, dtype="half", warmups=["batch"]
    )
    assert arguments.model_path == "m"
    assert arguments.max_running_requests == 8
    assert arguments.disable_radix_cache
    assert arguments.json_model_override_args == {"a": 1}
    assert arguments.dtype == "float16"
    assert arguments.warmups == ("batch",)


def test_text_is_read_as_the_type() -> None:
    arguments = Arguments.from_keywords(
        port="9000",
        mem_fraction_static="0.5",
        stream_output="true",
        json_model_override_args='{"rope": {"a": 1}}',
        warmups="batch, generate",
        request_timeout="none",
        tokenizer_mode="SLOW",
    )
    assert arguments.port == 9000
    assert arguments.mem_fraction_static == 0.5
    assert arguments.stream_output is True
    assert arguments.json_model_override_args == {"rope": {"a": 1}}
    assert arguments.warmups == ("batch", "generate")
    assert arguments.request_timeout is None
    assert arguments.tokenizer_mode == "slow"


@pytest.mark.parametrize(
    ("text", "number"), [("32k", 32_000), ("25.6k", 25_600), ("32K", 32_768), ("1m", 10**6), ("2M", 1 << 21)]
)
def test_a_suffix_multiplies_as_in_vllms_command_lines(text: str, number: int) -> None:
    assert Arguments.from_keywords(model="m", max_model_len=text).context_length == number


@pytest.mark.parametrize("text", ["32q", "0.0001k", "1.5K", "k", "1kk", "1e3", "999999999999999G"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    assert "must be an integer from 2 to 16777216" in problem(max_model_len=text)


def test_members_of_an_object_are_given_together() -> None:
    text = problem(**{"preferred_sampling_params.top-p": 0.5})
    assert """preferred_sampling_params '{"top_p": "..."}'""" in text


def test_members_given_one_by_one_override_those_of_the_object() -> None:
    whole = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    arguments = Arguments.from_keywords(model="m", **whole, **{"speculative_config.num_speculative_tokens": "5"})
    assert arguments.speculative_num_draft_tokens == 6
    assert problem(**{"compilation_config.cudagraph_mode": "PIECEWISE"}).startswith(
        "compilation_config: cudagraph_mode"
    )
    assert problem(**{"speculative_config.num-steps": "x"}).startswith("speculative_config.num-steps: must be")


def test_a_mode_of_graphs_overrides_the_one_of_a_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    for before, after, off, piecewise_off in (
        ("NONE", "FULL", False, False),
        ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", False, False),
        ("NONE", "FULL_DECODE_ONLY", False, True),
    ):
        file.write_text(f"compilation-config:\n  cudagraph_mode: {before}\n")
        arguments = load_arguments(["m", "--config", str(file), "-cc.cudagraph_mode", after], {})
        assert (arguments.disable_cuda_graph, arguments.disable_piecewise_cuda_graph) == (off, piecewise_off)
    both = {"compilation_config": {"cudagraph_mode": "FULL"}, "disable_cuda_graph": True}
    assert "compilation_config cudagraph_mode: contradicts disable_cuda_graph" in problem(**both)


def test_unknown_members_of_the_compilation_config_are_refused() -> None:
    """Also with a value that changes nothing, so that a misspelled name is seen."""
    assert "cudagraph_mod: there is no such member" in problem(compilation_config={"cudagraph_mod": None})
    assert "use_cudagraph: there is no such member" in problem(compilation_config={"use_cudagraph": False})
    assert Arguments.from_keywords(model="m", compilation_config={"use_inductor": False}).model_path == "m"


def test_a_path_is_taken_for_its_text() -> None:
    arguments = Arguments.from_keywords(model=Path("a/model"), kv_cache_dtype="int8", quantization_param_path=Path("f"))
    assert arguments.model_path == str(Path("a/model"))
    assert arguments.quantization_param_path == "f"
    assert "must be" in problem(dtype=Path("int3"))


def test_preferred_sampling_parameters() -> None:
    preferred = {"temperature": 0.6, "top_k": 20, "presence_penalty": -1}
    assert Arguments.from_keywords(preferred_sampling_params=preferred).preferred_sampling_params == preferred


def test_none_means_left_out() -> None:
    assert Arguments.from_keywords(max_running_requests=None, enable_lora=None, dtype=None) == Arguments()


def test_an_int_for_a_float_becomes_one() -> None:
    value = Arguments.from_keywords(shutdown_timeout=5).shutdown_timeout
    assert value == 5.0
    assert isinstance(value, float)


def test_an_unknown_name_gets_the_nearest_one() -> None:
    assert problem(max_nun_seqs=3) == "max_nun_seqs: there is no such argument; did you mean max_num_seqs?"
    assert "troupe serve --help" in problem(xyzzy=1)


def test_an_unbuilt_feature_is_refused_with_reason_and_remedy() -> None:
    assert "no rotary scaling; merge" in problem(enable_lora_bias=True)
    assert "this device is not built yet; use npu, cuda or cpu" in problem(device="xpu")
    assert "bf16 weights with --quantization int8" in problem(quantization="nvfp4")
    assert "leave it out for checkpoints of ModelSlim" in problem(quantization="mxfp8")
    assert "collectives are those of the device" in problem(enable_nccl_nvls=True)
    assert "AWQ and GPTQ checkpoints are recognized" in problem(quantization="awq_marlin")


def test_a_value_that_changes_nothing_is_accepted() -> None:
    keywords = {
        "tensor_parallel_size": 1,
        "dp_size": "1",
        "kv_cache_dtype": "auto",
        "enable_lora_bias": False,
        "no_enable_lora_bias": True,
        "enable_mixed_chunk": True,
        "hicache_ratio": 2,
        "encoder_urls": [],
        "model_impl": "auto",
        "model_loader_extra_config": {},
        "speculative_algorithm": None,
    }
    assert Arguments.from_keywords(**keywords) == Arguments()


def test_a_negated_refusal_is_not_a_way_around_it() -> None:
    assert "adapters have no biases" in problem(no_enable_lora_bias=False)
    assert "share a step" in problem(no_enable_mixed_chunk=True)


@pytest.mark.parametrize(
    "argument", [argument for argument in ARGUMENTS if argument.kind in ("int", "float")], ids=lambda a: a.name
)
def test_numbers_are_bounded(argument: Argument) -> None:
    assert argument.minimum is not None
    assert argument.maximum is not None
    field, low, high = argument.field, argument.minimum, argument.maximum
    wrong: list[object] = [high + 1, low - 3, 10**400, -math.inf, math.inf, math.nan, "many", True, [1], "1e999"]
    if argument.above:
        wrong.append(low)
    for value in wrong:
        assert problem(**{field: value}).startswith(f"{field}: must be a")
    with pytest.raises(ArgumentError):
        Arguments(**{field: high + 1})


def test_special_values_outside_the_bounds() -> None:
    assert Arguments.from_keywords(chunked_prefill_size=-1).chunked_prefill_size == -1
    assert "or -1, not 0" in problem(chunked_prefill_size=0)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"port": 1.5}, "an integer"),
        ({"stream_output": "maybe"}, "true or false"),
        ({"stream_output": 2}, "true or false"),
        ({"schedule_policy": "Best"}, "lpm or fcfs, not 'Best'"),
        ({"schedule_policy": ["lpm"]}, "lpm or fcfs"),
        ({"json_model_override_args": "{"}, "JSON object"),
        ({"json_model_override_args": "[1]"}, "JSON object"),
        ({"json_model_override_args": "[" * 60000}, "JSON object"),
        ({"json_model_override_args": '"' + "x" * 70000 + '"'}, "at most"),
        ({"chat_template": ""}, "empty"),
        ({"chat_template": "a\0b"}, "NUL"),
        ({"host": "x" * 70000}, "at most"),
        ({"warmups": "generate,nothing"}, "generate, long-prompt or batch"),
        ({"fastapi_root_path": "llm"}, "begin with a slash"),
        ({"fastapi_root_path": "/llm/"}, "begin with a slash"),
        ({"model_loader_extra_config": {"x": 1}}, "loaders have no options"),
        ({"model_impl": "mindspore"}, "models of MindSpore are not supported"),
        ({"model_impl": "other"}, "auto, native or transformers"),
        ({"preferred_sampling_params": {"max_tokens": 3}}, "max_tokens cannot be set"),
        ({"preferred_sampling_params": {"top_p": 0}}, "top_p must be a number above 0 up to 1, not 0"),
        ({"preferred_sampling_params": {"top_k": 1.5}}, "top_k must be an integer"),
        ({"config": "file.yaml"}, "command line only"),
    ],
)
def test_wrong_values(keywords: dict[str, object], message: str) -> None:
    assert message in problem(**keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"api_key": " , "}, "open to all"),
        ({"schedule_low_priority_values_first": True}, "needs enable_priority_scheduling"),
        ({"priority_scheduling_preemption_threshold": 5}, "needs enable_priority_scheduling"),
        ({"enable_priority_scheduling": True, "abort_on_priority_when_disabled": True}, "contradicts"),
        ({"dynamic_batch_tokenizer_batch_size": 4}, "needs enable_dynamic_batch_tokenizer"),
        ({"dynamic_batch_tokenizer_batch_timeout": 1}, "needs enable_dynamic_batch_tokenizer"),
        (
            {"enable_dynamic_batch_tokenizer": True, "disable_tokenizer_batch_encode": True},
            "enable_dynamic_batch_tokenizer contradicts disable_tokenizer_batch_encode",
        ),
        ({"tp_size": 4, "ep_size": 3}, "expert_parallel_size 3 must divide tensor_parallel_size 4"),
        ({"tp_size": 4, "ep_size": 2, "enable_expert_parallel": True}, "contradicts expert_parallel_size"),
        ({"deepep_mode": "normal"}, "deepep_mode needs moe_a2a_backend"),
        ({"enable_single_batch_overlap": True}, "enable_single_batch_overlap needs moe_a2a_backend"),
        ({"tp": 2, "moe_a2a_backend": "deepep"}, "moe_a2a_backend needs enable_dp_attention"),
        (
            {"tp": 4, "dp": 2, "ep": 2, "enable_dp_attention": True, "all2all_backend": "deepep"},
            "moe_a2a_backend contradicts expert_parallel_size 2",
        ),
        (
            {"tp": 2, "dp": 2, "enable_dp_attention": True, "deepep_mode": "normal"}
            | {"all2all_backend": "deepep_low_latency"},
            "deepep_low_latency contradicts deepep_mode",
        ),
        ({"moe_a2a_backend": "ascend_fuseep"}, "torch_npu has no operator that dispatches"),
        ({"deepep_config": "config.json"}, "not by this library"),
        (
            {"speculative_algorithm": "MTP", "speculative_moe_a2a_backend": "deepep"},
            "speculative_moe_a2a_backend needs moe_a2a_backend deepep",
        ),
        (
            {"speculative_algorithm": "NGRAM", "speculative_moe_a2a_backend": "deepep"},
            "speculative_moe_a2a_backend has no effect with speculative_algorithm NGRAM",
        ),
        (
            {"speculative_algorithm": "MTP", "speculative_moe_a2a_backend": "deepep"}
            | {"enable_multi_layer_eagle": True},
            "speculative_moe_a2a_backend contradicts enable_multi_layer_eagle",
        ),
        ({"enable_expert_parallel": True}, "enable_expert_parallel needs tensor_parallel_size"),
        ({"enable_two_batch_overlap": True}, "enable_two_batch_overlap needs tensor_parallel_size"),
        ({"tp": 2, "enable_two_batch_overlap": True, "pp": 2}, "overlap contradicts pipeline_parallel_size"),
        ({"tp": 2, "enable_two_batch_overlap": True, "lora_paths": ("a=b",)}, "overlap contradicts lora_paths"),
        (
            {"tp": 2, "enable_two_batch_overlap": True, "chunked_prefill_size": 511},
            "overlap contradicts chunked_prefill_size 511: only steps of 512 or more tokens",
        ),
        (
            {
                "tp": 2,
                "enable_nsa_prefill_context_parallel": True,
                "chunked_prefill_size": 63,
                "max_running_requests": 32,
            },
            "parallel contradicts chunked_prefill_size 63: only steps of 64 or more tokens",
        ),
        ({"tbo_token_distribution_threshold": 0.3}, "threshold needs enable_two_batch_overlap"),
        ({"ep_num_redundant_experts": 2}, "ep_num_redundant_experts needs expert_parallel_size"),
        ({"tp": 2, "ep": 2, "init_expert_location": "where.pt"}, "pickled files can run code"),
        ({"tp": 2, "ep": 2, "ep_dispatch_algorithm": "dynamic"}, "experts have no copies"),
        ({"tp": 2, "ep": 2, "eplb_rebalance_num_iterations": 9}, "num_iterations needs enable_eplb"),
        ({"tp": 2, "pp": 2, "ep": 2, "enable_eplb": True}, "enable_eplb contradicts pipeline_parallel_size"),
        (
            {"tp": 2, "pp": 2, "ep": 2, "ep_num_redundant_experts": 2},
            "ep_num_redundant_experts contradicts pipeline_parallel_size",
        ),
        ({"skip_server_warmup": True, "warmups": "batch"}, "warmups contradicts skip_server_warmup"),
        ({"soft_watchdog_timeout": 300}, "soft_watchdog_timeout 300 must be less than watchdog_timeout, 300"),
        ({"soft_watchdog_timeout": 9, "watchdog_timeout": 5}, "must be less than watchdog_timeout, 5"),
        ({"schedule_policy": "lpm", "disable_radix_cache": True}, "lpm needs the prefix cache"),
        ({"radix_eviction_policy": "lfu", "disable_radix_cache": True}, "eviction_policy needs the prefix cache"),
        ({"enable_expert_distribution_metrics": True}, "needs expert_distribution_recorder_mode"),
        ({"expert_distribution_recorder_buffer_size": 8}, "buffer_size needs expert_distribution_recorder_mode"),
        ({"expert_distribution_recorder_mode": "stat", "pp_size": 2}, "mode contradicts pipeline_parallel_size"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_adaptive": True, "pp_size": 2},
            "speculative_adaptive contradicts pipeline_parallel_size: it learns from the duration of steps",
        ),
        ({"enable_return_routed_experts": True, "pp_size": 2}, "experts contradicts pipeline_parallel_size"),
        ({"gpu_id_step": 2}, "gpu_id_step needs tensor_parallel_size"),
        ({"cuda_graph_max_bs": 8, "enforce_eager": True}, "cuda_graph_max_bs contradicts disable_cuda_graph"),
        (
            {"tokenizer_metrics_custom_labels_header": "x-team"},
            "custom_labels_header needs tokenizer_metrics_allowed_custom_labels",
        ),
        ({"skip_tokenizer_init": True, "chat_template": "x"}, "loads no tokenizer"),
        (
            {"skip_tokenizer_init": True, "tokenizer_mode": "slow", "tool_call_parser": "hermes"},
            "leave it out, or tokenizer_mode, tool_call_parser",
        ),
        ({"max_total_tokens": 16, "page_size": 32}, "less than one page"),
        ({"page_size": 16, "block_size": 32}, "contradicts page_size"),
        ({"piecewise_cuda_graph_tokens": (64,), "piecewise_cuda_graph_max_tokens": 128}, "lists all sizes"),
        (
            {"enable_piecewise_cuda_graph": True, "disable_piecewise_cuda_graph": True},
            "enable_piecewise_cuda_graph contradicts disable_piecewise_cuda_graph",
        ),
        ({"piecewise_cuda_graph_tokens": (64,), "enforce_eager": True}, "contradicts disable_cuda_graph"),
        (
            {"piecewise_cuda_graph_max_tokens": 64, "disable_cuda_graph_padding": True},
            "contradicts disable_cuda_graph_padding",
        ),
        ({"disable_radix_cache": True, "enable_prefix_caching": True}, "contradicts disable_radix_cache"),
    ],
)
def test_contradictions(keywords: dict[str, object], message: str) -> None:
    assert message in problem(**keywords)


@pytest.mark.parametrize(("hard", "stall"), [(300.0, 60.0), (600.0, 60.0), (10.0, 2.0)])
def test_a_stall_is_reported_before_its_actor_is_killed(hard: float, stall: float) -> None:
    assert Arguments(watchdog_timeout=hard).stall_seconds == stall
    assert Arguments(watchdog_timeout=hard, soft_watchdog_timeout=7.0).stall_seconds == 7.0


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ArgumentError) as caught:
        Arguments.from_keywords(port=-1, enable_lora_bias=True, xyzzy=1)
    assert len(caught.value.problems) == 3
    assert isinstance(caught.value, ValueError)


def test_the_struct_checks_itself_however_it_is_made() -> None:
    with pytest.raises(ArgumentError, match="port"):
        Arguments(port=-1)
    with pytest.raises(ArgumentError, match="page_size"):
        msgspec.structs.replace(Arguments(), page_size=0)
    with pytest.raises(AttributeError):
        Arguments().port = 1  # type: ignore[misc]


def test_keys_are_never_shown() -> None:
    arguments = Arguments.from_keywords(model="m", api_key="secret-1", admin_api_key="secret-2")
    described = arguments.describe()
    assert described["api_key"] == described["admin_api_key"] == "***"
    assert described["model_path"] == "m"
    assert "secret-" not in repr(arguments) + str(described) + msgspec.json.encode(described).decode()
    assert Arguments().describe()["api_key"] is None
    assert "hidden" not in problem(api_key=["hidden-3"])


def test_the_model_name() -> None:
    assert Arguments.from_keywords(model="a/b").model_name == "a/b"
    assert Arguments.from_keywords(model="a/b", served_model_name="c").model_name == "c"
    assert Arguments().model_name == ""


def test_derived_sizes_are_accepted_with_their_value_only() -> None:
    shared: dict[str, object] = {"model": "m", "tp": 4, "dp": 2, "enable_dp_attention": True, "ep": 2}
    stated = {"attn_tp_size": 2, "dense_tp_size": 2, "moe_tp_size": 2, "world_size": 4, "nprocs_per_node": 4}
    given = Arguments.from_keywords(**shared, **stated, enable_dp_lm_head=True, dp_sampling=True)
    plain = Arguments.from_keywords(**shared)
    config, same = (runner_config(each, Path("m"), 8, Placement("cpu")) for each in (given, plain))
    assert config == same
    assert config.attention_size == given.attn_tp_size
    for name, right in stated.items():
        with pytest.raises(ArgumentError, match=f"{name.replace('dense', 'moe_dense')} 8 must be {right}, since"):
            Arguments.from_keywords(**shared, **{name: 8})
    for name in ("enable_dp_lm_head", "dp_sampling"):
        with pytest.raises(ArgumentError, match=f"{name} needs enable_dp_attention"):
            Arguments.from_keywords(model="m", tp=4, dp=2, **{name: True})
    whole = Arguments.from_keywords(**shared, dense_tp_size=1)
    assert runner_config(whole, Path("m"), 8, Placement("cpu")).whole_dense
    alone = Arguments.from_keywords(model="m", tp=2, dp=2, enable_dp_attention=True, dense_tp_size=1)
    assert not runner_config(alone, Path("m"), 8, Placement("cpu")).whole_dense  # one device has each part's
    replicas: dict[str, object] = {"dp": 2, "tp": 2, "nnodes": 2, "dist_init_addr": "h:1", "attn_tp_size": 2}
    assert Arguments.from_keywords(model="m", **replicas, world_size=4, nprocs_per_node=2).node_workers == 2
