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
        "dumps after a crash are not built yet",
        _OUT,
        values={"crash-dump-folder": None},
    ),
    *family(
        _LOGS,
        "logits that are no numbers end the request that they belong to, and no other",
        _OUT,
        flags=("crash-on-nan",),
    ),
    Refusal(
        name="enable-nan-detection",
        is_flag=True,
        accepts=(True, False),
        group=_LOGS,
        reason="logits that are no numbers always end the request that they belong to",
        remedy="leave it out",
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
