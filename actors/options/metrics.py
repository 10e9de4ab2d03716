"""The arguments of metrics, and of the log lines about load and time."""

from __future__ import annotations

from typing import Annotated, Literal

from actors.options.declaration import ArgumentSpec
from actors.options.serving import ServingArguments

__all__ = ["MetricArguments"]

_BUILT_IN = "the built-in ones"
_RULE = "default; tse MIDDLE BASE COUNT for bounds on both sides of the middle; or custom and the bounds."


class MetricArguments(ServingArguments, frozen=True, kw_only=True):
    """The arguments of metrics, and of the log lines about load and time."""

    enable_metrics: Annotated[
        bool,
        ArgumentSpec(
            group="Metrics",
            help="Collect metrics and serve GET /metrics. Without it the live page shows no traffic between the "
            "actors.",
        ),
    ] = True

    metrics_names: Annotated[
        tuple[Literal["sglang", "vllm"], ...],
        ArgumentSpec(
            group="Metrics",
            kind="names",
            metavar="NAMES",
            help="Also export metrics under the names of these engines, for their dashboards, separated by commas.",
        ),
    ] = ()

    bucket_time_to_first_token: Annotated[
        tuple[float, ...] | None,
        ArgumentSpec(
            group="Metrics",
            default_text=_BUILT_IN,
            minimum=0,
            maximum=1e6,
            above=True,
            metavar="SECONDS",
            help="Bounds of the buckets of the time to the first token, in seconds.",
        ),
    ] = None

    bucket_inter_token_latency: Annotated[
        tuple[float, ...] | None,
        ArgumentSpec(
            group="Metrics",
            default_text=_BUILT_IN,
            minimum=0,
            maximum=1e6,
            above=True,
            metavar="SECONDS",
            help="Bounds of the buckets of the time between tokens, and of its mean over a request, in seconds.",
        ),
    ] = None

    bucket_e2e_request_latency: Annotated[
        tuple[float, ...] | None,
        ArgumentSpec(
            group="Metrics",
            default_text=_BUILT_IN,
            minimum=0,
            maximum=1e6,
            above=True,
            metavar="SECONDS",
            help="Bounds of the buckets of a request's duration, in seconds.",
        ),
    ] = None

    collect_tokens_histogram: Annotated[
        bool,
        ArgumentSpec(
            group="Metrics",
            help="Export histograms of the prompt and generated tokens of requests.",
        ),
    ] = False

    prompt_tokens_buckets: Annotated[
        tuple[str, ...],
        ArgumentSpec(
            group="Metrics",
            metavar="RULE",
            help=f"Buckets of prompt tokens: {_RULE}",
        ),
    ] = ()

    generation_tokens_buckets: Annotated[
        tuple[str, ...],
        ArgumentSpec(
            group="Metrics",
            metavar="RULE",
            help=f"Buckets of generated tokens: {_RULE}",
        ),
    ] = ()

    tokenizer_metrics_custom_labels_header: Annotated[
        str,
        ArgumentSpec(
            group="Metrics",
            server_only=True,
            metavar="HEADER",
            help="Header with a JSON object of a request's custom labels.",
        ),
    ] = "x-custom-labels"

    tokenizer_metrics_allowed_custom_labels: Annotated[
        tuple[str, ...],
        ArgumentSpec(
            group="Metrics",
            metavar="LABELS",
            help="Names of custom labels for metrics of requests. Beyond 100 different sets of values the rest is "
            "counted as other.",
        ),
    ] = ()

    export_metrics_to_file: Annotated[
        bool,
        ArgumentSpec(
            group="Metrics",
            help="Write a JSON line for each request at its end; needs --export-metrics-to-file-dir.",
        ),
    ] = False

    export_metrics_to_file_dir: Annotated[
        str | None,
        ArgumentSpec(
            group="Metrics",
            default_text="none",
            metavar="DIR",
            help="Directory of those lines; a new file begins every hour and every 64 MiB.",
        ),
    ] = None

    decode_log_interval: Annotated[
        int,
        ArgumentSpec(
            group="Logging",
            minimum=0,
            maximum=10**9,
            metavar="STEPS",
            help="Log the load every so many steps with decodes; 0 never.",
        ),
    ] = 0

    enable_request_time_stats_logging: Annotated[
        bool,
        ArgumentSpec(
            group="Logging",
            help="Log the time of each stage of a request at its end.",
        ),
    ] = False

    gc_warning_threshold_secs: Annotated[
        float,
        ArgumentSpec(
            group="Logging",
            minimum=0,
            maximum=3600,
            metavar="SECONDS",
            help="Warn when a garbage collection in the server's process takes longer than this; 0 never.",
        ),
    ] = 0.0
