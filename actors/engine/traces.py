"""Traces of an engine, exported as its arguments say or by the provider of the embedding service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.options import ArgumentError, Arguments

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from telemetry.traces.tracing import Tracing

__all__ = ["check_tracing", "start_tracing"]


def check_tracing(arguments: Arguments, provider: TracerProvider | None) -> None:
    """Raise ArgumentError for contradictory arguments of traces."""
    if provider is not None and arguments.enable_trace:
        raise ArgumentError(["tracer_provider: the service's provider has its own exporter; leave enable_trace out"])
    if provider is None and not arguments.enable_trace and arguments.trace_level != 1:
        raise ArgumentError(["trace_level needs enable_trace, or in Python a tracer_provider"])
    if arguments.enable_trace:
        from telemetry.traces.export import destination, is_installed

        if not is_installed():
            raise ArgumentError(["enable_trace needs the OTLP exporters: pip install 'troupe-llm[otlp]'"])
        try:
            destination(arguments.oltp_traces_endpoint, arguments.otlp_traces_protocol)
        except ValueError as error:
            raise ArgumentError([f"oltp_traces_endpoint: {error}"]) from None


def start_tracing(arguments: Arguments, provider: TracerProvider | None) -> Tracing | None:
    """Start traces if they are enabled. OpenTelemetry's SDK is imported only here."""
    if provider is None and not arguments.enable_trace:
        return None
    from telemetry.traces.tracing import Tracing

    if provider is not None:
        return Tracing(provider, level=arguments.trace_level)
    from telemetry.traces.export import TraceExport, TraceOptions

    export = TraceExport(
        TraceOptions(
            endpoint=arguments.oltp_traces_endpoint,
            protocol=arguments.otlp_traces_protocol,
            ratio=arguments.trace_sample_ratio,
        )
    )
    return Tracing(
        export.provider,
        level=arguments.trace_level,
        export=export,
        ignore_client_parent=arguments.ignore_client_traceparent,
    )
