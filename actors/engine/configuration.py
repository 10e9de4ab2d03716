"""The configuration of metrics, planner and runner, from the arguments."""

from __future__ import annotations

from pathlib import Path

import msgspec

from actors.options import Arguments
from actors.scheduling.config import PlannerConfig
from actors.text.served_model import ServedModel
from actors.workers.placement import Placement
from kernels.contract.adapters import AdapterSettings
from kernels.contract.config import RunnerConfig
from kernels.contract.expert_settings import ExchangeSettings, ExpertSettings, RebalanceSettings
from kernels.contract.grammar import GrammarSettings
from kernels.contract.speculation import SpeculativeSettings
from telemetry.metrics.options import MetricOptions, token_buckets

__all__ = ["chunk_size", "grammar_settings", "load_balance_method", "metric_options", "planner_config", "runner_config"]


OP_TIMEOUT_SECONDS = 200.0
"""Most seconds until a hanging kernel or collective becomes a device error. Two thirds of the watchdog's time if that
is less, so that the worker reports the error before the watchdog kills it."""


def metric_options(arguments: Arguments) -> MetricOptions:
    """The options of metrics: which metrics to collect, and their buckets."""
    a = arguments
    return MetricOptions(
        enabled=a.enable_metrics,
        foreign_names=a.metrics_names,
        first_token_buckets=a.bucket_time_to_first_token,
        inter_token_buckets=a.bucket_inter_token_latency,
        duration_buckets=a.bucket_e2e_request_latency,
        collect_tokens=a.collect_tokens_histogram,
        prompt_token_buckets=token_buckets(a.prompt_tokens_buckets),
        generation_token_buckets=token_buckets(a.generation_tokens_buckets),
        custom_labels=a.tokenizer_metrics_allowed_custom_labels,
        adapters=a.has_adapters,
    )


def planner_config(
    arguments: Arguments,
    context_length: int,
    placement: Placement,
    speculation: SpeculativeSettings | None = None,
    *,
    whole_inputs: bool = False,
) -> PlannerConfig:
    """``whole_inputs``: an encoder's, which run in one step and are not cached."""
    a = arguments
    return PlannerConfig(
        max_running=a.max_running_requests,
        max_slots=a.max_running_requests + 1,
        step_tokens=_step_tokens(a, context_length, placement, whole_inputs),
        tail_tokens=_tail_tokens(a, placement),
        max_prefill_tokens=a.max_prefill_tokens,
        prefill_max_requests=a.prefill_max_requests,
        chunked=chunk_size(a, placement) > 0 and not whole_inputs,
        overlap=not a.disable_overlap_schedule,
        stages=a.pipeline_parallel_size,
        stages_ahead=a.pp_async_batch_depth,
        micro_batch=a.pp_max_micro_batch_size,
        use_cache=not a.disable_radix_cache and not whole_inputs,
        policy=a.schedule_policy,
        conservativeness=a.schedule_conservativeness,
        max_adapters=a.max_loras_per_batch if a.has_adapters else 0,
        priority_scheduling=a.enable_priority_scheduling,
        low_priority_values_first=a.schedule_low_priority_values_first,
        preemption_threshold=a.priority_scheduling_preemption_threshold,
        adaptive=speculation.adaptive.config if speculation is not None and speculation.adaptive.enabled else None,
    )


def _expert_settings(arguments: Arguments) -> ExpertSettings | None:
    a, rebalance = arguments, None
    if a.enable_eplb:
        rebalance = RebalanceSettings(
            a.eplb_rebalance_num_iterations,
            a.eplb_rebalance_layers_per_chunk or 1,
            a.eplb_min_rebalancing_utilization_threshold,
        )
    settings = ExpertSettings(
        redundant=a.ep_num_redundant_experts,
        dispatch=a.ep_dispatch_algorithm or "static",
        location=a.init_expert_location,
        rebalance=rebalance,
    )
    return None if settings == ExpertSettings() else settings


def runner_config(
    arguments: Arguments,
    model: Path,
    context_length: int,
    placement: Placement,
    speculation: SpeculativeSettings | None = None,
    grammar: GrammarSettings | None = None,
    *,
    adapters: AdapterSettings | None = None,
) -> RunnerConfig:
    a = arguments
    return RunnerConfig(
        model_path=str(model),
        device=placement.device,
        dtype=a.dtype,
        load_format=a.load_format,
        quantization=a.quantization or "",
        config_overrides=msgspec.json.encode(a.json_model_override_args).decode(),
        context_length=context_length,
        max_slots=a.max_running_requests + 1,
        page_size=a.page_size or placement.page_size,
        max_total_tokens=a.max_total_tokens or 0,
        mem_fraction_static=a.mem_fraction_static or 0.0,
        max_states=a.max_mamba_cache_size or 0,
        state_memory_ratio=a.mamba_full_memory_ratio or 0.0,
        snapshot_tokens=a.mamba_track_interval or 0,
        max_step_tokens=_step_tokens(a, context_length, placement) + _tail_tokens(a, placement),
        threads=a.cpu_threads or 0,
        random_seed=a.random_seed or 0,
        op_timeout=min(OP_TIMEOUT_SECONDS, a.watchdog_timeout * 2 / 3),
        tp_size=a.tensor_parallel_size,
        ep_size=a.expert_parts,
        experts=_expert_settings(a),
        exchange=None
        if a.exchange_mode is None
        else ExchangeSettings(mode=a.exchange_mode, overlap=a.enable_single_batch_overlap),
        dp_size=a.data_parallel_size if a.enable_dp_attention else 1,
        two_batch_threshold=a.tbo_token_distribution_threshold if a.enable_two_batch_overlap else None,
        whole_dense=a.has_whole_dense,
        context_parallel=a.enable_nsa_prefill_context_parallel,
        pp_size=a.pipeline_parallel_size,
        host_workers=a.node_workers,
        join_timeout=float(a.dist_timeout or 0),
        npu_simulator=placement.simulator,
        attention_backend=a.attention_backend or "",
        prefill_attention_backend=a.prefill_attention_backend or "",
        decode_attention_backend=a.decode_attention_backend or "",
        sampling_backend=a.sampling_backend or "",
        disable_graphs=a.disable_cuda_graph,
        graph_rows=a.cuda_graph_bs or (),
        graph_max_rows=a.cuda_graph_max_bs or 0,
        disable_graph_padding=a.disable_cuda_graph_padding,
        graph_tokens=a.piecewise_cuda_graph_tokens or (),
        graph_max_tokens=a.piecewise_cuda_graph_max_tokens or 0,
        all_prompt_graphs=a.enable_piecewise_cuda_graph,
        disable_prompt_graphs=a.disable_piecewise_cuda_graph,
        speculation=speculation,
        kv_cache_dtype="" if a.kv_cache_dtype == "auto" else a.kv_cache_dtype,
        kv_cache_quant_method="" if a.kv_cache_quant_method == "auto" else a.kv_cache_quant_method,
        kv_cache_scales=a.quantization_param_path or "",
        window_pages=not a.disable_hybrid_swa_memory,
        fp32_head=a.enable_fp32_lm_head,
        grammar=grammar,
        adapters=adapters,
        model_impl=a.model_impl,
        trust_remote_code=a.trust_remote_code,
        is_embedding=a.is_embedding,
        invariant=a.enable_deterministic_inference,
    )


def load_balance_method(arguments: Arguments) -> str:
    """The router's method."""
    return "round_robin" if arguments.prefill_round_robin_balance else arguments.load_balance_method


def grammar_settings(arguments: Arguments, served: ServedModel) -> GrammarSettings | None:
    """None: requests cannot have grammars."""
    a = arguments
    if a.grammar_backend == "none" or served.codec is None or not served.eos_ids:
        return None
    return GrammarSettings(
        backend="llguidance" if a.grammar_backend == "auto" else a.grammar_backend,
        tokenizer=served.codec.source,
        eos_ids=served.eos_ids,
        whitespace=a.constrained_json_whitespace_pattern,
        compact=a.constrained_json_disable_any_whitespace,
    )


def chunk_size(arguments: Arguments, placement: Placement) -> int:
    """``--chunked-prefill-size`` or the default of the device."""
    requested = arguments.chunked_prefill_size
    return placement.chunk_size if requested is None else requested


def _step_tokens(arguments: Arguments, context_length: int, placement: Placement, whole_inputs: bool = False) -> int:
    """Most tokens of a step: the chunk size, but at least a decode of every running sequence.

    Without chunking a step must hold the longest possible prompt.
    """
    chunk = chunk_size(arguments, placement)
    if whole_inputs:
        return max(chunk, context_length, arguments.max_running_requests)
    budget = chunk if chunk > 0 else max(arguments.max_prefill_tokens, context_length)
    return max(budget, arguments.max_running_requests)


def _tail_tokens(arguments: Arguments, placement: Placement) -> int:
    """Tokens by which a step may exceed its budget to finish a prompt; 0 if --chunked-prefill-size is given.

    Only on a CPU, which has no graphs of fixed sizes.
    """
    return placement.chunk_size // 8 if placement.device == "cpu" and arguments.chunked_prefill_size is None else 0
