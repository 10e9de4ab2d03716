"""Traces as a collector gets them: a real server, a worker in a process of its own, OTLP over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import hypercorn.asyncio.run
import hypercorn.config
import hypercorn.utils
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from actors.engine.engine import Engine
from actors.options import Arguments
from actors.protocol.requests import SamplingParams
from app.application import Troupe, create_app
from tests.kits.engines import rest
from tests.kits.otlp_receiver import Collector, Received, grpc_collector, http_collector
from tests.kits.waiting import PATIENCE, until

CHAT = {"messages": [{"role": "user", "content": "one two three four " * 12}], "temperature": 0, "ignore_eos": True}
TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
HOPS = {"admission", "tokenize", "queue", "cache", "prefill", "decode", "detokenize", "stream"}
SERVER, INTERNAL = 2, 1

pytestmark = pytest.mark.asyncio(loop_scope="module")


def arguments(model: Path, **keywords: Any) -> Arguments:
    options: dict[str, Any] = {
        "model_path": str(model),
        "served_model_name": ("tiny",),
        "dtype": "float32",
        "cpu_threads": 1,
        "max_running_requests": 4,
        "max_queued_requests": 2,
        "chunked_prefill_size": 32,
        "max_total_tokens": 2048,
        "skip_server_warmup": True,
        "standby_worker": False,
        "api_key": "secret",
        "admin_api_key": "admin",
        "enable_trace": True,
    }
    return Arguments(**(options | keywords))


@asynccontextmanager
async def serving(given: Arguments) -> AsyncIterator[tuple[Troupe, httpx.AsyncClient]]:
    """A server in this loop, and a client of it."""
    application = create_app(given)
    config = hypercorn.config.Config()
    config.bind = ["127.0.0.1:0"]
    config.errorlog = None
    sockets = config.create_sockets()
    sockets.insecure_sockets[0].listen()
    url = f"http://127.0.0.1:{sockets.insecure_sockets[0].getsockname()[1]}"
    stop = asyncio.Event()
    wrapped = hypercorn.utils.wrap_app(application, config.wsgi_max_body_size, None)
    task = asyncio.create_task(
        hypercorn.asyncio.run.worker_serve(wrapped, config, sockets=sockets, shutdown_trigger=stop.wait)
    )
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer secret"}, timeout=PATIENCE) as client:
        await until(lambda: application.engine.status.phase == "ready", "not ready")
        yield application, client
    stop.set()
    await task


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with http_collector() as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tiny_model: Path, collector: Collector) -> AsyncIterator[tuple[Troupe, httpx.AsyncClient]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_SERVICE_NAME", "tested")
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-tenant=seven")
        async with serving(arguments(tiny_model, oltp_traces_endpoint=collector.endpoint)) as found:
            yield found


@pytest.fixture
def engine(served: tuple[Troupe, httpx.AsyncClient]) -> Engine:
    return served[0].engine


@pytest.fixture
def client(served: tuple[Troupe, httpx.AsyncClient]) -> httpx.AsyncClient:
    return served[1]


class Tree:
    """The spans of one trace, whole: every parent is there, and every span lies within it."""

    def __init__(self, spans: list[Received]) -> None:
        self.spans = spans
        by_id = {span.id: span for span in spans}
        assert len(by_id) == len(spans)
        self.root = next(span for span in spans if span.kind == SERVER)
        for span in spans:
            if span is self.root:
                continue
            parent = by_id[span.parent]
            assert parent.start <= span.start <= span.end <= parent.end, (parent, span)

    def one(self, name: str, **attributes: Any) -> Received:
        (found,) = self.all(name, **attributes)
        return found

    def all(self, name: str, **attributes: Any) -> list[Received]:
        subset = {f"troupe.{key}": value for key, value in attributes.items()}.items()
        return [span for span in self.spans if span.name == name and subset <= span.attributes.items()]

    def below(self, parent: Received) -> list[str]:
        return sorted(span.name for span in self.spans if span.parent == parent.id)


async def tree(collector: Collector, response: httpx.Response) -> Tree:
    """What a response's trace became, once its root, which ends last, has arrived."""
    trace = response.headers["traceparent"].split("-")[1]
    await asyncio.to_thread(
        collector.wait, lambda: any(span.kind == SERVER for span in collector.trace(trace)), "no server span"
    )
    return Tree(collector.trace(trace))


async def post(client: httpx.AsyncClient, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    return await client.post(path, json={**CHAT, "max_tokens": 8, **body})


async def test_a_streamed_request_is_one_trace_with_every_hop(
    client: httpx.AsyncClient, collector: Collector, engine: Engine
) -> None:
    await rest(engine)
    assert await engine.flush_cache()  # other tests have asked the same
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1", "baggage": "secret=1"}
    body = {**CHAT, "max_tokens": 8, "seed": 3, "top_p": 0.5, "stop": ["never"], "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        async for _ in response.aiter_bytes():
            pass
    answered = response.headers["traceparent"].split("-")
    assert answered[1] == TRACE
    assert answered[3] == "01"
    found = await tree(collector, response)

    root = found.root
    assert (root.parent, root.id) == (CALLER, answered[2])
    assert root.name == "POST /v1/chat/completions"
    assert not root.failed
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["http.route"] == root.attributes["url.path"] == "/v1/chat/completions"
    assert found.below(root) == ["chat tiny"]

    request = found.one("chat tiny")
    assert request.kind == INTERNAL
    assert not request.failed
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "troupe",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stream": True,
        "gen_ai.request.stop_sequences": ["never"],
        "gen_ai.response.id": response.headers["x-request-id"],
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    assert expected.items() <= request.attributes.items()
    assert "error.type" not in request.attributes
    assert 0 < request.attributes["gen_ai.response.time_to_first_chunk"] < 60
    assert [name for name, _ in request.events] == ["first_token"]

    chunks = -(-request.attributes["gen_ai.usage.input_tokens"] // 32)
    assert chunks > 2
    assert found.below(request) == sorted([*HOPS - {"prefill"}, *["prefill"] * chunks])
    for prefill in found.all("prefill"):
        assert found.below(prefill) == ["forward"]
    assert found.one("decode").attributes["troupe.tokens"] == 8
    assert len(found.spans) == 2 + 7 + 2 * chunks


async def test_workers_spans_bear_their_own_process(
    client: httpx.AsyncClient, collector: Collector, engine: Engine
) -> None:
    found = await tree(collector, await post(client))
    pid = int(engine.describe()["workers"][0]["pid"])
    assert pid != os.getpid()
    forwards = found.all("forward")
    assert forwards
    for span in forwards:
        assert span.resource["service.name"] == "tested"
        assert span.resource["service.instance.id"] == "worker-0"
        assert span.resource["process.pid"] == pid
        assert 0 < span.attributes["troupe.device_seconds"] <= (span.end - span.start) / 1e9
        assert span.attributes["troupe.queued_seconds"] > 0
    assert found.root.resource["process.pid"] == os.getpid()
    assert found.root.resource["service.instance.id"] != "worker-0"
    assert collector.headers["x-tenant"] == "seven"


async def test_each_choice_has_its_hops(client: httpx.AsyncClient, collector: Collector) -> None:
    found = await tree(collector, await post(client, n=2))
    assert found.one("chat tiny").attributes["gen_ai.request.choice.count"] == 2
    for choice in (0, 1):
        for name in ("queue", "cache", "decode", "detokenize"):
            assert len(found.all(name, choice=choice)) == 1, (name, choice)
        assert found.all("prefill", choice=choice)


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/v1/completions", "text_completion tiny", {"prompt": "one two", "max_tokens": 4}),
        ("/generate", "generate_content tiny", {"text": "one two", "sampling_params": {"max_new_tokens": 4}}),
    ],
)
async def test_other_operations_have_their_names(
    client: httpx.AsyncClient, collector: Collector, path: str, name: str, body: dict[str, Any]
) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    found = await tree(collector, response)
    assert found.below(found.root) == [name]


async def test_several_prompts_are_several_requests_of_one_exchange(
    client: httpx.AsyncClient, collector: Collector
) -> None:
    response = await client.post("/v1/completions", json={"prompt": ["one", "two"], "max_tokens": 2})
    found = await tree(collector, response)
    assert found.below(found.root) == ["text_completion tiny"] * 2
    assert all("decode" in found.below(request) for request in found.all("text_completion tiny"))


@pytest.mark.parametrize(
    ("change", "status", "error"),
    [
        ({"headers": {"Authorization": "Bearer wrong"}}, 401, "invalid_api_key"),
        ({"json": {"messages": 7}}, 400, None),
        ({"json": {**CHAT, "temperature": -1}}, 400, "InvalidRequest"),
        ({"json": {**CHAT, "max_tokens": 100000}}, 400, "InvalidRequest"),
    ],
)
async def test_refused_requests_are_traced(
    client: httpx.AsyncClient, collector: Collector, change: dict[str, Any], status: int, error: str | None
) -> None:
    response = await client.post("/v1/chat/completions", **({"json": CHAT} | change))
    assert response.status_code == status
    found = await tree(collector, response)
    assert found.root.attributes["http.response.status_code"] == status
    assert not found.root.failed  # the server is not at fault
    request = found.one("chat tiny")
    assert request.failed
    assert request.message
    reported = request.attributes["error.type"]
    assert reported == error or (error is None and reported)
    assert "admission" in found.below(request)
    assert "queue" not in found.below(request)
    assert not [name for name in request.attributes if name.startswith(("gen_ai.response.", "gen_ai.usage."))]


async def test_a_full_house_is_traced(client: httpx.AsyncClient, collector: Collector) -> None:
    responses = await asyncio.gather(*(post(client, n=3, max_tokens=200) for _ in range(3)))
    (refused,) = [response for response in responses if response.status_code == 429]
    found = await tree(collector, refused)
    request = found.one("chat tiny")
    assert request.attributes["error.type"] == "QueueFull"
    assert [name for name, _ in request.events] == ["rejected"]
    assert found.below(request) == ["admission"]


async def test_a_client_that_leaves_is_traced(client: httpx.AsyncClient, collector: Collector) -> None:
    body = {**CHAT, "max_tokens": 400, "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        await response.aiter_bytes().__anext__()
    found = await tree(collector, response)
    assert found.root.attributes["error.type"] == "disconnect"
    assert found.root.failed
    request = found.one("chat tiny")
    assert request.failed
    assert request.attributes["error.type"] == "abort"
    assert request.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert [name for name, _ in request.events] == ["first_token", "client_gone"]
    assert set(found.below(request)) >= HOPS


async def test_a_request_goes_on_in_its_trace_when_its_worker_is_killed(
    client: httpx.AsyncClient, collector: Collector, engine: Engine
) -> None:
    first = int(engine.describe()["workers"][0]["pid"])
    posted = asyncio.create_task(post(client, max_tokens=300))
    await until(lambda: any(t.output_tokens or t.marks for t in engine.timelines.live()), "nothing runs")
    os.kill(first, signal.SIGKILL)
    response = await posted
    assert response.status_code == 200
    found = await tree(collector, response)
    request = found.one("chat tiny")
    assert not request.failed
    assert [name for name, _ in request.events] == ["first_token", "worker_died", "resumed"]
    assert "SIGKILL" in dict(request.events)["worker_died"]["troupe.reason"]
    assert [bool(span.attributes.get("troupe.resumed")) for span in found.all("queue")] == [False, True]
    assert len(found.all("decode")) == len(found.all("cache")) == 2
    workers = {span.resource["process.pid"] for span in found.all("forward")}
    assert workers == {first, int(engine.describe()["workers"][0]["pid"])}


async def test_what_the_client_does_not_sample_is_not_exported(client: httpx.AsyncClient, collector: Collector) -> None:
    trace = "1" * 32
    response = await client.post(
        "/v1/chat/completions", json={**CHAT, "max_tokens": 2}, headers={"traceparent": f"00-{trace}-{CALLER}-00"}
    )
    assert response.headers["traceparent"].startswith(f"00-{trace}-")
    assert response.headers["traceparent"].endswith("-00")
    await tree(collector, await post(client, max_tokens=1))  # a later one has arrived
    assert not collector.trace(trace)


async def test_probes_and_lists_are_not_traced(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/metrics", "/v1/models"):
        assert "traceparent" not in (await client.get(path)).headers


async def test_steps_have_traces_of_their_own_from_level_two_on(
    client: httpx.AsyncClient, collector: Collector, engine: Engine
) -> None:
    admin = {"Authorization": "Bearer admin"}
    assert (await client.post("/set_trace_level", json={"level": 2})).status_code == 401
    assert (await client.post("/set_trace_level", json={"level": 9}, headers=admin)).status_code == 400
    before = {span.id for span in collector.spans}
    assert (await client.post("/set_trace_level?level=2", headers=admin)).status_code == 200
    try:
        found = await tree(collector, await post(client, max_tokens=4))
    finally:
        assert (await client.post("/set_trace_level", json={"level": 1}, headers=admin)).status_code == 200
    request = found.one("chat tiny")
    steps = [span for span in collector.spans if span.name == "step" and span.id not in before]
    assert len(steps) >= len(found.all("prefill")) + 3
    for step in steps:
        assert step.links == [(request.trace, request.id)]
        assert step.trace != request.trace
        assert not step.parent
        assert step.attributes["troupe.device_seconds"] > 0
        (forward,) = [span for span in collector.trace(step.trace) if span is not step]
        assert (forward.name, forward.parent) == ("forward", step.id)
        assert forward.resource["service.instance.id"] == "worker-0"
        assert step.start <= forward.start <= forward.end <= step.end
    assert {step.attributes["troupe.prefills"] for step in steps} == {0, 1}


async def test_handlers_have_spans_at_level_three(
    client: httpx.AsyncClient, collector: Collector, engine: Engine
) -> None:
    assert engine.tracing is not None
    engine.tracing.level = 3
    try:
        found = await tree(collector, await post(client, max_tokens=2))
    finally:
        engine.tracing.level = 1
    request = found.one("chat tiny")
    assert {"tokenizer-0 Encode", "scheduler Submit"} <= set(found.below(request))
    assert found.one("scheduler Submit").attributes["troupe.wait"] >= 0


async def test_nothing_was_lost_and_nothing_global_was_set(engine: Engine, client: httpx.AsyncClient) -> None:
    from opentelemetry import trace

    assert engine.tracing is not None
    tracing, before = engine.tracing, engine.tracing.exported
    await post(client)
    await until(lambda: tracing.exported >= before + 9)
    assert tracing.dropped == 0
    (reported,) = [line for line in (await client.get("/metrics")).text.splitlines() if 'outcome="dropped"' in line]
    assert reported.startswith("troupe_trace_spans_total")
    assert reported.endswith(" 0.0")
    assert type(trace.get_tracer_provider()).__name__ == "ProxyTracerProvider"


async def test_every_rank_adds_its_own_spans(tiny_model: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = Engine(
        model=str(tiny_model),
        dtype="float32",
        cpu_threads=1,
        max_running_requests=2,
        max_total_tokens=1024,
        tensor_parallel_size=2,
        standby_worker=False,
        tracer_provider=provider,
    )
    async with engine:
        async for _ in engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)):
            pass
        pids = {worker["name"]: worker["pid"] for worker in engine.describe()["workers"]}
    spans = exporter.get_finished_spans()
    (prefill,) = [span for span in spans if span.name == "prefill"]
    forwards = [span for span in spans if span.name == "forward"]
    assert prefill.context is not None
    assert all(span.parent is not None and span.parent.span_id == prefill.context.span_id for span in forwards)
    reported = [dict(span.attributes or {}) for span in forwards]
    assert {one["service.instance.id"]: one["process.pid"] for one in reported} == pids
    assert sorted(int(str(one["troupe.rank"])) for one in reported) == [0, 1]


async def test_grpc_gets_the_same(tiny_model: Path) -> None:
    with grpc_collector() as collector:
        async with serving(arguments(tiny_model, oltp_traces_endpoint=collector.endpoint)) as (application, client):
            response = await post(client)
            engine = application.engine
        # Closing the engine has sent what was waiting.
        found = Tree(collector.trace(response.headers["traceparent"].split("-")[1]))
        assert set(found.below(found.one("chat tiny"))) >= HOPS
        assert found.all("forward")
        assert engine.tracing is not None
        assert (engine.tracing.dropped, engine.tracing.exported) == (0, len(collector.spans))
