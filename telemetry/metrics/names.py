"""Every metric of an engine: name, type, labels and meaning. Dashboards and rules are written against this table; the
other modules of this package fill it.

Units are in the names (seconds, bytes, tokens). Label values are bounded: actors, messages and phases by the program;
values that clients choose (error types, custom labels, fields) by a limit, beyond which they become ``other``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["GEN_AI_LABELS", "METRICS", "PROVIDER", "MetricKind", "MetricSpec"]

MetricKind = Literal["counter", "gauge", "histogram"]

PROVIDER = "troupe"
"""The value of ``gen_ai.provider.name``."""

GEN_AI_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
"""OpenTelemetry's GenAI attributes that every ``gen_ai_server_*`` metric has (semantic conventions, GenAI metrics)."""


class MetricSpec(msgspec.Struct, frozen=True):
    """``name`` is the full name: a counter's ends in ``_total``."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()


def _counter(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "gauge", text, labels)


def _histogram(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "histogram", text, labels)


_REQUESTS = (
    _histogram(
        "gen_ai_server_request_duration_seconds",
        "Duration of a request; error_type is empty when it ended well.",
        *GEN_AI_LABELS,
        "error_type",
    ),
    _histogram(
        "gen_ai_server_time_to_first_token_seconds",
        "From the arrival of a request to its first token.",
        *GEN_AI_LABELS,
    ),
    _histogram(
        "gen_ai_server_time_per_output_token_seconds",
        "Mean time between the tokens of a request after its first.",
        *GEN_AI_LABELS,
    ),
    _histogram(
        "troupe_inter_token_latency_seconds",
        "Time between two tokens of a sequence, from the results of two steps, counted for each decoded token.",
    ),
    _histogram("troupe_request_tokenize_seconds", "Rendering and encoding of a prompt, including the wait."),
    _histogram("troupe_request_queue_seconds", "Time of a sequence in the queue, until its first step."),
    _histogram("troupe_request_prefill_seconds", "From a sequence's first step to its first token."),
    _histogram("troupe_request_decode_seconds", "From a sequence's first token to its last."),
    _gauge("troupe_requests_live", "Requests between their admission and their end."),
    _counter("troupe_requests_total", "Ended requests: stop, length, abort, error, rejected.", "finish_reason"),
    _counter("troupe_tokens_total", "Tokens of ended requests: input, output.", "gen_ai_token_type"),
    _counter("troupe_cached_tokens_total", "Input tokens of ended requests found in the prefix cache."),
    _histogram("troupe_input_tokens", "Prompt tokens of a request (with --collect-tokens-histogram)."),
    _histogram("troupe_output_tokens", "Generated tokens of a request (with --collect-tokens-histogram)."),
    _counter("troupe_stream_errors_total", "Requests that failed after their first token.", "error_type"),
    _counter("troupe_client_disconnects_total", "Clients that disconnected, by the stage of their request.", "stage"),
    _counter("troupe_sse_keepalives_total", "Keep-alive comments sent to idle streams."),
    _histogram("troupe_slow_reader_seconds", "Waits of 0.1 s and more for a client to read its response."),
    _counter("troupe_http_requests_total", "HTTP requests answered.", "endpoint", "status"),
    _counter("troupe_unknown_fields_total", "Unknown fields of requests.", "field"),
)

_SCHEDULING = (
    _gauge("troupe_requests_running", "Sequences with a slot on the device."),
    _gauge("troupe_requests_waiting", "Sequences in the queue."),
    _gauge("troupe_waiting_tokens", "Prompt tokens in the queue."),
    _counter("troupe_preemptions_total", "Sequences that released their pages and are recomputed."),
    _gauge("troupe_steps_in_flight", "Steps without a result yet."),
    _gauge("troupe_step_age_seconds", "Age of the oldest step without a result."),
    _counter("troupe_steps_total", "Steps with a result."),
    _histogram("troupe_step_seconds", "From sending a step to its result."),
    _histogram("troupe_step_rows", "Sequences in a step."),
    _counter("troupe_step_tokens_total", "Tokens run by steps: prefill, decode.", "mode"),
    _counter("troupe_step_rows_total", "Rows of steps by execution: graph, eager, two_batches.", "execution"),
    _counter("troupe_step_phase_seconds_total", "Seconds of the worker by phase: queued, prepare, run.", "phase"),
    _counter("troupe_generated_tokens_total", "Sampled tokens."),
    _counter("troupe_pipeline_seconds_total", "Seconds in which a pipeline had a step in flight.", "replica"),
    _counter(
        "troupe_pipeline_stage_seconds_total",
        "Seconds in which a worker of the pipeline computed. Not on asynchronous devices (GPUs).",
        "replica",
        "worker",
    ),
)

_SPECULATION = (
    _counter(
        "troupe_speculative_drafts_total", "Drafts verified: the draft tokens of one sequence in one step.", "algorithm"
    ),
    _counter("troupe_speculative_draft_tokens_total", "Draft tokens verified.", "algorithm"),
    _counter("troupe_speculative_accepted_tokens_total", "Draft tokens accepted.", "algorithm"),
    _counter(
        "troupe_speculative_accepted_at_position_total",
        "Drafts whose token at this position, from 0, was accepted.",
        "algorithm",
        "position",
    ),
    _counter("troupe_speculative_draft_seconds_total", "Seconds of the worker for drafting.", "algorithm"),
)

_ADMISSION = (
    _gauge("troupe_ready", "1 when requests are admitted."),
    _gauge("troupe_admitted_sequences", "Admitted sequences, waiting and running."),
    _gauge("troupe_admitted_tokens", "Prompt tokens of admitted requests."),
    _counter("troupe_admission_rejections_total", "Requests refused at admission: sequences, tokens.", "reason"),
    _histogram("troupe_admission_retry_after_seconds", "The Retry-After of refused requests."),
    _counter("troupe_trace_spans_total", "Spans of traces by outcome: exported, dropped.", "outcome"),
)

_EXPERTS = (
    _gauge(
        "troupe_expert_balancedness",
        "Mean of the tokens of a layer's experts, divided by their maximum, in the recorded steps "
        "(with --enable-expert-distribution-metrics).",
        "layer",
    ),
    _gauge("troupe_expert_recorded_steps", "Steps in the record of expert distribution."),
    _counter(
        "troupe_expert_rebalances_total",
        "Rebalances of --enable-eplb, including those that kept the placement.",
        "replica",
    ),
    _counter("troupe_expert_moves_total", "Physical experts that --enable-eplb replaced.", "replica"),
    _gauge(
        "troupe_expert_rank_utilization",
        "Mean of the ranks' tokens divided by their maximum, before the last rebalance of experts.",
        "replica",
    ),
    _gauge("troupe_expert_move_seconds", "Longest wait of one step in the last rebalance of experts.", "replica"),
)

_ADAPTERS = (
    _gauge("troupe_adapters_loaded", "LoRA adapters that requests may name."),
    _gauge("troupe_adapter_slots", "Adapter slots on the devices of all replicas."),
    _gauge("troupe_adapter_slots_used", "Occupied adapter slots on the devices of all replicas."),
    _gauge(
        "troupe_adapter_requests",
        "Live requests of an adapter by state: running, waiting. The first 100 names are kept; later ones are other.",
        "adapter",
        "state",
    ),
)

_CACHE = (
    _gauge("troupe_cache_pages", "Pages of the key-value cache; of several cache groups, those of the main one."),
    _gauge("troupe_cache_pages_free", "Empty pages."),
    _gauge("troupe_cache_pages_evictable", "Pages of cached prefixes that are not in use."),
    _gauge("troupe_cache_pages_used", "Pages of running sequences."),
    _gauge("troupe_cache_page_tokens", "Tokens of a page."),
    _counter("troupe_cache_hit_tokens_total", "Prompt tokens found in the prefix cache."),
    _counter("troupe_cache_queried_tokens_total", "Prompt tokens looked up in the prefix cache."),
    _counter("troupe_cache_evicted_pages_total", "Pages evicted from the prefix cache."),
    _gauge(
        "troupe_cache_group_pages",
        "Pages by cache group and state (free, evictable, used), of models with several groups: main, window, state.",
        "group",
        "state",
    ),
    _counter("troupe_cache_group_evicted_pages_total", "Evicted pages by cache group.", "group"),
)

_RUNTIME = (
    _gauge("troupe_mailbox_depth", "Messages in a mailbox by lane: data, control, replies.", "actor", "lane"),
    _histogram("troupe_mailbox_wait_seconds", "Wait of a message in its mailbox.", "actor", "message"),
    _histogram(
        "troupe_handler_seconds", "Handling time of a message; for a step, until its result.", "actor", "message"
    ),
    _counter("troupe_handler_errors_total", "Messages answered with an error.", "actor", "message"),
    _counter("troupe_ask_timeouts_total", "Asks without a reply in time.", "actor", "message"),
    _counter("troupe_dead_letters_total", "Undeliverable messages.", "actor", "message", "reason"),
    _counter("troupe_restarts_total", "Restarts of actors by their cause.", "actor", "cause"),
    _gauge("troupe_actor_up", "1 while the actor runs.", "actor"),
    _gauge(
        "troupe_heartbeat_age_seconds",
        "Child process: time since its last heartbeat. Actor in the loop: age of the message in work, 0 without one.",
        "actor",
    ),
    _histogram("troupe_loop_lag_seconds", "Delay of the event loop beyond the requested sleep."),
    _histogram("troupe_recovery_seconds", "From the crash of an actor to its restart.", "actor"),
    _counter("troupe_requests_resumed_total", "Sequences resumed after a worker's crash or a preemption."),
    _counter(
        "troupe_requests_quarantined_total", "Requests not run again because they killed their worker repeatedly."
    ),
    _histogram("troupe_stream_gap_seconds", "From a worker's crash to the next token of a sequence it ran."),
)

_PROCESS = (
    _gauge("troupe_process_resident_memory_bytes", "Resident memory (Linux).", "process"),
    _gauge("troupe_process_open_fds", "Open file descriptors (Linux).", "process"),
    _gauge("troupe_process_threads", "Threads (Linux).", "process"),
    _counter("troupe_process_cpu_seconds_total", "User and system time (Linux).", "process"),
    _gauge("troupe_tasks", "Tasks of the event loop."),
    _gauge("troupe_start_seconds", "Loading by phase of the worker, and in total until ready.", "phase"),
    _gauge(
        "troupe_model_info",
        "1; the labels describe the served model.",
        "model",
        "architecture",
        "dtype",
        "cache_dtype",
        "device",
        "version",
    ),
    _gauge("troupe_context_tokens", "Tokens a sequence may have."),
    _gauge("troupe_max_running_requests", "Sequences that may run at once."),
    _gauge("troupe_weight_bytes", "Bytes of the model's weights on all devices that run it together."),
    _gauge("troupe_cache_bytes", "Bytes of the key-value cache on all devices that run the model together."),
)

METRICS: dict[str, MetricSpec] = {
    spec.name: spec
    for spec in (
        *_REQUESTS,
        *_SCHEDULING,
        *_SPECULATION,
        *_ADMISSION,
        *_EXPERTS,
        *_ADAPTERS,
        *_CACHE,
        *_RUNTIME,
        *_PROCESS,
    )
}
"""By name, in order of the exposition."""
