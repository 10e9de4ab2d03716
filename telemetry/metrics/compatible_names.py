"""Metrics under the names of SGLang and vLLM, so that existing boards work (``--metrics-names``).

Types, labels, units and buckets are theirs; the numbers come from Troupe's metrics. A latency is measured once and
added to both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from telemetry.metrics.exposition import Exposition, Readings, Samples
from telemetry.metrics.histogram import Histogram
from telemetry.metrics.names import MetricSpec
from telemetry.metrics.options import ForeignNames, MetricOptions
from telemetry.metrics.requests import RequestMetrics
from telemetry.metrics.steps import StepMetrics

__all__ = ["foreign_exposition"]

_Own: TypeAlias = Mapping[str, Samples]
_Of: TypeAlias = Callable[[_Own], Samples | None]


class _Table(dict[str, tuple[MetricSpec, _Of]]):
    """Metrics under the names of ``engine``, and their source in Troupe's metrics."""

    def __init__(self, engine: str) -> None:
        super().__init__()
        self._engine = engine

    def gauge(self, name: str, text: str, of: _Of) -> None:
        self[f"{self._engine}:{name}"] = MetricSpec(f"{self._engine}:{name}", "gauge", text), of

    def counter(self, name: str, text: str, of: _Of, *labels: str) -> None:
        self[f"{self._engine}:{name}"] = MetricSpec(f"{self._engine}:{name}", "counter", text, labels), of


def _number(own: _Own, name: str) -> float:
    value = own.get(name, 0.0)
    return value if isinstance(value, int | float) else 0.0


def _value(name: str) -> Callable[[_Own], Samples | None]:
    """Troupe's own metric of this name, unchanged."""
    return lambda own: own.get(name)


def _labelled(name: str, *keys: tuple[str, ...]) -> Callable[[_Own], float]:
    """The sum of a metric's samples whose first label is one of ``keys``; without keys of all samples."""

    def total(own: _Own) -> float:
        samples = own.get(name)
        if not isinstance(samples, Mapping):
            return 0.0
        chosen = [
            value for labels, value in list(samples.items()) if not keys or any(labels[: len(k)] == k for k in keys)
        ]
        return float(sum(value for value in chosen if not isinstance(value, Histogram)))

    return total


def _share(part: str, whole: str) -> Callable[[_Own], float]:
    return lambda own: _number(own, part) / max(_number(own, whole), 1.0)


def _tokens(*pages: str) -> Callable[[_Own], float]:
    """Pages in tokens."""
    return lambda own: sum(_number(own, name) for name in pages) * _number(own, "troupe_cache_page_tokens")


class _Recent:
    """The change of a counter for each unit of another one, since a reading at least a second ago."""

    def __init__(self, counter: str, per: str | None = None) -> None:
        self._counter, self._per = counter, per
        self._before: tuple[float, float, float] | None = None
        self._rate = 0.0

    def __call__(self, own: _Own) -> float:
        now, count = time.monotonic(), _number(own, self._counter)
        per = now if self._per is None else _number(own, self._per)
        if self._before is None:
            self._before = (now, count, per)
        elif now - self._before[0] >= 1.0:
            _, count_before, per_before = self._before
            self._rate = (count - count_before) / (per - per_before) if per > per_before else 0.0
            self._before = (now, count, per)
        return self._rate


def _optional(name: str) -> Callable[[_Own], Samples | None]:
    """The metrics that an engine without speculation, or without adapters, does not have."""
    return lambda own: own.get(name)


def _adapting(of: Callable[[_Own], float]) -> Callable[[_Own], Samples | None]:
    return lambda own: of(own) if "troupe_adapter_slots" in own else None


def _speculating(of: Callable[[_Own], float]) -> Callable[[_Own], Samples | None]:
    return lambda own: of(own) if "speculative_drafts" in own else None


def _lengths(accepted: Callable[[_Own], float]) -> Callable[[_Own], Samples | None]:
    """Includes the token that is sampled in any case."""
    return _speculating(lambda own: 1 + accepted(own))


# -- vLLM --------------------------------------------------------------------------------------------------------------

_VLLM_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_VLLM_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_VLLM_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_VLLM_TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
_VLLM_STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))

_VLLM_HISTOGRAMS: dict[str, tuple[str, str, Sequence[float]]] = {
    "vllm:time_to_first_token_seconds": ("first_token", "Time to first token.", _VLLM_FIRST_TOKEN),
    "vllm:inter_token_latency_seconds": ("inter_token", "Time between tokens.", _VLLM_PER_TOKEN),
    "vllm:request_time_per_output_token_seconds": ("per_token", "Mean time per output token.", _VLLM_PER_TOKEN),
    "vllm:e2e_request_latency_seconds": ("duration", "Duration of a request.", _VLLM_LATENCY),
    "vllm:request_queue_time_seconds": ("queue", "Time in the queue.", _VLLM_LATENCY),
    "vllm:request_prefill_time_seconds": ("prefill", "Time of the prefill.", _VLLM_LATENCY),
    "vllm:request_decode_time_seconds": ("decode", "Time of the decode.", _VLLM_LATENCY),
    "vllm:request_inference_time_seconds": ("inference", "Time of prefill and decode.", _VLLM_LATENCY),
    "vllm:request_prompt_tokens": ("input_tokens", "Prompt tokens of a request.", _VLLM_TOKENS),
    "vllm:request_generation_tokens": ("output_tokens", "Generated tokens of a request.", _VLLM_TOKENS),
    "vllm:request_max_num_generation_tokens": ("longest", "Tokens of a request's longest choice.", _VLLM_TOKENS),
    "vllm:request_params_n": ("choices", "Choices that a request asks for.", (1.0, 2.0, 5.0, 10.0, 20.0)),
    "vllm:request_params_max_tokens": ("max_tokens", "The max_tokens of a request.", _VLLM_TOKENS),
    "vllm:iteration_tokens_total": ("step_tokens", "Tokens of a step.", _VLLM_STEP_TOKENS),
}


def _finished(own: _Own) -> Samples | None:
    total = {reason: _labelled("troupe_requests_total", (reason,))(own) for reason in ("stop", "length", "abort")}
    return {(reason,): value for reason, value in total.items()}


def _cache_config(own: _Own) -> Samples | None:
    pages, size = own.get("troupe_cache_pages"), own.get("troupe_cache_page_tokens")
    return {(str(size), str(pages)): 1.0} if pages is not None and size is not None else None


def _adapter_states(own: _Own) -> Samples | None:
    states = own.get("adapter_states")
    return dict.fromkeys(states, time.time()) if isinstance(states, Mapping) else None


def _vllm() -> _Table:
    table = _Table("vllm")
    gauge, counter = table.gauge, table.counter
    gauge("num_requests_running", "Sequences that run.", _value("troupe_requests_running"))
    gauge("num_requests_waiting", "Sequences that wait.", _value("troupe_requests_waiting"))
    gauge(
        "kv_cache_usage_perc",
        "Share of the cache in use, 0 to 1.",
        _share("troupe_cache_pages_used", "troupe_cache_pages"),
    )
    counter("prefix_cache_queries_total", "Tokens looked up.", _value("troupe_cache_queried_tokens_total"))
    counter("prefix_cache_hits_total", "Tokens found.", _value("troupe_cache_hit_tokens_total"))
    counter("num_preemptions_total", "Preemptions.", _value("troupe_preemptions_total"))
    counter("prompt_tokens_total", "Prompt tokens processed.", _value("prompt_tokens"))
    counter("generation_tokens_total", "Tokens generated.", _value("troupe_generated_tokens_total"))
    counter("request_success_total", "Ended requests.", _finished, "finished_reason")
    counter("spec_decode_num_drafts_total", "Drafts verified.", _optional("speculative_drafts"))
    counter("spec_decode_num_draft_tokens_total", "Draft tokens verified.", _optional("speculative_draft_tokens"))
    counter("spec_decode_num_accepted_tokens_total", "Draft tokens accepted.", _optional("speculative_accepted_tokens"))
    counter(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "Drafts whose token at this position was accepted.",
        _optional("speculative_positions"),
        "position",
    )
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    spec = MetricSpec("vllm:lora_requests_info", "gauge", "Running and waiting adapters; value: the time.", labels)
    table[spec.name] = (spec, _adapter_states)
    spec = MetricSpec("vllm:cache_config_info", "gauge", "The cache's pages.", ("block_size", "num_gpu_blocks"))
    table[spec.name] = (spec, _cache_config)
    return table


# -- SGLang ------------------------------------------------------------------------------------------------------------

_SGLANG_LATENCY = (
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0),
)
_SGLANG_PER_TOKEN = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1),
    *(0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0),
)
_SGLANG_TOKENS = (
    *(100.0, 300.0, 500.0, 700.0, 1e3, 1.5e3, 2e3, 3e3, 4e3, 5e3, 6e3, 7e3, 8e3, 9e3, 1e4, 1.2e4, 1.5e4, 2e4),
    *(2.2e4, 2.5e4, 3e4, 3.5e4, 4e4, 6.6e4, 9.9e4, 1.32e5, 3e5, 6e5, 9e5, 1.1e6),
)

_SGLANG_HISTOGRAMS: dict[str, tuple[str, str, Sequence[float]]] = {
    "sglang:time_to_first_token_seconds": ("first_token", "Time to first token.", _SGLANG_LATENCY),
    "sglang:inter_token_latency_seconds": ("inter_token", "Time between tokens.", _SGLANG_PER_TOKEN),
    "sglang:request_time_per_output_token_seconds": ("per_token", "Mean time per output token.", _SGLANG_PER_TOKEN),
    "sglang:e2e_request_latency_seconds": (
        "duration",
        "Duration of a request.",
        (*_SGLANG_LATENCY, 600.0, 1200.0, 1800.0, 2400.0),
    ),
    "sglang:queue_time_seconds": ("queue", "Time in the queue.", _SGLANG_LATENCY),
    "sglang:prompt_tokens_histogram": ("input_tokens", "Prompt tokens of a request.", _SGLANG_TOKENS),
    "sglang:generation_tokens_histogram": ("output_tokens", "Generated tokens of a request.", _SGLANG_TOKENS),
}
_WITH_TOKENS = frozenset({"sglang:prompt_tokens_histogram", "sglang:generation_tokens_histogram"})


def _sglang() -> _Table:
    table = _Table("sglang")
    gauge, counter = table.gauge, table.counter
    used, free, evictable = "troupe_cache_pages_used", "troupe_cache_pages_free", "troupe_cache_pages_evictable"
    gauge("num_running_reqs", "Sequences that run.", _value("troupe_requests_running"))
    gauge("num_queue_reqs", "Sequences that wait.", _value("troupe_requests_waiting"))
    gauge("gen_throughput", "Tokens generated in a second.", _Recent("troupe_generated_tokens_total"))
    gauge(
        "cache_hit_rate",
        "Share of looked-up tokens found lately.",
        _Recent("troupe_cache_hit_tokens_total", "troupe_cache_queried_tokens_total"),
    )
    gauge("token_usage", "Share of the cache in use, 0 to 1.", _share(used, "troupe_cache_pages"))
    gauge("num_used_tokens", "Tokens of the cache in use.", _tokens(used))
    gauge("kv_used_tokens", "Tokens of the cache in use.", _tokens(used))
    gauge("kv_available_tokens", "Tokens of the cache that hold nothing.", _tokens(free))
    gauge("kv_evictable_tokens", "Tokens of the cache that may be evicted.", _tokens(evictable))
    gauge("max_total_num_tokens", "Tokens of the cache.", _tokens("troupe_cache_pages"))
    gauge("page_size", "Tokens of a page.", _value("troupe_cache_page_tokens"))
    gauge("num_pages", "Pages of the cache.", _value("troupe_cache_pages"))
    gauge("context_len", "Tokens a sequence may have.", _value("troupe_context_tokens"))
    counter("num_requests_total", "Ended requests.", _labelled("troupe_requests_total"))
    counter("num_aborted_requests_total", "Aborted requests.", _labelled("troupe_requests_total", ("abort",)))
    counter("prompt_tokens_total", "Prompt tokens processed.", _value("prompt_tokens"))
    counter("generation_tokens_total", "Tokens generated.", _value("troupe_generated_tokens_total"))
    counter(
        "cached_tokens_total",
        "Prompt tokens found in the cache.",
        lambda own: {("device",): _number(own, "troupe_cached_tokens_total")},
        "cache_source",
    )
    counter("num_retracted_requests_total", "Preemptions.", _value("troupe_preemptions_total"))
    used, places = "troupe_adapter_slots_used", "troupe_adapter_slots"
    gauge("lora_pool_slots_used", "Occupied adapter slots.", _optional(used))
    gauge("lora_pool_slots_total", "Adapter slots.", _optional(places))
    gauge("lora_pool_utilization", "Share of adapter slots in use, 0 to 1.", _adapting(_share(used, places)))
    accepted, drafts, drafted = "speculative_accepted_tokens", "speculative_drafts", "speculative_draft_tokens"
    gauge("spec_accept_length", "Tokens of a verification lately.", _lengths(_Recent(accepted, drafts)))
    gauge("spec_accept_rate", "Share of draft tokens accepted lately.", _speculating(_Recent(accepted, drafted)))
    counter("spec_verify_calls_total", "Drafts verified.", _optional(drafts))
    return table


# -- both --------------------------------------------------------------------------------------------------------------


def foreign_exposition(
    names: ForeignNames,
    model: str,
    options: MetricOptions,
    requests: RequestMetrics,
    steps: StepMetrics,
    own: Readings,
) -> Exposition:
    """The samples of a scrape under another engine's names. ``own`` returns Troupe's samples by Troupe's names. From
    now on ``requests`` and ``steps`` add their measurements to these histograms too."""
    table, quantities = (_vllm(), _VLLM_HISTOGRAMS) if names == "vllm" else (_sglang(), _SGLANG_HISTOGRAMS)
    chosen: dict[str, Sequence[float] | None] = {
        "first_token": options.first_token_buckets,
        "inter_token": options.inter_token_buckets,
        "duration": options.duration_buckets,
        "input_tokens": options.prompt_token_buckets,
        "output_tokens": options.generation_token_buckets,
    }
    specs = [spec for spec, _ in table.values()]
    histograms: dict[str, Histogram] = {}
    for name, (quantity, text, bounds) in quantities.items():
        if name in _WITH_TOKENS and not options.collect_tokens:
            continue
        histogram = histograms[name] = Histogram(chosen.get(quantity) or bounds)
        specs.append(MetricSpec(name, "histogram", text))
        if quantity == "inter_token":
            steps.inter_token.append(histogram)
        elif quantity == "step_tokens":
            steps.tokens.append(histogram)
        else:
            requests.measured[quantity].append(histogram)

    def readings() -> Mapping[str, Samples]:
        ours = own()
        result: dict[str, Samples] = dict(histograms)
        for name, (_, of) in table.items():
            value = of(ours)
            if value is not None:
                result[name] = value
        return result

    constant = {"model_name": model} | ({"engine": "0"} if names == "vllm" else {"engine_type": "unified"})
    return Exposition(specs, (readings,), constant)
