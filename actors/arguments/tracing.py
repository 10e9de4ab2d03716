"""The arguments of traces."""

from __future__ import annotations

from actors.arguments.argument import Argument

__all__ = ["TRACING_ARGUMENTS"]

TRACING_ARGUMENTS: tuple[Argument, ...] = (
    Argument(
        name="enable-trace",
        kind="flag",
        default=False,
        group="Tracing",
        help="Trace requests and export the spans by OTLP; needs the extra otlp. OpenTelemetry's OTEL_ variables of "
        "the service's name, resource, headers, certificates and batches are respected.",
    ),
    Argument(
        name="oltp-traces-endpoint",
        aliases=("otlp-traces-endpoint",),
        kind="str",
        default=None,
        default_text="$OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, else localhost:4317",
        group="Tracing",
        metavar="ENDPOINT",
        help="The collector: HOST:PORT or a URL. Needs --enable-trace.",
    ),
    Argument(
        name="otlp-traces-protocol",
        kind="str",
        default=None,
        default_text="http/protobuf for a URL with a path and for port 4318, else grpc",
        choices=("grpc", "http/protobuf"),
        synonyms={"http": "http/protobuf"},
        group="Tracing",
        help="How spans travel to the collector. Needs --enable-trace.",
    ),
    Argument(
        name="trace-sample-ratio",
        kind="float",
        default=None,
        default_text="$OTEL_TRACES_SAMPLER, else 1",
        minimum=0,
        maximum=1,
        group="Tracing",
        metavar="RATIO",
        help="The part of the requests that are traced. A client that sends a traceparent has decided for its own, "
        "unless --ignore-client-traceparent is set.",
    ),
    Argument(
        name="ignore-client-traceparent",
        kind="flag",
        default=False,
        group="Tracing",
        help="Sample requests by --trace-sample-ratio whatever their traceparent says. A trace then begins here, with "
        "a link to the client's span. Needs --enable-trace.",
    ),
    Argument(
        name="trace-level",
        kind="int",
        default=1,
        minimum=0,
        maximum=3,
        group="Tracing",
        metavar="LEVEL",
        help="0 traces nothing until POST /set_trace_level, 1 requests with every hop, 2 steps too, 3 and the handlers "
        "of the actors.",
    ),
)
