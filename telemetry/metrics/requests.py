"""Latencies and tokens of requests, from their timelines. Nothing here runs between the first and the last token of a
request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from telemetry.metrics.exposition import Samples
from telemetry.metrics.histogram import Histogram
from telemetry.metrics.label_limiter import LabelLimiter
from telemetry.metrics.names import PROVIDER
from telemetry.metrics.options import ADAPTER, CUSTOM_LABEL, MetricOptions
from telemetry.timeline import Hop, Mark, RequestTimeline

__all__ = ["FIRST_TOKEN_BUCKETS", "PER_TOKEN_BUCKETS", "RequestMetrics"]

# OpenTelemetry's GenAI buckets, extended for the prefills of very long prompts
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 10.0),
)
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 655.36)
_STAGE = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_GAP = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_TOKENS = tuple(float(2**power) for power in range(21))

_STAGES = ("stream", "decode", "prefill", "cache", "queue", "tokenize", "admission")


def _sequence_spans(timeline: RequestTimeline) -> dict[int, tuple[float | None, float | None, float, int]]:
    """Times of a choice: its first place in a step, its first and last token (seconds), and its tokens. None for what
    did not happen."""
    spans: dict[int, tuple[float | None, float | None, float, int]] = {}
    for hop in timeline.hops:
        if hop.choice is None or hop.end is None:
            continue
        placed, first, last, tokens = spans.get(hop.choice, (None, None, 0.0, 0))
        if hop.name == "queue" and placed is None:
            placed = hop.end
        elif hop.name == "decode":
            first, last = hop.start if first is None else first, hop.end
            count = hop.attributes.get("tokens")
            tokens += count if isinstance(count, int) else 0
        spans[hop.choice] = (placed, first, last, tokens)
    return spans


class RequestMetrics:
    """Listens to timelines (``telemetry.timeline.TimelineListener``), except those of the server's own requests: their
    prompts are short, and the first ones wait for compilation.

    ``measured``: by quantity, the histograms that each measurement is added to. Others may add histograms with
    their own buckets. Seconds, or tokens.
    """

    def __init__(self, model: str, options: MetricOptions | None = None) -> None:
        self._options = options = options or MetricOptions()
        self._model = model
        self._first_token_bounds = options.first_token_buckets or FIRST_TOKEN_BUCKETS
        self._per_token_bounds = options.inter_token_buckets or PER_TOKEN_BUCKETS
        self._duration_bounds = options.duration_buckets or _DURATION
        self._error_types: LabelLimiter[str] = LabelLimiter("other")
        self._custom: LabelLimiter[tuple[str, ...]] = LabelLimiter(("other",) * len(options.custom_labels))
        self.adapter_label: LabelLimiter[str] = LabelLimiter("other")
        self.duration: dict[tuple[str, ...], Histogram] = {}
        self.first_token: dict[tuple[str, ...], Histogram] = {}
        self.per_token: dict[tuple[str, ...], Histogram] = {}
        self.tokenize = Histogram(_STAGE)
        self.queue = Histogram(_STAGE)
        self.prefill = Histogram(_STAGE)
        self.decode = Histogram(_STAGE)
        self.stream_gap = Histogram(_GAP)
        self.input_tokens = Histogram(options.prompt_token_buckets or _TOKENS)
        self.output_tokens = Histogram(options.generation_token_buckets or _TOKENS)
        self.ended_by: Counter[tuple[str, ...]] = Counter()
        self.tokens: Counter[tuple[str, ...]] = Counter()
        if not options.custom_labels:
            none = ("",) if options.adapters else ()
            reasons = ("stop", "length", "abort", "error", "rejected")
            self.ended_by.update({(reason, *none): 0 for reason in reasons})
            self.tokens.update({("input", *none): 0, ("output", *none): 0})
        self.cached_tokens = 0
        self.prompt_tokens = 0  # of prompts that were run
        self.resumed = 0
        self.quarantined = 0
        self.stream_errors: Counter[tuple[str]] = Counter()
        self.disconnects: Counter[tuple[str]] = Counter()
        self.measured: dict[str, list[Histogram]] = {
            "queue": [self.queue],
            "prefill": [self.prefill],
            "decode": [self.decode],
            "tokenize": [self.tokenize],
            "first_token": [],
            "per_token": [],
            "duration": [],
            "inference": [],
            "input_tokens": [self.input_tokens],
            "output_tokens": [self.output_tokens],
            "max_tokens": [],
            "choices": [],
            "longest": [],
        }

    def _add(self, quantity: str, value: float) -> None:
        for histogram in self.measured[quantity]:
            histogram.add(value)

    def _labels(self, timeline: RequestTimeline) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The GenAI labels of a request; its custom ones and its adapter, empty without one."""
        custom: tuple[str, ...] = ()
        if self._options.custom_labels:
            request = timeline.request
            given = (str(request.get(CUSTOM_LABEL + name, "")) for name in self._options.custom_labels)
            custom = self._custom(tuple(value[:64] for value in given))
        if self._options.adapters:
            adapter = str(timeline.request.get(ADAPTER, ""))
            custom = (*custom, self.adapter_label(adapter) if adapter else "")  # none is not one of the names
        return (timeline.operation, PROVIDER, self._model), custom

    def _into(
        self, family: dict[tuple[str, ...], Histogram], labels: tuple[str, ...], bounds: Sequence[float], value: float
    ) -> None:
        histogram = family.get(labels)
        if histogram is None:
            histogram = family[labels] = Histogram(bounds)
        histogram.add(value)

    # -- events of timelines

    def began(self, timeline: RequestTimeline) -> None:
        """Not known yet."""

    def hop_ended(self, timeline: RequestTimeline, hop: Hop) -> None:
        if hop.end is None or timeline.probe:
            return
        if hop.name == "tokenize":
            self._add("tokenize", hop.end - hop.start)

    def marked(self, timeline: RequestTimeline, mark: Mark) -> None:
        if timeline.probe:
            return
        if mark.name == "first_token":
            if sum(other.name == "first_token" for other in timeline.marks) == 1:
                self._first_token(timeline, mark.at)
        elif mark.name == "client_gone":
            begun = {hop.name for hop in timeline.hops}
            self.disconnects[next((stage,) for stage in _STAGES if stage in begun or stage == "admission")] += 1
        elif mark.name == "resumed":
            self.resumed += 1
        elif mark.name == "quarantined":
            self.quarantined += 1

    def _first_token(self, timeline: RequestTimeline, at: float) -> None:
        """The first token of a request, of any choice."""
        labels, custom = self._labels(timeline)
        waited = at - timeline.started
        self.prompt_tokens += timeline.prompt_tokens
        self._into(self.first_token, (*labels, *custom), self._first_token_bounds, waited)
        self._add("first_token", waited)

    def ended(self, timeline: RequestTimeline) -> None:
        outcome, end = timeline.outcome, timeline.end
        if outcome is None or end is None or timeline.probe:
            return
        labels, custom = self._labels(timeline)
        error = self._error_types(outcome.error_type)
        reason = _reason(outcome.finish_reasons, error)
        duration = end - timeline.started
        self._into(self.duration, (*labels, error, *custom), self._duration_bounds, duration)
        self.ended_by[reason, *custom] += 1
        if error and error != "abort" and any(mark.name == "first_token" for mark in timeline.marks):
            self.stream_errors[error,] += 1
        if reason == "rejected":
            return
        self._add("duration", duration)
        self.tokens["input", *custom] += timeline.prompt_tokens
        self.tokens["output", *custom] += timeline.output_tokens
        self.cached_tokens += timeline.cached_tokens
        self._add("input_tokens", timeline.prompt_tokens)
        self._add("output_tokens", timeline.output_tokens)
        self._add("choices", max(1, len(outcome.finish_reasons)))
        max_tokens = timeline.request.get("gen_ai.request.max_tokens")
        if isinstance(max_tokens, int):
            self._add("max_tokens", max_tokens)
        self._measure_sequences(timeline, (*labels, *custom))

    def _measure_sequences(self, timeline: RequestTimeline, labels: tuple[str, ...]) -> None:
        for hop in timeline.hops:
            if hop.name == "queue" and hop.end is not None and not hop.attributes.get("resumed"):
                self._add("queue", hop.end - hop.start)
        spans = _sequence_spans(timeline)
        self._add("longest", max((tokens for _, _, _, tokens in spans.values()), default=0))
        for placed, first, last, tokens in spans.values():
            if placed is None or first is None:
                continue
            self._add("prefill", first - placed)
            self._add("decode", last - first)
            self._add("inference", last - placed)
            if tokens > 1:
                pace = (last - first) / (tokens - 1)
                self._into(self.per_token, labels, self._per_token_bounds, pace)
                self._add("per_token", pace)
        for mark in timeline.marks:
            if mark.name == "worker_died":
                back = [
                    hop.start
                    for hop in timeline.hops
                    if hop.name == "decode" and hop.choice == mark.choice and hop.start > mark.at
                ]
                if back:
                    self.stream_gap.add(min(back) - mark.at)

    # -- read by a scrape

    def readings(self) -> Mapping[str, Samples]:
        result: dict[str, Samples] = {
            "gen_ai_server_request_duration_seconds": self.duration,
            "gen_ai_server_time_to_first_token_seconds": self.first_token,
            "gen_ai_server_time_per_output_token_seconds": self.per_token,
            "troupe_request_tokenize_seconds": self.tokenize,
            "troupe_request_queue_seconds": self.queue,
            "troupe_request_prefill_seconds": self.prefill,
            "troupe_request_decode_seconds": self.decode,
            "troupe_requests_total": self.ended_by,
            "troupe_tokens_total": self.tokens,
            "troupe_cached_tokens_total": self.cached_tokens,
            "troupe_stream_errors_total": self.stream_errors,
            "troupe_client_disconnects_total": self.disconnects,
            "troupe_requests_resumed_total": self.resumed,
            "troupe_requests_quarantined_total": self.quarantined,
            "troupe_stream_gap_seconds": self.stream_gap,
        }
        if self._options.collect_tokens:
            result |= {"troupe_input_tokens": self.input_tokens, "troupe_output_tokens": self.output_tokens}
        return result


def _reason(finish_reasons: tuple[str, ...], error: str) -> str:
    """How a request ended: stop, length, abort, error or rejected."""
    if not finish_reasons:
        return "abort" if error == "abort" else "rejected"
    if error:
        return "abort" if error == "abort" else "error"
    return finish_reasons[0]
