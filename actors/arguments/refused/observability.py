"""Logs, metrics, traces and debugging."""

from __future__ import annotations

from actors.arguments.refusal import Refusal, family

__all__ = ["OBSERVABILITY"]

_OUT = "leave it out"
_LOGS = "Logging"
_METRICS = "Metrics"

OBSERVABILITY: tuple[Refusal, ...] = (
    *family(
        _LOGS,
        "a log line of each request's times is not built yet",
        "leave it out and use --log-requests, which has them",
        flags=("enable-request-time-stats-logging",),
    ),
    *family(
        _LOGS,
        "a log line every few decode steps is not built yet",
        "leave it out and read /metrics",
        values={"decode-log-interval": None},
    ),
    *family(
        _LOGS,
        "dumps after a crash are not built yet",
        _OUT,
        flags=("crash-on-nan", "enable-nan-detection"),
        values={"crash-dump-folder": None},
    ),
    *family(
        _LOGS,
        "warnings about garbage collection are not built yet",
        "leave it out or give 0",
        values={"gc-warning-threshold-secs": 0.0},
    ),
    Refusal(
        name="enable-metrics",
        is_flag=True,
        accepts=(True,),
        group=_METRICS,
        reason="metrics are always on",
        remedy="leave it out or give true; they are at /metrics",
    ),
    Refusal(
        name="metrics-reporters",
        accepts=(None, "prometheus"),
        group=_METRICS,
        reason="metrics are reported to Prometheus only",
        remedy="leave it out or give prometheus",
    ),
    *family(
        _METRICS,
        "metrics for each scheduler are not built: there is one scheduler",
        _OUT,
        flags=("enable-metrics-for-all-schedulers",),
    ),
    *family(
        _METRICS,
        "choosing labels and buckets of metrics is not built yet",
        _OUT,
        flags=("collect-tokens-histogram",),
        values={"tokenizer-metrics-custom-labels-header": "x-custom-labels"},
        lists=(
            "tokenizer-metrics-allowed-custom-labels",
            "bucket-time-to-first-token",
            "bucket-inter-token-latency",
            "bucket-e2e-request-latency",
            "prompt-tokens-buckets",
            "generation-tokens-buckets",
        ),
    ),
    *family(
        _METRICS,
        "writing metrics to files is not built yet",
        "leave it out and scrape /metrics",
        flags=("export-metrics-to-file",),
        values={"export-metrics-to-file-dir": None},
    ),
    *family(
        "Tracing",
        "exporting traces by an argument is not built yet",
        "leave it out",
        flags=("enable-trace",),
        values={"oltp-traces-endpoint otlp-traces-endpoint": "localhost:4317"},
    ),
    *family(
        "Tracing",
        "publishing events of the prefix cache is not built yet",
        _OUT,
        values={"kv-events-config": None},
    ),
    *family(
        "Debugging",
        "dumping tensors is not built yet",
        _OUT,
        flags=("enable-layerwise-nvtx-marker",),
        values={"debug-tensor-dump-output-folder": None, "debug-tensor-dump-input-file": None},
        lists=("debug-tensor-dump-layers", "forward-hooks"),
    ),
)
