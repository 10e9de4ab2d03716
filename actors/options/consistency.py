"""Checks of values of several arguments against each other, and of the contents of JSON values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from actors.options.argument import Argument
from actors.options.errors import ArgumentError
from actors.options.lora import adapter_path
from actors.options.speculative_rules import speculative_problems
from actors.options.table import ARGUMENTS
from kernels.contract.config import CONTEXT_PARALLEL_TOKENS, TWO_BATCH_TOKENS
from kernels.contract.npu_simulator import SpecError
from kernels.contract.npu_simulator import parse as parse_simulation
from telemetry.metrics.options import token_buckets

if TYPE_CHECKING:
    from actors.options.values import Arguments

__all__ = ["contradictions", "without_effect"]

_LABEL = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]{0,63}")
_TAKEN_LABELS = frozenset(
    {
        *("error_type", "finish_reason", "gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"),
        *("gen_ai_token_type", "le", "instance", "job", "adapter"),
    }
)
_MAX_LABELS = 8


def _parameter(name: str, low: float, high: float, *, above: bool = False, whole: bool = False) -> Argument:
    return Argument(
        name=name,
        kind="int" if whole else "float",
        default=0,
        group="Model and tokenizer",
        help="",
        minimum=low,
        maximum=high,
        above=above,
    )


_PREFERRED = {
    argument.name: argument
    for argument in (
        _parameter("temperature", 0, 100),
        _parameter("top_p", 0, 1, above=True),
        _parameter("top_k", -1, 2**31 - 1, whole=True),
        _parameter("min_p", 0, 1),
        _parameter("repetition_penalty", 0.01, 100),
        _parameter("frequency_penalty", -2, 2),
        _parameter("presence_penalty", -2, 2),
    )
}


_DEFAULTS = {argument.field: argument.default for argument in ARGUMENTS}
_OF_TEXTS = (
    *("tokenizer_path", "tokenizer_mode", "tokenizer_worker_num", "enable_dynamic_batch_tokenizer"),
    *("enable_tokenizer_batch_encode", "chat_template", "trust_request_chat_template", "completion_template"),
    *("tool_call_parser", "reasoning_parser"),
    *("constrained_json_whitespace_pattern", "constrained_json_disable_any_whitespace"),
)
"""Arguments that need a tokenizer."""


def contradictions(arguments: Arguments) -> list[str]:
    """A sentence for each contradiction between values; empty if there is none."""
    return [
        *_needs(arguments),
        *_callers(arguments),
        *_devices(arguments),
        *_shapes(arguments),
        *_metrics(arguments),
        *_preferred(arguments),
        *_adapters(arguments),
        *speculative_problems(arguments),
    ]


def _needs(arguments: Arguments) -> Iterator[str]:
    """Values without effect because of another value or its absence."""
    if arguments.api_key is not None and not arguments.api_keys:
        yield "api_key contains no key, so the server would be open to all; leave it out if that is intended"
    for field in ("api_key", "admin_api_key"):
        if getattr(arguments, f"{field}_file") is not None and getattr(arguments, field) is None:
            yield f"{field}_file is read by Arguments.from_keywords and on the command line only; use one of them"
    if arguments.constrained_json_whitespace_pattern is not None:
        if arguments.grammar_backend in ("xgrammar", "none"):
            yield "constrained_json_whitespace_pattern needs grammar_backend llguidance"
        if arguments.constrained_json_disable_any_whitespace:
            yield "constrained_json_whitespace_pattern contradicts constrained_json_disable_any_whitespace"
    if not arguments.enable_priority_scheduling:
        if arguments.schedule_low_priority_values_first:
            yield "schedule_low_priority_values_first needs enable_priority_scheduling"
        if arguments.priority_scheduling_preemption_threshold != 10:
            yield "priority_scheduling_preemption_threshold needs enable_priority_scheduling"
    elif arguments.abort_on_priority_when_disabled:
        yield "abort_on_priority_when_disabled contradicts enable_priority_scheduling; leave one out"
    if not arguments.log_requests:
        if arguments.log_requests_level != 2:
            yield "log_requests_level needs log_requests"
        if arguments.log_requests_format == "json":
            yield "log_requests_format needs log_requests"
    if arguments.expert_distribution_recorder_mode is None:
        for name in ("expert_distribution_recorder_buffer_size", "expert_distribution_recorder_dir"):
            if getattr(arguments, name) is not None:
                yield f"{name} needs expert_distribution_recorder_mode"
        if arguments.enable_expert_distribution_metrics:
            yield "enable_expert_distribution_metrics needs expert_distribution_recorder_mode"
    if not arguments.enable_trace:
        for name in ("oltp_traces_endpoint", "otlp_traces_protocol", "trace_sample_ratio"):
            if getattr(arguments, name) is not None:
                yield f"{name} needs enable_trace"
        if arguments.ignore_client_traceparent:
            yield "ignore_client_traceparent needs enable_trace; a tracer_provider samples by itself"
    if not arguments.enable_dynamic_batch_tokenizer:
        if arguments.dynamic_batch_tokenizer_batch_size != 32:
            yield "dynamic_batch_tokenizer_batch_size needs enable_dynamic_batch_tokenizer"
        if arguments.dynamic_batch_tokenizer_batch_timeout != 0.002:
            yield "dynamic_batch_tokenizer_batch_timeout needs enable_dynamic_batch_tokenizer"
    elif not arguments.enable_tokenizer_batch_encode:
        yield "enable_dynamic_batch_tokenizer contradicts disable_tokenizer_batch_encode; leave one out"
    if arguments.skip_server_warmup and arguments.warmups != ("generate",):
        yield "warmups contradicts skip_server_warmup; leave one out"
    if arguments.served_model_name == ():
        yield "served_model_name must not be empty; leave it out for the default"
    soft = arguments.soft_watchdog_timeout
    if soft is not None and soft >= arguments.watchdog_timeout:
        yield (
            f"soft_watchdog_timeout {soft:g} must be less than watchdog_timeout, {arguments.watchdog_timeout:g}: an "
            "actor is killed then and no longer reported; lower it"
        )
    if arguments.disable_radix_cache:
        if arguments.schedule_policy == "lpm":
            yield "schedule_policy lpm needs the prefix cache; leave disable_radix_cache out, or use fcfs"
        if arguments.radix_eviction_policy != "lru":
            yield "radix_eviction_policy needs the prefix cache; leave disable_radix_cache out"
    texts = [name for name in _OF_TEXTS if getattr(arguments, name) != _DEFAULTS[name]]
    if arguments.skip_tokenizer_init and texts:
        yield f"skip_tokenizer_init loads no tokenizer; leave it out, or {', '.join(texts)}"


def _adapters(arguments: Arguments) -> Iterator[str]:
    """Adapters of --lora-paths that are wrong, and limits without adapters."""
    if not arguments.has_adapters:
        for name in ("max_lora_rank", "lora_target_modules", "max_loaded_loras"):
            if getattr(arguments, name) is not None:
                yield f"{name} needs enable_lora"
        for name, default in (("max_loras_per_batch", 8), ("lora_eviction_policy", "lru"), ("lora_backend", "auto")):
            if getattr(arguments, name) != default:
                yield f"{name} needs enable_lora"
        return
    if arguments.enable_deterministic_inference and arguments.lora_backend != "auto":
        yield (
            "lora_backend contradicts enable_deterministic_inference, which computes adapters by its own kernels; "
            "leave one out"
        )
    names: list[str] = []
    for word in arguments.lora_paths or ():
        try:
            names.append(adapter_path(word).name)
        except ArgumentError as error:
            yield f"lora_paths: {error}"
    for name in sorted({name for name in names if names.count(name) > 1 or name in arguments.model_names}):
        yield f"lora_paths: {name!r} is the name of another adapter or of the model; give each its own"
    most = arguments.max_loaded_loras
    if most is not None and most < len(names):
        yield f"max_loaded_loras {most} is less than the {len(names)} of lora_paths; raise it"
    if arguments.lora_eviction_policy != "lru" and most is None:
        yield "lora_eviction_policy needs max_loaded_loras"


_HOST_NAME = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?|[0-9A-Fa-f:.]+")
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s]+/?")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def _callers(arguments: Arguments) -> Iterator[str]:
    """Arguments about requests from browser pages."""
    for host in arguments.allowed_hosts:
        if not _HOST_NAME.fullmatch(host):
            yield f"allowed_hosts: {host!r} is not a host name; give it without scheme and port, such as llm.lan"
    for origin in arguments.allowed_origins:
        if not _ORIGIN.fullmatch(origin):
            yield (
                f"allowed_origins: {origin!r} is not an origin; give scheme, name and port, such as "
                "http://localhost:3000"
            )
    for field in ("allowed_methods", "allowed_headers"):
        for name in getattr(arguments, field):
            if not _TOKEN.fullmatch(name):
                yield f"{field}: {name!r} is not a name; separate names by spaces"
        if getattr(arguments, field) != ("*",) and not arguments.allowed_origins:
            yield f"{field} needs allowed_origins"
    if arguments.allow_credentials and (not arguments.allowed_origins or "*" in arguments.allowed_origins):
        yield "allow_credentials needs allowed_origins, each by name: any page could use the credentials otherwise"


_OF_PROMPTS = ("enable_piecewise_cuda_graph", "piecewise_cuda_graph_tokens", "piecewise_cuda_graph_max_tokens")
_ATTENTION = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
)
_GRAPHS = ("cuda_graph_bs", "cuda_graph_max_bs", "disable_cuda_graph_padding")
_EFFECTLESS = {
    "cpu": ("npu_simulator", *_ATTENTION, "base_gpu_id", "gpu_id_step", *_GRAPHS, *_OF_PROMPTS),
    "cuda": ("npu_simulator", *_ATTENTION, "cpu_threads", "cpu_isa"),
    "npu": (*_OF_PROMPTS, "cpu_threads", "cpu_isa"),
}
"""Arguments without effect on each device. Disabling graphs on a device without graphs is not an error."""
_LORA_BACKENDS = {"native": "cpu", "triton": "cuda", "csgmv": "cuda", "ascend": "npu"}
"""The device of each backend that runs on one kind of device."""


def without_effect(arguments: Arguments, device: str) -> dict[str, object]:
    """The set arguments that have no effect on ``device`` (cpu, npu or cuda), each with its default."""
    names = [*_EFFECTLESS[device]]
    if device != "npu":
        names += ["speculative_attention_mode", *(["sampling_backend"] * (arguments.sampling_backend == "ascend"))]
    if _LORA_BACKENDS.get(arguments.lora_backend, device) != device:
        names.append("lora_backend")
    return {name: _DEFAULTS[name] for name in names if getattr(arguments, name) != _DEFAULTS[name]}


def _rendezvous(arguments: Arguments) -> Iterator[str]:
    address, ranks = arguments.dist_init_addr, arguments.tensor_parallel_size * arguments.pipeline_parallel_size
    replicas = 1 if arguments.enable_dp_attention else arguments.data_parallel_size
    port = ""
    if address is not None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            yield f"dist_init_addr must be host:port, such as 127.0.0.1:29500, not {address!r}"
            return
    for name in ("nccl_port",) if arguments.nnodes > 1 else ("dist_init_addr", "nccl_port", "dist_timeout"):
        if getattr(arguments, name) is not None and ranks == 1:
            yield (
                f"{name} needs tensor_parallel_size or pipeline_parallel_size: a single worker has no "
                "rendezvous; leave it out"
            )
    for name in ("dist_init_addr", "nccl_port"):
        if getattr(arguments, name) is not None and replicas > 1 and arguments.nnodes == 1:
            yield f"{name} contradicts data_parallel_size: several replicas cannot share one rendezvous"
    if arguments.node_rank >= arguments.nnodes:
        yield f"node_rank {arguments.node_rank} must be less than nnodes {arguments.nnodes}; ranks begin at 0"
    if arguments.cluster is not None and (arguments.nnodes == 1 or arguments.node_rank):
        yield "cluster needs nnodes of at least 2, and no node_rank: Ray starts the other nodes"
    if arguments.nnodes == 1:
        if address is not None and arguments.nccl_port is not None:
            yield "nccl_port contradicts dist_init_addr: one node has one rendezvous; leave one out"
        return
    if address is None and arguments.cluster is None:
        yield "nnodes needs dist_init_addr, a host:port of node 0 that the other nodes connect to"
    elif address is not None and ranks > 1:
        first = arguments.nccl_port or int(port) + 1
        last = first + replicas - 1
        if first <= int(port) <= last:
            yield f"nccl_port must differ from the port {port} of dist_init_addr, which the other nodes connect to"
        if last > 65535:
            yield (
                f"nccl_port {first} leaves no port below 65536 for each of {replicas} replicas; give nccl_port "
                f"{65536 - replicas} or less"
            )
    if arguments.workers == 1:
        yield (
            "nnodes needs tensor_parallel_size, pipeline_parallel_size or data_parallel_size: a single worker runs on "
            "one node"
        )
    elif arguments.workers % arguments.nnodes:
        yield (
            f"nnodes {arguments.nnodes} must divide the number of workers, {arguments.workers}: each node runs an "
            "equal share"
        )


def _stated_sizes(arguments: Arguments) -> Iterator[str]:
    """Sizes that are options in other engines and follow from other sizes here."""
    whole, parts = arguments.tensor_parallel_size, arguments.data_parallel_size
    dense, why = whole, f"tensor_parallel_size is {whole}"
    if arguments.enable_dp_attention:
        dense, why = whole // parts, f"{why} and data_parallel_size {parts}, with enable_dp_attention"
    attention = (dense, why)
    if arguments.enable_nsa_prefill_context_parallel:
        attention = (1, "enable_nsa_prefill_context_parallel has whole attention weights on each device")
    for name, size, reason in (
        ("attn_tp_size", *attention),
        ("moe_dense_tp_size", dense, why),
        (
            "moe_tp_size",
            whole // arguments.expert_parts,
            f"tensor_parallel_size is {whole} and the experts have {arguments.expert_parts} parts",
        ),
        ("world_size", arguments.workers, f"there are {arguments.workers} workers over all ranks and replicas"),
        (
            "nprocs_per_node",
            arguments.node_workers,
            f"{arguments.workers} workers are divided over {arguments.nnodes} nodes",
        ),
    ):
        given = getattr(arguments, name)
        if name == "moe_dense_tp_size" and given == 1:
            continue  # whole on each device
        if given not in (None, size):
            yield f"{name} {given} must be {size}, since {reason}; leave it out, or change those sizes"
    for name in ("enable_dp_lm_head", "dp_sampling"):
        if getattr(arguments, name) and not arguments.enable_dp_attention:
            yield f"{name} needs enable_dp_attention: without it all ranks of a replica share its tokens"


def _devices(arguments: Arguments) -> Iterator[str]:
    device = arguments.device
    if device != "auto":  # with auto the same arguments may serve several machines: a warning suffices
        for name in without_effect(arguments, device):
            yield f"{name} contradicts device {device}, on which it has no effect; leave it out"
    if arguments.enable_deterministic_inference:
        for name in (*_ATTENTION, *(_GRAPHS if device == "npu" else ())):
            if getattr(arguments, name):
                yield f"{name} contradicts enable_deterministic_inference, where it has no effect; leave one out"
        if arguments.tensor_parallel_size > 1:
            yield (
                "enable_deterministic_inference needs tensor_parallel_size 1: the order of sums over ranks is not fixed"
            )
        for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
            if getattr(arguments, name) < 1:
                yield f"{name} below 1 contradicts enable_deterministic_inference: draft tokens could change outputs"
    if arguments.npu_simulator is not None:
        try:
            parse_simulation(arguments.npu_simulator)
        except SpecError as error:
            yield f"npu_simulator: {error}"
    yield from _rendezvous(arguments)
    yield from _stated_sizes(arguments)
    if arguments.tensor_parallel_size % arguments.expert_parallel_size:
        yield (
            f"expert_parallel_size {arguments.expert_parallel_size} must divide tensor_parallel_size "
            f"{arguments.tensor_parallel_size}"
        )
    if arguments.enable_expert_parallel and arguments.expert_parallel_size not in (1, arguments.tensor_parallel_size):
        yield "enable_expert_parallel contradicts expert_parallel_size: it divides experts over all devices"
    if arguments.enable_expert_parallel and arguments.tensor_parallel_size == 1:
        yield (
            "enable_expert_parallel needs tensor_parallel_size: one device has all experts; for experts divided over "
            "N replicas give tensor_parallel_size N, data_parallel_size N and enable_dp_attention"
        )
    yield from _expert_places(arguments)
    if arguments.pipeline_parallel_size == 1:
        for name, default in (("pp_max_micro_batch_size", None), ("pp_async_batch_depth", 0)):
            if getattr(arguments, name) != default:
                yield f"{name} needs pipeline_parallel_size: there are no stages; leave it out"
    if arguments.pipeline_parallel_size > 1:
        for name in ("expert_distribution_recorder_mode", "enable_return_routed_experts"):
            if getattr(arguments, name):
                yield (
                    f"{name} contradicts pipeline_parallel_size: only the last stage reports, and it knows only its "
                    "own layers; leave one out"
                )
        if arguments.speculative_adaptive:
            yield (
                "speculative_adaptive contradicts pipeline_parallel_size: it learns from the duration of steps, and in "
                "a pipeline several run at a time; leave one out"
            )
    if arguments.gpu_id_step != 1 and arguments.workers == 1:
        yield (
            "gpu_id_step needs tensor_parallel_size, pipeline_parallel_size or data_parallel_size: there is one "
            "device; use base_gpu_id to choose it"
        )
    if arguments.enable_two_batch_overlap:
        if arguments.tensor_parallel_size == 1:
            yield "enable_two_batch_overlap needs tensor_parallel_size: one device waits for no other"
        for name in ("pipeline_parallel_size", "enable_dp_attention", "enable_lora", "lora_paths", _CONTEXT):
            if getattr(arguments, name) != _DEFAULTS[name]:
                yield f"enable_two_batch_overlap contradicts {name}; leave one out"
        yield from _short_steps(arguments, "enable_two_batch_overlap", TWO_BATCH_TOKENS)
    elif arguments.tbo_token_distribution_threshold != _DEFAULTS["tbo_token_distribution_threshold"]:
        yield "tbo_token_distribution_threshold needs enable_two_batch_overlap"
    if arguments.enable_dp_attention:
        size, parts = arguments.tensor_parallel_size, arguments.data_parallel_size
        if parts == 1:
            yield "enable_dp_attention needs data_parallel_size: the parts that attention is divided into"
        elif size % parts:
            yield f"enable_dp_attention needs a data_parallel_size that divides tensor_parallel_size, {size}"
        if arguments.pipeline_parallel_size > 1:
            yield "enable_dp_attention contradicts pipeline_parallel_size; leave one out"
    yield from _expert_exchange(arguments)
    if arguments.enable_nsa_prefill_context_parallel:
        yield from _context_parallel(arguments)
    if arguments.prefill_round_robin_balance and arguments.load_balance_method not in ("round_robin", "cache_aware"):
        yield "prefill_round_robin_balance contradicts load_balance_method; leave one out"
    if arguments.cuda_graph_bs and arguments.cuda_graph_max_bs is not None:
        yield "cuda_graph_bs lists all sizes; leave cuda_graph_max_bs out"
    if arguments.piecewise_cuda_graph_tokens and arguments.piecewise_cuda_graph_max_tokens is not None:
        yield "piecewise_cuda_graph_tokens lists all sizes; leave piecewise_cuda_graph_max_tokens out"
    if arguments.disable_cuda_graph:
        for name in ("cuda_graph_bs", "cuda_graph_max_bs", "disable_cuda_graph_padding"):
            if getattr(arguments, name):
                yield f"{name} contradicts disable_cuda_graph; leave one out"
    for name in _OF_PROMPTS:
        for other in ("disable_piecewise_cuda_graph", "disable_cuda_graph", "disable_cuda_graph_padding"):
            if getattr(arguments, name) and getattr(arguments, other):
                yield f"{name} contradicts {other}; leave one out"
    yield from _cache(arguments)


def _expert_exchange(arguments: Arguments) -> Iterator[str]:
    size, parts = arguments.tensor_parallel_size, arguments.expert_parallel_size
    if arguments.moe_a2a_backend == "none":
        for name in ("deepep_mode", "enable_single_batch_overlap"):
            if getattr(arguments, name) != _DEFAULTS[name]:
                yield f"{name} needs moe_a2a_backend deepep: without it no tokens travel to their experts"
        return
    if not arguments.enable_dp_attention:
        yield "moe_a2a_backend needs enable_dp_attention: without it every device has all tokens already"
    if parts not in (1, size):
        yield (
            f"moe_a2a_backend contradicts expert_parallel_size {parts}: it divides experts over all {size} devices of "
            "tensor_parallel_size; leave expert_parallel_size out"
        )
    if arguments.moe_a2a_backend != "deepep" and arguments.deepep_mode not in ("auto", arguments.exchange_mode):
        yield f"moe_a2a_backend {arguments.moe_a2a_backend} contradicts deepep_mode; leave one out"


_CONTEXT = "enable_nsa_prefill_context_parallel"


def _short_steps(arguments: Arguments, name: str, least: int) -> Iterator[str]:
    """A problem if ``name`` has no effect because no step has the ``least`` tokens from which steps are divided."""
    chunk = arguments.chunked_prefill_size
    if chunk is not None and chunk > 0 and max(chunk, arguments.max_running_requests) < least:
        yield (
            f"{name} contradicts chunked_prefill_size {chunk}: only steps of {least} or more tokens are divided; raise "
            "chunked_prefill_size, or leave one out"
        )


def _context_parallel(arguments: Arguments) -> Iterator[str]:
    name = _CONTEXT
    yield from _short_steps(arguments, name, CONTEXT_PARALLEL_TOKENS)
    if arguments.tensor_parallel_size == 1:
        yield f"{name} needs tensor_parallel_size: the devices that divide a prompt"
    others = {
        "enable_dp_attention": arguments.enable_dp_attention,
        "pipeline_parallel_size": arguments.pipeline_parallel_size > 1,
        "speculative_algorithm EAGLE3 and DFLASH, whose drafts read hidden states between layers": (
            arguments.speculative_algorithm in ("EAGLE3", "DFLASH")
        ),
    }
    for other, given in others.items():
        if given:
            yield f"{name} contradicts {other}; leave one out"


_OF_EPLB = (
    "eplb_algorithm",
    "eplb_rebalance_num_iterations",
    "eplb_rebalance_layers_per_chunk",
    "eplb_min_rebalancing_utilization_threshold",
)


def _expert_places(arguments: Arguments) -> Iterator[str]:
    names = "ep_num_redundant_experts", "init_expert_location", "enable_eplb"
    moved = [name for name in names if getattr(arguments, name) != _DEFAULTS[name]]
    if arguments.init_expert_location.endswith((".pt", ".pth", ".pkl")):
        yield (
            "init_expert_location: pickled files can run code, so they are refused; write physical_to_logical_map or "
            "logical_count as JSON"
        )
    if arguments.ep_dispatch_algorithm is not None and not arguments.ep_num_redundant_experts:
        yield "ep_dispatch_algorithm needs ep_num_redundant_experts: without it experts have no copies"
    if not arguments.enable_eplb:
        for name in _OF_EPLB:
            if getattr(arguments, name) != _DEFAULTS[name]:
                yield f"{name} needs enable_eplb"
    for name in moved:
        if arguments.expert_parts == 1:
            yield f"{name} needs expert_parallel_size: without it every device has all experts"
        if arguments.pipeline_parallel_size > 1:
            yield f"{name} contradicts pipeline_parallel_size; leave one out"


def _cache(arguments: Arguments) -> Iterator[str]:
    dtype, method = arguments.kv_cache_dtype, arguments.kv_cache_quant_method
    scaled = dtype in ("int8", "fp8_e4m3", "fp8_e5m2")
    if dtype in ("fp8_e4m3", "fp8_e5m2") and arguments.device == "npu":
        yield f"kv_cache_dtype {dtype}: NPUs have no operators for it; use int8"
    if method == "per_token_head" and not scaled:
        yield "kv_cache_quant_method per_token_head needs kv_cache_dtype int8, fp8_e4m3 or fp8_e5m2; give one"
    if arguments.quantization_param_path is not None:
        if not scaled:
            yield (
                "quantization_param_path needs kv_cache_dtype int8, fp8_e4m3 or fp8_e5m2, the dtype of the file's "
                "scales"
            )
        if method == "per_token_head":
            yield "quantization_param_path and kv_cache_quant_method per_token_head exclude each other; leave one out"


def _shapes(arguments: Arguments) -> Iterator[str]:
    page_size = arguments.page_size
    if page_size is not None and arguments.max_total_tokens is not None and arguments.max_total_tokens < page_size:
        yield f"max_total_tokens is less than one page; use at least page_size, {page_size}"
    root = arguments.fastapi_root_path
    if root and (not root.startswith("/") or root.endswith("/")):
        yield f"fastapi_root_path must begin with a slash and not end with one, such as /llm, not {root!r}"


def _metrics(arguments: Arguments) -> Iterator[str]:
    rules = {
        "prompt_tokens_buckets": arguments.prompt_tokens_buckets,
        "generation_tokens_buckets": arguments.generation_tokens_buckets,
    }
    chosen: dict[str, object] = {
        "metrics_names": arguments.metrics_names,
        "bucket_time_to_first_token": arguments.bucket_time_to_first_token,
        "bucket_inter_token_latency": arguments.bucket_inter_token_latency,
        "bucket_e2e_request_latency": arguments.bucket_e2e_request_latency,
        "collect_tokens_histogram": arguments.collect_tokens_histogram,
        "tokenizer_metrics_allowed_custom_labels": arguments.tokenizer_metrics_allowed_custom_labels,
        **rules,
    }
    if not arguments.enable_metrics:
        for name, value in chosen.items():
            if value:
                yield f"{name} needs enable_metrics; leave one out"
    for name, value in chosen.items():
        if name.startswith("bucket_") and isinstance(value, tuple) and list(value) != sorted(set(value)):
            yield f"{name} must ascend, each bound once"
    for name, rule in rules.items():
        try:
            token_buckets(rule)
        except ValueError as error:
            yield f"{name} {error}"
        if rule and not arguments.collect_tokens_histogram and "vllm" not in arguments.metrics_names:
            yield f"{name} needs collect_tokens_histogram"
    labels = arguments.tokenizer_metrics_allowed_custom_labels
    if arguments.tokenizer_metrics_custom_labels_header != "x-custom-labels" and not labels:
        yield "tokenizer_metrics_custom_labels_header needs tokenizer_metrics_allowed_custom_labels"
    if len(set(labels)) != len(labels) or len(labels) > _MAX_LABELS:
        yield f"tokenizer_metrics_allowed_custom_labels: list each label once, and at most {_MAX_LABELS}"
    for label in labels:
        if not _LABEL.fullmatch(label) or label in _TAKEN_LABELS:
            yield (
                f"tokenizer_metrics_allowed_custom_labels: {label[:64]!r} is not a valid custom label; use letters, "
                "digits and underscores, such as team"
            )
    if arguments.export_metrics_to_file != (arguments.export_metrics_to_file_dir is not None):
        yield "export_metrics_to_file and export_metrics_to_file_dir need each other"


def _preferred(arguments: Arguments) -> Iterator[str]:
    for name, value in arguments.preferred_sampling_params.items():
        if name not in _PREFERRED:
            yield f"preferred_sampling_params: {name} cannot be set; only {', '.join(_PREFERRED)} can"
            continue
        try:
            _PREFERRED[name].check(value)
        except ArgumentError as error:
            yield f"preferred_sampling_params: {name} {error}"
