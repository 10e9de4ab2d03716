"""The arguments of metrics, and of the log lines that tell of load and time."""

from __future__ import annotations

from actors.arguments.argument import Argument

__all__ = ["METRIC_ARGUMENTS"]

_BUILT_IN = "the built-in ones"
_RULE = "default, tse MIDDLE BASE COUNT (bounds on both sides of the middle), or custom and the bounds."

METRIC_ARGUMENTS: tuple[Argument, ...] = (
    Argument(
        name="enable-metrics",
        kind="flag",
        default=True,
        group="Metrics",
        help="Measure, and answer GET /metrics. Without it the live page shows no traffic between the actors.",
    ),
    Argument(
        name="metrics-names",
        kind="names",
        default=(),
        choices=("sglang", "vllm"),
        group="Metrics",
        metavar="NAMES",
        help="Export the metrics that dashboards of these engines read under those names too, separated by commas.",
    ),
    Argument(
        name="bucket-time-to-first-token",
        kind="floats",
        default=None,
        default_text=_BUILT_IN,
        minimum=0,
        maximum=1e6,
        above=True,
        group="Metrics",
        metavar="SECONDS",
        help="Bounds of the buckets of the time to the first token, in seconds.",
    ),
    Argument(
        name="bucket-inter-token-latency",
        kind="floats",
        default=None,
        default_text=_BUILT_IN,
        minimum=0,
        maximum=1e6,
        above=True,
        group="Metrics",
        metavar="SECONDS",
        help="Bounds of the buckets of the time between tokens, and of its mean over a request, in seconds.",
    ),
    Argument(
        name="bucket-e2e-request-latency",
        kind="floats",
        default=None,
        default_text=_BUILT_IN,
        minimum=0,
        maximum=1e6,
        above=True,
        group="Metrics",
        metavar="SECONDS",
        help="Bounds of the buckets of a request's duration, in seconds.",
    ),
    Argument(
        name="collect-tokens-histogram",
        kind="flag",
        default=False,
        group="Metrics",
        help="Export histograms of the prompt and generated tokens of requests.",
    ),
    Argument(
        name="prompt-tokens-buckets",
        kind="words",
        default=(),
        group="Metrics",
        metavar="RULE",
        help=f"Buckets of prompt tokens: {_RULE}",
    ),
    Argument(
        name="generation-tokens-buckets",
        kind="words",
        default=(),
        group="Metrics",
        metavar="RULE",
        help=f"Buckets of generated tokens: {_RULE}",
    ),
    Argument(
        name="tokenizer-metrics-custom-labels-header",
        kind="str",
        default="x-custom-labels",
        group="Metrics",
        metavar="HEADER",
        help="Header whose JSON object gives a request's custom labels.",
    ),
    Argument(
        name="tokenizer-metrics-allowed-custom-labels",
        kind="words",
        default=(),
        group="Metrics",
        metavar="LABELS",
        help="Names of custom labels to put on the metrics of requests. Past 100 different sets of values the rest is "
        "counted as other.",
    ),
    Argument(
        name="export-metrics-to-file",
        kind="flag",
        default=False,
        group="Metrics",
        help="Write a JSON line for each request at its end; needs --export-metrics-to-file-dir.",
    ),
    Argument(
        name="export-metrics-to-file-dir",
        kind="str",
        default=None,
        default_text="none",
        group="Metrics",
        metavar="DIR",
        help="Directory of those lines; a new file begins every hour and every 64 MiB.",
    ),
    Argument(
        name="decode-log-interval",
        kind="int",
        default=0,
        minimum=0,
        maximum=10**9,
        group="Logging",
        metavar="STEPS",
        help="Log the load once in so many steps that decode; 0 never.",
    ),
    Argument(
        name="enable-request-time-stats-logging",
        kind="flag",
        default=False,
        group="Logging",
        help="Log where each request's time went, at its end.",
    ),
    Argument(
        name="gc-warning-threshold-secs",
        kind="float",
        default=0.0,
        minimum=0,
        maximum=3600,
        group="Logging",
        metavar="SECONDS",
        help="Warn of a garbage collection of the server's process that takes longer; 0 never.",
    ),
)
