"""Actors: mailboxes, cost of messages, restarts, and their effect on requests."""

from __future__ import annotations

from telemetry.dashboards.board import Board, Row, Variable
from telemetry.dashboards.panels import GREEN, RED, Query, Stat, Table, TimeSeries, bad_above
from telemetry.dashboards.promql import events, mean, quantile, quantiles, rate

__all__ = ["ACTORS"]

_CHOSEN = 'actor=~"$actor"'
_BOTH = "actor, message"
_SPANS, _EXPORTED, _DROPPED = "troupe_trace_spans_total", 'outcome="exported"', 'outcome="dropped"'
_WAIT, _HANDLING = "troupe_mailbox_wait_seconds", "troupe_handler_seconds"

_STATE = Row(
    "State",
    (
        Stat(
            "Share of actors up",
            "Share of actors that run.",
            (Query(f"avg(troupe_actor_up{{@, {_CHOSEN}}})"),),
            unit="percentunit",
            maximum=1,
            width=4,
            height=7,
            base=RED,
            thresholds=((1, GREEN),),
        ),
        Stat(
            "Restarts in this time",
            "Restarts in the chosen time, of all actors.",
            (
                Query(
                    "round(sum(increase((sum by (instance) (troupe_restarts_total{@})"
                    " or 0 * sum by (instance) (troupe_ready{@}))[$__range:$__interval])))"
                ),
            ),
            decimals=0,
            course=False,
            width=4,
            height=7,
            thresholds=bad_above(1, 3),
        ),
        TimeSeries(
            "Actors up",
            "1 while an actor runs; a gap is a restart.",
            (Query(f"min by (actor) (troupe_actor_up{{@, {_CHOSEN}}})", "{{actor}}"),),
            maximum=1,
            height=7,
            shown=("lastNotNull", "min"),
        ),
        TimeSeries(
            "Age of the heartbeat",
            "Child process: seconds since its last heartbeat. Actor in the loop: age of the message in work.",
            (Query(f"max by (actor) (troupe_heartbeat_age_seconds{{@, {_CHOSEN}}})", "{{actor}}"),),
            unit="s",
            height=7,
            thresholds=((60, RED),),
        ),
    ),
)

_MAILBOXES = Row(
    "Mailboxes",
    (
        TimeSeries(
            "Depth",
            "Messages that wait. A mailbox is bounded: when it is full, its senders wait too.",
            (Query(f"sum by (actor, lane) (troupe_mailbox_depth{{@, {_CHOSEN}}})", "{{actor}} {{lane}}"),),
        ),
        TimeSeries(
            "Wait by actor, p99",
            "How long messages wait in each mailbox. The actor on top delays the others.",
            (Query(quantile(0.99, _WAIT, "actor", _CHOSEN), "{{actor}}"),),
            unit="s",
        ),
        TimeSeries(
            "Wait by message, mean",
            "The 12 kinds of messages that wait longest.",
            (Query(f"topk(12, {mean(_WAIT, _BOTH, _CHOSEN)})", "{{message}} to {{actor}}"),),
            unit="s",
        ),
    ),
)

_HANDLERS = Row(
    "Handlers",
    (
        TimeSeries(
            "Time at work by actor",
            "Seconds per second that each actor spends in handlers. At 100 % it takes one message after the other. A "
            "worker's steps last until their result and overlap.",
            (Query(rate(f"{_HANDLING}_sum", "actor", _CHOSEN), "{{actor}}"),),
            unit="percentunit",
        ),
        TimeSeries(
            "Messages",
            "Messages handled per second, by actor.",
            (Query(rate(f"{_HANDLING}_count", "actor", _CHOSEN), "{{actor}}"),),
            unit="ops",
        ),
        TimeSeries(
            "Handling by message, mean",
            "The 12 kinds of messages that take longest.",
            (Query(f"topk(12, {mean(_HANDLING, _BOTH, _CHOSEN)})", "{{message}} at {{actor}}"),),
            unit="s",
        ),
        Table(
            "Messages by kind",
            "One line for each kind of message and the actor that receives it.",
            (
                Query(rate(f"{_HANDLING}_count", _BOTH, _CHOSEN)),
                Query(mean(_WAIT, _BOTH, _CHOSEN)),
                Query(quantile(0.99, _WAIT, _BOTH, _CHOSEN)),
                Query(mean(_HANDLING, _BOTH, _CHOSEN)),
                Query(quantile(0.99, _HANDLING, _BOTH, _CHOSEN)),
            ),
            columns=(
                ("per second", "ops"),
                ("mean wait", "s"),
                ("p99 wait", "s"),
                ("mean handling", "s"),
                ("p99 handling", "s"),
            ),
            sort_by="per second",
            height=10,
        ),
    ),
)

_FAULTS = Row(
    "Faults and recovery",
    (
        TimeSeries(
            "Restarts",
            "Actors restarted since the previous point.",
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
            "Messages in trouble",
            "Since the previous point: answered with an error; without a reply in time; undeliverable.",
            (
                Query(f"sum({events('troupe_handler_errors_total')})", "error"),
                Query(f"sum({events('troupe_ask_timeouts_total')})", "timeout"),
                Query(f"sum({events('troupe_dead_letters_total')})", "dead letter"),
            ),
            bars=True,
            decimals=0,
            shown=("sum", "max"),
        ),
        TimeSeries(
            "Requests after a crash",
            "Sequences resumed, and requests quarantined because they crashed their worker repeatedly.",
            (
                Query(f"sum({events('troupe_requests_resumed_total')})", "resumed"),
                Query(f"sum({events('troupe_requests_quarantined_total')})", "quarantined"),
            ),
            bars=True,
            decimals=0,
            shown=("sum", "max"),
            colors=(("resumed", GREEN), ("quarantined", RED)),
        ),
        Table(
            "Restarts by cause",
            "Since each server's start.",
            (
                Query(
                    "sum by (instance, actor, cause) (troupe_restarts_total{@})"
                    " or on (instance, actor) 0 * sum by (instance, actor) (troupe_actor_up{@})"
                ),
            ),
            columns=(("restarts", "none"),),
            sort_by="restarts",
            width=8,
        ),
        TimeSeries(
            "Mean time to recover",
            "From an actor's crash to its restart, mean of all restarts so far. A worker loads its model again.",
            (
                Query(
                    "sum by (actor) (troupe_recovery_seconds_sum{@})"
                    " / (sum by (actor) (troupe_recovery_seconds_count{@}) > 0)"
                    " or on (actor) 0 * sum by (actor) (troupe_actor_up{@})",
                    "{{actor}}",
                ),
            ),
            unit="s",
            shown=("lastNotNull",),
        ),
        TimeSeries(
            "Mean pause of a stream",
            "From a worker's crash to the next token of a sequence it ran, mean of all crashes so far.",
            (
                Query(
                    "sum by (instance) (troupe_stream_gap_seconds_sum{@})"
                    " / (sum by (instance) (troupe_stream_gap_seconds_count{@}) > 0)"
                    " or on (instance) 0 * troupe_ready{@}",
                    "{{instance}}",
                ),
            ),
            unit="s",
            shown=("lastNotNull",),
        ),
    ),
)

_LOOP = Row(
    "Loop and processes",
    (
        TimeSeries(
            "Event loop lag",
            "Delay of the event loop: something blocked it for that long.",
            quantiles("troupe_loop_lag_seconds"),
            unit="s",
        ),
        TimeSeries(
            "Tasks",
            "Tasks of the event loop. With the same load it must not grow.",
            (Query("sum by (instance) (troupe_tasks{@})", "{{instance}}"),),
        ),
        TimeSeries(
            "Threads",
            "Threads of each process.",
            (Query("sum by (instance, process) (troupe_process_threads{@})", "{{process}} of {{instance}}"),),
        ),
        TimeSeries(
            "Open files",
            "Open file descriptors of each process, sockets among them. With the same load they must not grow.",
            (Query("sum by (instance, process) (troupe_process_open_fds{@})", "{{process}} of {{instance}}"),),
        ),
        TimeSeries(
            "Memory",
            "Resident memory of each process.",
            (
                Query(
                    "sum by (instance, process) (troupe_process_resident_memory_bytes{@})",
                    "{{process}} of {{instance}}",
                ),
            ),
            unit="bytes",
        ),
        TimeSeries(
            "Start",
            "How long the last start took, by phase.",
            (Query("max by (phase) (troupe_start_seconds{@})", "{{phase}}"),),
            unit="s",
            shown=("lastNotNull",),
        ),
    ),
)

_TELEMETRY = Row(
    "Telemetry itself",
    (
        TimeSeries(
            "Spans",
            "Spans of traces per second. Dropped: the collector does not answer or is too slow; lower "
            "--trace-sample-ratio. Without --enable-trace there are none.",
            (
                Query(f"{rate(_SPANS, where=_EXPORTED)} or 0 * sum(troupe_ready{{@}})", "exported"),
                Query(f"{rate(_SPANS, where=_DROPPED)} or 0 * sum(troupe_ready{{@}})", "dropped"),
            ),
            unit="ops",
            colors=(("exported", GREEN), ("dropped", RED)),
        ),
        TimeSeries(
            "Duration of a scrape",
            "How long a server takes to answer /metrics.",
            (Query("max by (instance) (scrape_duration_seconds{@})", "{{instance}}"),),
            unit="s",
        ),
        TimeSeries(
            "Series of a scrape",
            "How many numbers a server exposes. It is bounded: it must stop growing after all kinds of requests came.",
            (Query("max by (instance) (scrape_samples_scraped{@})", "{{instance}}"),),
            decimals=0,
        ),
    ),
)

ACTORS = Board(
    "troupe-actors",
    "Troupe: actors",
    "Mailboxes, cost of messages, restarts, and their effect on requests.",
    (_STATE, _MAILBOXES, _HANDLERS, _FAULTS, _LOOP, _TELEMETRY),
    (Variable("actor", "Actor", 'label_values(troupe_actor_up{instance=~"$instance"}, actor)'),),
)
