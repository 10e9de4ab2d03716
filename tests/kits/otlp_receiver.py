"""A collector that stores received spans: OTLP over HTTP and over gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.kits.waiting import PATIENCE


class Received:
    """A received span with plain attributes. Ids are hexadecimal, times nanoseconds."""

    def __init__(self, resource: Any, span: Any) -> None:
        self.resource = _plain(resource.attributes)
        self.name: str = span.name
        self.kind: int = span.kind
        self.trace: str = span.trace_id.hex()
        self.id: str = span.span_id.hex()
        self.parent: str = span.parent_span_id.hex()
        self.start: int = span.start_time_unix_nano
        self.end: int = span.end_time_unix_nano
        self.attributes = _plain(span.attributes)
        self.events = [(event.name, _plain(event.attributes)) for event in span.events]
        self.links = [(link.trace_id.hex(), link.span_id.hex()) for link in span.links]
        self.failed: bool = span.status.code == 2
        self.message: str = span.status.message

    def __repr__(self) -> str:
        return f"<{self.name} {self.attributes}>"


def _plain(attributes: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


class Collector:
    """``endpoint``: where to send; ``spans``: received spans."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.headers: dict[str, str] = {}
        self._spans: list[Received] = []
        self._lock = threading.Lock()

    @property
    def spans(self) -> list[Received]:
        with self._lock:
            return list(self._spans)

    def take(self, request: ExportTraceServiceRequest) -> None:
        found = [
            Received(of_resource.resource, span)
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]
        with self._lock:
            self._spans += found

    def trace(self, trace: str) -> list[Received]:
        return [span for span in self.spans if span.trace == trace]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Block until the condition holds; for use in a thread."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if condition():
                return
            time.sleep(0.01)
        raise AssertionError(f"{what}: {self.spans}")


@contextmanager
def http_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf":
                collector.headers = dict(self.headers)
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
            else:
                self.send_response(404)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    collector.endpoint = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    collector = Collector()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
            collector.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    collector.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
