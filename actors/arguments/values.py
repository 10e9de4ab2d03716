"""The values of all arguments: what the engine and the server read."""

from __future__ import annotations

from typing import Any, Literal, Self

import msgspec

from actors.arguments.consistency import contradictions
from actors.arguments.errors import ArgumentError
from actors.arguments.keys import with_keys
from actors.arguments.resolving import Given, resolve
from actors.arguments.table import ARGUMENTS

__all__ = ["Arguments"]


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """Every argument's value. Field names are the long names with underscores; help, units and bounds are in the table.

    A value that is out of bounds, or contradicts another, raises ArgumentError wherever the struct is made. Use
    :meth:`from_keywords` for values and names as users write them.
    """

    model_path: str | None = None
    tokenizer_path: str | None = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    tokenizer_worker_num: int = 1
    skip_tokenizer_init: bool = False
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    context_length: int | None = None
    revision: str | None = None
    download_dir: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    json_model_override_args: dict[str, Any] = {}
    preferred_sampling_params: dict[str, Any] = {}

    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    fastapi_root_path: str = ""
    disable_page: bool = False
    skip_server_warmup: bool = False
    warmups: tuple[Literal["generate", "long-prompt", "batch"], ...] = ("generate",)
    sse_keep_alive_interval: float = 15.0
    shutdown_timeout: float = 30.0
    request_timeout: float | None = None

    api_key: str | None = None
    api_key_file: str | None = None
    admin_api_key: str | None = None
    admin_api_key_file: str | None = None
    served_model_name: tuple[str, ...] | None = None
    weight_version: str = "default"
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    completion_template: str | None = None
    enable_cache_report: bool = False
    sampling_defaults: Literal["model", "openai"] = "model"
    tool_call_parser: Literal["hermes", "off"] | None = None
    stream_interval: int = 1
    stream_output: bool = False

    log_level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    log_level_http: Literal["debug", "info", "warning", "error", "critical"] | None = None
    log_format: Literal["text", "json"] = "text"
    access_log_exclude_prefixes: tuple[str, ...] = ()
    log_requests: bool = False
    log_requests_level: int = 2
    log_requests_format: Literal["text", "json"] | None = None
    config: str | None = None

    enable_trace: bool = False
    oltp_traces_endpoint: str | None = None
    otlp_traces_protocol: Literal["grpc", "http/protobuf"] | None = None
    trace_sample_ratio: float | None = None
    ignore_client_traceparent: bool = False
    trace_level: int = 1

    enable_metrics: bool = True
    metrics_names: tuple[Literal["sglang", "vllm"], ...] = ()
    bucket_time_to_first_token: tuple[float, ...] | None = None
    bucket_inter_token_latency: tuple[float, ...] | None = None
    bucket_e2e_request_latency: tuple[float, ...] | None = None
    collect_tokens_histogram: bool = False
    prompt_tokens_buckets: tuple[str, ...] = ()
    generation_tokens_buckets: tuple[str, ...] = ()
    tokenizer_metrics_custom_labels_header: str = "x-custom-labels"
    tokenizer_metrics_allowed_custom_labels: tuple[str, ...] = ()
    export_metrics_to_file: bool = False
    export_metrics_to_file_dir: str | None = None
    decode_log_interval: int = 0
    enable_request_time_stats_logging: bool = False
    gc_warning_threshold_secs: float = 0.0

    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    page_size: int | None = None
    max_running_requests: int = 256
    max_queued_requests: int = 2048
    max_queued_tokens: int | None = None
    prefill_max_requests: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int = 16384
    schedule_policy: Literal["lpm", "fcfs"] = "fcfs"
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    priority_scheduling_preemption_threshold: int = 10
    abort_on_priority_when_disabled: bool = False
    schedule_conservativeness: float = 1.0
    disable_radix_cache: bool = False
    radix_eviction_policy: Literal["lru", "lfu"] = "lru"
    disable_overlap_schedule: bool = False

    enable_dynamic_batch_tokenizer: bool = False
    dynamic_batch_tokenizer_batch_size: int = 32
    dynamic_batch_tokenizer_batch_timeout: float = 0.002
    enable_tokenizer_batch_encode: bool = True
    allow_auto_truncate: bool = False

    cpu_threads: int | None = None
    random_seed: int | None = None

    device: Literal["auto", "cpu", "npu", "cuda"] = "auto"
    cpu_isa: Literal["auto", "amx", "avx512", "avx2", "torch"] | None = None
    base_gpu_id: int = 0
    gpu_id_step: int = 1
    watchdog_timeout: float = 300.0
    soft_watchdog_timeout: float | None = None
    model_load_timeout: float = 1800.0
    max_worker_restarts: int = 6
    standby_worker: bool = True
    tensor_parallel_size: int = 1
    dist_init_addr: str | None = None
    npu_simulator: str | None = None
    attention_backend: Literal["ascend", "torch_native"] | None = None
    prefill_attention_backend: Literal["ascend", "torch_native"] | None = None
    decode_attention_backend: Literal["ascend", "torch_native"] | None = None
    sampling_backend: Literal["pytorch", "ascend"] | None = None
    disable_cuda_graph: bool = False
    cuda_graph_bs: tuple[int, ...] | None = None
    cuda_graph_max_bs: int | None = None
    disable_cuda_graph_padding: bool = False
    piecewise_cuda_graph_tokens: tuple[int, ...] | None = None
    piecewise_cuda_graph_max_tokens: int | None = None
    enable_piecewise_cuda_graph: bool = False
    disable_piecewise_cuda_graph: bool = False
    enable_deterministic_inference: bool = False
    quantization: (
        Literal["int8", "fp8", "unquant", "awq", "gptq", "auto-round", "compressed-tensors", "modelslim", "gguf"] | None
    ) = None
    kv_cache_dtype: Literal["auto", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    kv_cache_quant_method: Literal["auto", "none", "per_token_head"] = "auto"
    quantization_param_path: str | None = None
    enable_fp32_lm_head: bool = False
    speculative_draft_model_quantization: (
        Literal["int8", "fp8", "unquant", "awq", "gptq", "auto-round", "compressed-tensors", "modelslim", "gguf"] | None
    ) = None

    speculative_config: dict[str, Any] = {}
    speculative_algorithm: Literal["EAGLE", "EAGLE3", "MTP", "DFLASH", "STANDALONE", "NGRAM"] | None = None
    speculative_draft_model_path: str | None = None
    speculative_draft_model_revision: str | None = None
    speculative_draft_load_format: Literal["auto", "safetensors", "dummy"] | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_dflash_block_size: int | None = None
    speculative_dflash_draft_window_size: int | None = None
    speculative_accept_threshold_single: float = 1.0
    speculative_accept_threshold_acc: float = 1.0
    speculative_token_map: str | None = None
    speculative_attention_mode: Literal["prefill", "decode"] = "prefill"
    speculative_draft_attention_backend: Literal["ascend", "torch_native"] | None = None
    eagle3_layers_to_capture: tuple[int, ...] | None = None
    enable_multi_layer_eagle: bool = False
    speculative_adaptive: bool = False
    speculative_adaptive_config: str | None = None
    speculative_ngram_min_match_window_size: int = 1
    speculative_ngram_max_match_window_size: int = 12
    speculative_ngram_min_bfs_breadth: int = 1
    speculative_ngram_max_bfs_breadth: int = 10
    speculative_ngram_match_type: Literal["BFS", "PROB"] = "BFS"
    speculative_ngram_max_trie_depth: int = 18
    speculative_ngram_capacity: int = 10_000_000

    def __post_init__(self) -> None:
        problems = []
        for argument in ARGUMENTS:
            try:
                argument.check(getattr(self, argument.field))
            except ArgumentError as error:
                problems.append(f"{argument.field}: {error}")
        if problems or (problems := contradictions(self)):
            raise ArgumentError(problems)

    @classmethod
    def from_keywords(cls, **keywords: object) -> Self:
        """Arguments from Python values by any of their names, as in ``Engine(model=..., max_num_seqs=64)``.

        Raises ArgumentError for an unknown name (with the nearest known one), a feature that is not built, a value out
        of bounds, and two names of one argument with different values.
        """
        layer = [Given(name=name, value=value, spelling=name) for name, value in keywords.items()]
        if keywords.get("config") is not None:
            raise ArgumentError("config: a file is read by the command line only; give its arguments as keywords")
        return cls(**with_keys(resolve([layer]), {}))

    @property
    def model_name(self) -> str:
        """The model's first name in the API; empty when neither a name nor a model was given."""
        return self.model_names[0] if self.model_names else ""

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's names in the API, each once; those of a GGUF file come from the file."""
        if self.served_model_name:
            return tuple(dict.fromkeys(self.served_model_name))
        return (self.model_path,) if self.model_path else ()

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys of clients, each once."""
        keys = (key.strip() for key in (self.api_key or "").split(","))
        return tuple(dict.fromkeys(key for key in keys if key))

    @property
    def stall_seconds(self) -> float:
        """``soft_watchdog_timeout``, or what suits the other watchdog."""
        given = self.soft_watchdog_timeout
        return min(60.0, self.watchdog_timeout / 5) if given is None else given

    def describe(self) -> dict[str, Any]:
        """Every value by field name, as JSON-ready types, the keys of the API hidden: for ``/server_info`` and logs."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        for argument in ARGUMENTS:
            if argument.secret and values[argument.field] is not None:
                values[argument.field] = "***"
        return values

    def __repr__(self) -> str:
        changed = {
            argument.field: "***" if argument.secret else getattr(self, argument.field)
            for argument in ARGUMENTS
            if getattr(self, argument.field) != argument.default
        }
        return f"Arguments({', '.join(f'{field}={value!r}' for field, value in changed.items())})"
