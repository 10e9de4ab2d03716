"""The arguments of traces."""

from __future__ import annotations

from typing import Annotated, Literal

from actors.options.declaration import ArgumentSpec
from actors.options.logs import LogArguments

__all__ = ["TracingArguments"]


class TracingArguments(LogArguments, frozen=True, kw_only=True):
    """The arguments of traces."""

    enable_trace: Annotated[
        bool,
        ArgumentSpec(
            group="Tracing",
            help="Trace requests and export the spans by OTLP; needs the extra otlp. OpenTelemetry's OTEL_ variables "
            "for service name, resource, headers, certificates and batches are respected.",
        ),
    ] = False

    oltp_traces_endpoint: Annotated[
        str | None,
        ArgumentSpec(
            group="Tracing",
            aliases=("otlp-traces-endpoint",),
            default_text="$OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, else localhost:4317",
            metavar="ENDPOINT",
            help="The collector: HOST:PORT or a URL. Needs --enable-trace.",
        ),
    ] = None

    otlp_traces_protocol: Annotated[
        Literal["grpc", "http/protobuf"] | None,
        ArgumentSpec(
            group="Tracing",
            default_text="http/protobuf for a URL with a path and for port 4318, else grpc",
            synonyms={"http": "http/protobuf"},
            help="Protocol of the export. Needs --enable-trace.",
        ),
    ] = None

    trace_sample_ratio: Annotated[
        float | None,
        ArgumentSpec(
            group="Tracing",
            default_text="$OTEL_TRACES_SAMPLER, else 1",
            minimum=0,
            maximum=1,
            metavar="RATIO",
            help="The share of requests to trace. A client's traceparent decides for its own requests, unless "
            "--ignore-client-traceparent is set.",
        ),
    ] = None

    ignore_client_traceparent: Annotated[
        bool,
        ArgumentSpec(
            group="Tracing",
            help="Sample requests by --trace-sample-ratio and ignore their traceparent. Each trace then begins here, "
            "with a link to the client's span. Needs --enable-trace.",
        ),
    ] = False

    trace_level: Annotated[
        int,
        ArgumentSpec(
            group="Tracing",
            minimum=0,
            maximum=3,
            metavar="LEVEL",
            help="0 traces nothing until POST /set_trace_level, 1 requests with every hop, 2 also steps, 3 also the "
            "handlers of the actors.",
        ),
    ] = 1
