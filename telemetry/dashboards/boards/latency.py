"""Latencies of requests, their parts, and the steps behind them."""

from __future__ import annotations

from telemetry.dashboards.board import Board, Row
from telemetry.dashboards.panels import Heatmap, Query, TimeSeries
from telemetry.dashboards.promql import buckets, mean, quantile, quantiles, rate

__all__ = ["LATENCY"]

_TTFT = "gen_ai_server_time_to_first_token_seconds"
_TPOT = "gen_ai_server_time_per_output_token_seconds"
_DURATION = "gen_ai_server_request_duration_seconds"
_ITL = "troupe_inter_token_latency_seconds"
_ROWS, _GRAPH = "troupe_step_rows_total", 'execution="graph"'
_WELL = 'error_type=""'
_DRAFTS, _DRAFTED = "troupe_speculative_drafts_total", "troupe_speculative_draft_tokens_total"
_ACCEPTED = "troupe_speculative_accepted_tokens_total"

_CLIENTS = Row(
    "As clients see it",
    (
        TimeSeries(
            "Time to the first token",
            "From a request's arrival to its first token: tokenizing, queue and prefill.",
            quantiles(_TTFT),
            unit="s",
        ),
        TimeSeries(
            "Time between tokens",
            "Between two tokens of a sequence, each gap counted.",
            quantiles(_ITL),
            unit="s",
        ),
        TimeSeries(
            "Duration of a request",
            "From arrival to end, of requests that ended well.",
            quantiles(_DURATION, _WELL),
            unit="s",
        ),
        Heatmap(
            "Time to the first token, spread",
            "How many requests, by their time to the first token.",
            buckets(_TTFT),
            unit="s",
        ),
        Heatmap(
            "Time between tokens, spread", "How many tokens, by the time since the one before.", buckets(_ITL), unit="s"
        ),
        Heatmap(
            "Duration of a request, spread",
            "How many requests, by their duration.",
            buckets(_DURATION, _WELL),
            unit="s",
        ),
    ),
)

_STAGES = Row(
    "Where the time goes",
    (
        TimeSeries(
            "Mean time by stage",
            "Tokenizing, queue and prefill make the time to the first token; decoding is the rest.",
            tuple(
                Query(mean(f"troupe_request_{stage}_seconds"), stage)
                for stage in ("tokenize", "queue", "prefill", "decode")
            ),
            unit="s",
            width=12,
            stack=True,
        ),
        TimeSeries(
            "Queue",
            "From the arrival in the queue to the first place in a step. It grows when the servers are full.",
            quantiles("troupe_request_queue_seconds"),
            unit="s",
            width=12,
        ),
        TimeSeries(
            "Tokenize",
            "Rendering the chat template and encoding, including the wait for a tokenizer.",
            quantiles("troupe_request_tokenize_seconds"),
            unit="s",
        ),
        TimeSeries(
            "Prefill",
            "From the first place in a step to the first token; long prompts are run in chunks.",
            quantiles("troupe_request_prefill_seconds"),
            unit="s",
        ),
        TimeSeries("Decode", "From the first token to the last.", quantiles("troupe_request_decode_seconds"), unit="s"),
    ),
)

_STEPS = Row(
    "Steps",
    (
        TimeSeries(
            "Duration of a step",
            "From sending a step to its result. Two may be in flight, so this includes waiting for the other.",
            quantiles("troupe_step_seconds"),
            unit="s",
        ),
        TimeSeries(
            "A worker's seconds",
            "Seconds per second in each phase: steps queued behind another, the host preparing inputs, the model and "
            "sampling running.",
            (Query(rate("troupe_step_phase_seconds_total", "phase"), "{{phase}}"),),
            unit="percentunit",
        ),
        TimeSeries(
            "Tokens by mode",
            "Tokens run by the devices per second: prompts (prefill) and one for each running sequence (decode).",
            (Query(rate("troupe_step_tokens_total", "mode"), "{{mode}}"),),
            unit="si:tok/s",
            stack=True,
        ),
        Heatmap(
            "Sequences in a step, spread",
            "How many steps, by their number of sequences.",
            buckets("troupe_step_rows"),
            width=6,
        ),
        TimeSeries(
            "Steps",
            "Steps per second.",
            (Query(rate("troupe_steps_total", "instance"), "{{instance}}"),),
            unit="ops",
            width=6,
        ),
        TimeSeries(
            "Pipeline bubbles",
            "Share of the time with a step in flight in which a pipeline worker is idle. Not measured on GPUs.",
            (
                Query(
                    f"1 - {rate('troupe_pipeline_stage_seconds_total', 'instance, replica, worker')}"
                    f" / on (instance, replica) group_left ()"
                    f" ({rate('troupe_pipeline_seconds_total', 'instance, replica')} > 0)",
                    "{{instance}} {{worker}}",
                ),
            ),
            unit="percentunit",
            maximum=1,
            width=6,
        ),
        TimeSeries(
            "Rows run in graphs",
            "Share of rows that ran in a captured graph. On a CPU there are none.",
            (
                Query(
                    f"({rate(_ROWS, 'instance', _GRAPH)} or 0 * {rate('troupe_steps_total', 'instance')})"
                    f" / ({rate(_ROWS, 'instance')} > 0)",
                    "{{instance}}",
                ),
            ),
            unit="percentunit",
            maximum=1,
            width=6,
        ),
    ),
)

_DRAFT_TOKENS = Row(
    "Speculative decoding",
    (
        TimeSeries(
            "Acceptance length",
            "Tokens that a sequence gets from a step with draft tokens: 1 + the accepted ones.",
            (Query(f"1 + {rate(_ACCEPTED, 'algorithm')} / ({rate(_DRAFTS, 'algorithm')} > 0)", "{{algorithm}}"),),
        ),
        TimeSeries(
            "Acceptance rate",
            "Share of the verified draft tokens that were accepted.",
            (Query(f"{rate(_ACCEPTED, 'algorithm')} / ({rate(_DRAFTED, 'algorithm')} > 0)", "{{algorithm}}"),),
            unit="percentunit",
            maximum=1,
        ),
        TimeSeries(
            "Acceptance by position",
            "Share of the drafts whose token at this position was accepted. Late positions that never are bring "
            "nothing: draft fewer steps.",
            (
                Query(
                    f"{rate('troupe_speculative_accepted_at_position_total', 'position')}"
                    f" / on () group_left () ({rate(_DRAFTS)} > 0)",
                    "{{position}}",
                ),
            ),
            unit="percentunit",
            maximum=1,
        ),
    ),
)

_COMPARED = Row(
    "Servers and models compared",
    (
        TimeSeries(
            "First token by server, p95",
            "The time to the first token of each server. A server above the others has its own problem.",
            (Query(quantile(0.95, _TTFT, "instance"), "{{instance}}"),),
            unit="s",
        ),
        TimeSeries(
            "Between tokens by server, p95",
            "The time between tokens of each server.",
            (Query(quantile(0.95, _ITL, "instance"), "{{instance}}"),),
            unit="s",
        ),
        TimeSeries(
            "Queue by server, p95",
            "The wait of each server's queue. If uneven, the load is badly distributed.",
            (Query(quantile(0.95, "troupe_request_queue_seconds", "instance"), "{{instance}}"),),
            unit="s",
        ),
        TimeSeries(
            "First token by model and operation, p95",
            "The time to the first token of each model and kind of request.",
            (
                Query(
                    quantile(0.95, _TTFT, "gen_ai_request_model, gen_ai_operation_name"),
                    "{{gen_ai_request_model}} {{gen_ai_operation_name}}",
                ),
            ),
            unit="s",
            width=12,
        ),
        TimeSeries(
            "Time per output token by model, p95",
            "A request's mean time between its tokens, by OpenTelemetry's definition.",
            (Query(quantile(0.95, _TPOT, "gen_ai_request_model"), "{{gen_ai_request_model}}"),),
            unit="s",
            width=12,
        ),
    ),
)

LATENCY = Board(
    "troupe-latency",
    "Troupe: latency",
    "Latencies of requests, their parts, and the steps behind them.",
    (_CLIENTS, _STAGES, _STEPS, _DRAFT_TOKENS, _COMPARED),
)
