"""The first board: state, throughput, latency and errors."""

from __future__ import annotations

from telemetry.dashboards.board import Board, Row
from telemetry.dashboards.panels import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    TEXT,
    Query,
    Stat,
    Table,
    TimeSeries,
    bad_above,
)
from telemetry.dashboards.promql import events, mean, quantile, rate

__all__ = ["OVERVIEW"]

_TTFT = "gen_ai_server_time_to_first_token_seconds"
_FAILED = 'finish_reason="error"'
_NO_PROBES = 'endpoint!~"/(live|ready|ping|health|health_generate|metrics)"'
_ITL = "troupe_inter_token_latency_seconds"

_NOW = Row(
    "Now",
    (
        Stat(
            "Servers ready",
            "Servers that admit requests. Fewer than you run: look at the table below for the one that does not.",
            (Query("sum(troupe_ready{@})"),),
            decimals=0,
            base=RED,
            thresholds=((1, GREEN),),
        ),
        Stat(
            "Running",
            "Sequences with a slot on a device.",
            (Query("sum(troupe_requests_running{@})"),),
            decimals=0,
            base=TEXT,
        ),
        Stat(
            "Waiting",
            "Sequences in the queues. For long above zero: the servers are full.",
            (Query("sum(troupe_requests_waiting{@})"),),
            decimals=0,
            thresholds=bad_above(1, 100),
        ),
        Stat(
            "Generated tokens",
            "Tokens sampled per second, all servers together.",
            (Query(rate("troupe_generated_tokens_total")),),
            unit="si:tok/s",
            base=TEXT,
        ),
        Stat(
            "First token, p95",
            "95 of 100 requests had their first token within this time after they arrived.",
            (Query(quantile(0.95, _TTFT)),),
            unit="s",
            thresholds=bad_above(2, 10),
        ),
        Stat(
            "Between tokens, p95",
            "95 of 100 tokens came within this time after the one before.",
            (Query(quantile(0.95, _ITL)),),
            unit="s",
            thresholds=bad_above(0.1, 0.5),
        ),
        Stat(
            "Failed requests",
            "Share of ended requests that ended with an error. Disconnects and refusals do not count.",
            (
                Query(
                    f"({rate('troupe_requests_total', where=_FAILED)} or vector(0))"
                    f" / ({rate('troupe_requests_total')} > 0) or vector(0)"
                ),
            ),
            unit="percentunit",
            maximum=1,
            thresholds=bad_above(0.01, 0.05),
        ),
        Stat(
            "Cache in use",
            "Pages of the key-value caches that running sequences hold. Near 100 % sequences are preempted.",
            (Query("sum(troupe_cache_pages_used{@}) / sum(troupe_cache_pages{@})"),),
            unit="percentunit",
            maximum=1,
            thresholds=bad_above(0.8, 0.95),
        ),
    ),
)

_TRAFFIC = Row(
    "Traffic",
    (
        TimeSeries(
            "Requests by how they ended",
            "stop: the model was done; length: a limit of tokens was reached; abort: disconnected or aborted; "
            "rejected: refused at admission; error: everything else.",
            (Query(rate("troupe_requests_total", "finish_reason"), "{{finish_reason}}"),),
            unit="reqps",
            stack=True,
            colors=(("stop", GREEN), ("length", BLUE), ("abort", ORANGE), ("error", RED), ("rejected", PURPLE)),
        ),
        TimeSeries(
            "Tokens",
            "What the devices work on: prompt tokens computed (cached ones are not), tokens generated, and prompt "
            "tokens found in the prefix cache.",
            (
                Query(rate("troupe_step_tokens_total", where='mode="prefill"'), "prefill"),
                Query(rate("troupe_generated_tokens_total"), "generated"),
                Query(rate("troupe_cache_hit_tokens_total"), "from cache"),
            ),
            unit="si:tok/s",
        ),
        TimeSeries(
            "HTTP answers by status",
            "All endpoints except the probes. A stream that fails after its first token has status 200: see Trouble.",
            (Query(rate("troupe_http_requests_total", "status", _NO_PROBES), "{{status}}"),),
            unit="reqps",
            stack=True,
        ),
    ),
)

_LOAD = Row(
    "Load",
    (
        TimeSeries(
            "Sequences",
            "Running and waiting sequences against the number that may run at once.",
            (
                Query("sum(troupe_requests_running{@})", "running"),
                Query("sum(troupe_requests_waiting{@})", "waiting"),
                Query("sum(troupe_max_running_requests{@})", "may run"),
            ),
            colors=(("running", GREEN), ("waiting", ORANGE), ("may run", TEXT)),
        ),
        TimeSeries(
            "Sequences in a step",
            "Mean size of a batch. The larger, the better a device is used.",
            (Query(mean("troupe_step_rows", "instance"), "{{instance}}"),),
        ),
        TimeSeries(
            "Device at work",
            "Share of time in which a worker runs the model. 100 %: the device is the limit.",
            (
                Query(
                    rate("troupe_step_phase_seconds_total", "instance", 'phase="run"'),
                    "{{instance}}",
                ),
            ),
            unit="percentunit",
        ),
    ),
)

_TROUBLE = Row(
    "Trouble",
    (
        TimeSeries(
            "Requests in trouble",
            "Since the previous point: refused at admission (429); failed after the first token; disconnected; "
            "preempted for lack of pages; quarantined because they crashed their worker repeatedly.",
            (
                Query(f"sum({events('troupe_admission_rejections_total')})", "refused"),
                Query(f"sum({events('troupe_stream_errors_total')})", "stream broken"),
                Query(f"sum({events('troupe_client_disconnects_total')})", "client left"),
                Query(f"sum({events('troupe_preemptions_total')})", "preempted"),
                Query(f"sum({events('troupe_requests_quarantined_total')})", "quarantined"),
            ),
            bars=True,
            decimals=0,
            shown=("sum", "max"),
            colors=(("stream broken", RED), ("quarantined", PURPLE)),
        ),
        TimeSeries(
            "Restarts",
            "Actors restarted since the previous point. A worker's streams pause and continue.",
            (
                Query(
                    events("troupe_restarts_total", "instance, actor", "troupe_actor_up"), "{{actor}} of {{instance}}"
                ),
            ),
            bars=True,
            decimals=0,
            shown=("sum", "max"),
        ),
        TimeSeries(
            "Age of the oldest step",
            "How long a step waits for its result. Past 60 s /health fails.",
            (Query("max by (instance) (troupe_step_age_seconds{@})", "{{instance}}"),),
            unit="s",
            thresholds=((60, RED),),
        ),
        Table(
            "Alerts",
            "The alerts that fire now, by the rules in alerts.yml; Prometheus has the remedy for each.",
            (Query('max by (instance, alertname, severity, actor) (ALERTS{@, alertstate="firing"})'),),
            columns=(("firing", "short"),),
            hidden=("firing",),
            empty="nothing fires",
            height=5,
        ),
    ),
)


_SERVERS = Row(
    "Servers",
    (
        Table(
            "Servers",
            "One line a server.",
            (
                Query("max by (instance, model, version, device, dtype) (troupe_model_info{@})"),
                Query("max by (instance) (troupe_ready{@})"),
                Query("max by (instance) (troupe_requests_running{@})"),
                Query("max by (instance) (troupe_requests_waiting{@})"),
                Query(rate("troupe_generated_tokens_total", "instance")),
                Query("sum by (instance) (troupe_cache_pages_used{@}) / sum by (instance) (troupe_cache_pages{@})"),
                Query("sum by (instance) (troupe_process_resident_memory_bytes{@})"),
            ),
            columns=(
                ("up", "none"),
                ("ready", "bool_yes_no"),
                ("running", "none"),
                ("waiting", "none"),
                ("tokens per second", "si:tok/s"),
                ("cache in use", "percentunit"),
                ("memory", "bytes"),
            ),
            hidden=("up",),
            height=7,
        ),
        TimeSeries(
            "Memory",
            "Resident memory of each process: the server's and its workers'.",
            (
                Query(
                    "sum by (instance, process) (troupe_process_resident_memory_bytes{@})",
                    "{{process}} of {{instance}}",
                ),
            ),
            unit="bytes",
        ),
        TimeSeries(
            "Processor time",
            "Processors kept busy by each process.",
            (Query(rate("troupe_process_cpu_seconds_total", "instance, process"), "{{process}} of {{instance}}"),),
            unit="percentunit",
        ),
        TimeSeries(
            "Event loop lag, p99",
            "Delay of the server's event loop. Beyond some ten milliseconds every stream is late.",
            (Query(quantile(0.99, "troupe_loop_lag_seconds", "instance"), "{{instance}}"),),
            unit="s",
            thresholds=((0.25, RED),),
        ),
    ),
)

_ADAPTED = 'adapter!=""'

_ADAPTERS = Row(
    "Adapters",
    (
        TimeSeries(
            "Requests by adapter",
            "Ended requests of each LoRA adapter; those without one are left out.",
            (Query(rate("troupe_requests_total", "adapter", _ADAPTED), "{{adapter}}"),),
            unit="reqps",
            stack=True,
            width=12,
        ),
        TimeSeries(
            "First token by adapter, p95",
            "95 of 100 requests of an adapter had their first token within this time. Long for one alone: it waits "
            "for a slot; raise --max-loras-per-batch.",
            (Query(quantile(0.95, _TTFT, "adapter", _ADAPTED), "{{adapter}}"),),
            unit="s",
            width=12,
        ),
        TimeSeries(
            "Waiting by adapter",
            "Live requests of each adapter that do not run.",
            (Query('sum by (adapter) (troupe_adapter_requests{@, state="waiting"})', "{{adapter}}"),),
            width=12,
        ),
        TimeSeries(
            "Slots",
            "Slots on the devices that hold an adapter, all slots, and adapters that requests may name.",
            (
                Query("sum(troupe_adapter_slots_used{@})", "used"),
                Query("sum(troupe_adapter_slots{@})", "slots"),
                Query("sum(troupe_adapters_loaded{@})", "loaded"),
            ),
            decimals=0,
            width=12,
        ),
    ),
    collapsed=True,
)

OVERVIEW = Board(
    "troupe-overview",
    "Troupe: overview",
    "State, throughput, latency and errors.",
    (_NOW, _TRAFFIC, _LOAD, _TROUBLE, _SERVERS, _ADAPTERS),
)
