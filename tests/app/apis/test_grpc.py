"""The gRPC service, by a client of grpcio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from actors.options import ArgumentError, Arguments
from actors.protocol.requests import EngineFailed, QueueFull, RequestTimeout
from app.apis.grpc.messages import METHODS, SERVICE, message
from app.apis.grpc.transport import Call as ServerCall
from app.application import Troupe, create_app
from kernels.contract.adapters import AdapterSettings
from kernels.contract.pooling import PoolingConfig
from kernels.contract.tasks import Classify
from telemetry.traces.tracing import Tracing
from tests.kits.adapters import save_adapter
from tests.kits.engines import rest, small_engine
from tests.kits.fake_engine import ANSWER
from tests.kits.tiny_encoder import make_tiny_encoder

Call = grpc.StatusCode
KEY = (("authorization", "Bearer secret"),)
PROMPT = {"input_ids": [104, 105]}


class Client:
    """A stub of the service: a method by its name."""

    def __init__(self, channel: Any, port: int) -> None:
        self.channel, self.port = channel, port
        for name, (request, response, streams) in METHODS.items():
            make = channel.unary_stream if streams else channel.unary_unary
            method = make(
                f"/{SERVICE}/{name}",
                request_serializer=message(request).SerializeToString,
                response_deserializer=message(response).FromString,
            )
            setattr(self, name, method)

    def generate(self, metadata: Any = None, timeout: float | None = None, **fields: Any) -> Any:
        fields = {"tokenized": PROMPT, **fields}
        return self.__dict__["Generate"](message("GenerateRequest")(**fields), metadata=metadata, timeout=timeout)

    def ask(self, name: str, metadata: Any = None, **fields: Any) -> Any:
        return self.__dict__[name](message(METHODS[name][0])(**fields), metadata=metadata)


@asynccontextmanager
async def connected(application: Troupe) -> AsyncIterator[Client]:
    application.open_grpc()
    assert application.grpc is not None
    await application.grpc.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{application.grpc.port}") as channel:
        yield Client(channel, application.grpc.port)
    await application.grpc.stop()


@pytest.fixture
def served(make_application: Callable[..., Troupe]) -> Callable[..., Any]:
    def make(**arguments: Any) -> tuple[Any, Any]:
        application = make_application(grpc_mode=True, grpc_port=0, host="127.0.0.1", **arguments)
        engine: Any = application.engine
        engine.application = application
        return connected(application), engine

    return make


async def everything(call: Any) -> list[Any]:
    return [one async for one in call]


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await (everything(call) if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    return raised.value


async def test_tokens_stream_and_the_last_response_has_them_all(served: Any) -> None:
    connecting, engine = served()
    async with connecting as client:
        *chunks, last = await everything(client.generate(request_id="mine", stream=True))
        assert [token for one in chunks for token in one.chunk.token_ids] == list(range(1000, 1000 + len(ANSWER)))
        assert [one.chunk.completion_tokens for one in chunks] == list(range(1, len(ANSWER) + 1))
        assert {one.request_id for one in (*chunks, last)} == {"mine"}
        assert last.complete.output_ids == list(range(1000, 1000 + len(ANSWER)))
        assert (last.complete.finish_reason, last.complete.prompt_tokens) == ("stop", 2)
        [whole] = await everything(client.generate())
        assert whole.complete.output_ids == last.complete.output_ids
        assert whole.request_id.startswith("req-")
        choices = await everything(client.generate(sampling_params={"n": 3}))
        assert [one.complete.index for one in choices] == [0, 1, 2]
    assert engine.requests[0]["prompt"] == [104, 105]


async def test_the_sampling_of_a_request_is_the_engines(served: Any) -> None:
    connecting, engine = served()
    sampling = {
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 7,
        "max_new_tokens": 2,
        "stop_token_ids": [5],
        "stop": ["x"],
        "logit_bias": {"9": 1.5},
        "ignore_eos": True,
        "regex": "a+",
    }
    async with connecting as client:
        [whole] = await everything(client.generate(sampling_params=sampling, return_logprob=True, top_logprobs_num=1))
        assert whole.complete.finish_reason == "length"
        scored = whole.complete.output_logprobs
        assert (list(scored.token_ids), list(scored.token_logprobs)) == ([1000, 1001], [-0.5, -0.5])
        assert len(scored.top_logprobs) == 2
        prompt = whole.complete.input_logprobs
        assert list(prompt.token_ids) == [104, 105]
        assert [one.HasField("value") for one in prompt.token_logprobs] == [False, True]
        await everything(client.generate(return_logprob=True, logprob_start_len=-1))
        [text] = await everything(client.generate(tokenized={"original_text": "hi"}))
        assert text.complete.prompt_tokens == 2
    first, unset = engine.requests[0]["params"], engine.requests[1]["params"]
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (0.0, 0.5, 7, 2)
    assert (first.stop, first.stop_token_ids, first.logit_bias, first.ignore_eos) == (("x",), (5,), {9: 1.5}, True)
    assert first.grammar is not None
    assert (unset.temperature, unset.max_tokens, unset.default_max_tokens) == (None, None, None)
    assert unset.prompt_logprobs is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tokenized": {}}, "tokenized: holds no token"),
        ({"tokenized": {"input_ids": [2_000_000]}}, "tokenized"),
        ({"mm_inputs": {"image_urls": ["x"]}}, "mm_inputs: is not read"),
        ({"input_embeds": [1.0]}, "input_embeds: is not read"),
        ({"custom_logit_processor": "x"}, "custom_logit_processor: is code"),
        ({"return_hidden_states": True}, "return_hidden_states: has no place in a response"),
        ({"data_parallel_rank": 3}, "data_parallel_rank: is not supported"),
        ({"sampling_params": {"temperature": -1.0}}, "sampling_params.temperature"),
        ({"sampling_params": {"n": 100_000}}, "sampling_params.n"),
        ({"sampling_params": {"stream_interval": 5}}, "sampling_params.stream_interval"),
        ({"sampling_params": {"logit_bias": {"x": 1.0}}}, "sampling_params.logit_bias"),
        ({"return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
        ({"request_id": "x" * 300}, "rid"),
    ],
)  # fmt: skip
async def test_a_wrong_field_is_named(served: Any, fields: Any, named: str) -> None:
    connecting, _ = served()
    async with connecting as client:
        error = await error_of(client.generate(**fields))
        assert (error.code(), named in (error.details() or "")) == (Call.INVALID_ARGUMENT, True), error.details()


async def test_an_adapter_is_chosen_by_its_name(served: Any, tmp_path: Path) -> None:
    connecting, engine = served()
    engine.adapters.enabled = True
    engine.adapters.begin((), AdapterSettings(), {})
    file = save_adapter(tmp_path / "pirate", {"model.layers.0.self_attn.q_proj": (8, 8)}, 1)
    await engine.load_adapter("pirate", str(file))
    async with connecting as client:
        await everything(client.generate(lora_id="pirate"))
        await everything(client.generate())
        error = await error_of(client.generate(lora_id="parrot"))
        assert error.code() is Call.NOT_FOUND
    assert [request["adapter"] for request in engine.requests] == ["pirate", None]


async def test_a_field_of_another_version_is_not_dropped_in_silence(served: Any) -> None:
    connecting, _ = served()
    async with connecting as client:
        request = message("GenerateRequest")(tokenized=PROMPT).SerializeToString() + b"\xfa\x01\x01x"  # field 31
        error = await error_of(client.__dict__["Generate"](message("GenerateRequest").FromString(request)))
        assert (error.code(), "[31]" in (error.details() or "")) == (Call.INVALID_ARGUMENT, True)


async def test_long_prompts_arrive_and_longer_ones_are_refused(served: Any) -> None:
    connecting, engine = served()
    async with connecting as client:
        long = [104, 105] * 200_000
        await everything(client.generate(tokenized={"input_ids": long}))
        assert engine.requests[0]["prompt"] == long
        error = await error_of(client.generate(tokenized={"original_text": "x" * (9 << 20)}))
        assert (error.code(), "at most 8388608" in (error.details() or "")) == (Call.RESOURCE_EXHAUSTED, True)


async def test_what_the_transport_cannot_read_is_refused(served: Any) -> None:
    connecting, _ = served()
    async with connecting as client:

        def call(method: str, data: bytes, **keywords: Any) -> Any:
            return client.channel.unary_unary(f"/{SERVICE}/{method}")(data, **keywords)

        packed = await error_of(call("Embed", b"x" * 1000, compression=grpc.Compression.Gzip))
        assert (packed.code(), "ompressed" in (packed.details() or "")) == (Call.UNIMPLEMENTED, True)
        unknown = await error_of(call("Nothing%", b""))
        assert (unknown.code(), unknown.details()) == (Call.UNIMPLEMENTED, f"There is no method /{SERVICE}/Nothing%.")
        broken = await error_of(call("Embed", b"\xff\xff"))
        assert (broken.code(), "EmbedRequest" in (broken.details() or "")) == (Call.INVALID_ARGUMENT, True)
        async with httpx.AsyncClient() as http:
            plain = await http.post(f"http://127.0.0.1:{client.port}/{SERVICE}/Embed", content=b"")
            assert (plain.status_code, "gRPC" in plain.text) == (415, True)


async def test_a_call_ends_at_its_deadline(served: Any) -> None:
    connecting, engine = served()
    engine.gate, engine.gate_at = asyncio.Event(), 1
    async with connecting as client:
        late = client.generate((("grpc-timeout", "50m"),), stream=True)
        error = await error_of(late)
        assert error.code() == Call.DEADLINE_EXCEEDED
        assert engine.streams[0].closed


async def test_each_method_needs_a_key_but_health(served: Any) -> None:
    connecting, _ = served(api_key="secret")
    async with connecting as client:
        for metadata in (None, (("authorization", "Bearer wrong"),)):
            assert (await error_of(client.generate(metadata))).code() == Call.UNAUTHENTICATED
            for name in METHODS.keys() - {"Generate"}:
                assert (await error_of(client.ask(name, metadata))).code() == Call.UNAUTHENTICATED, name
        assert len(await everything(client.generate(KEY))) == 1
        assert len(await everything(client.generate((("x-api-key", "secret"),)))) == 1
        assert (await client.ask("HealthCheck", KEY)).healthy
        answer = await health_pb2_grpc.HealthStub(client.channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QueueFull("full", retry_after=5.0), Call.RESOURCE_EXHAUSTED),
        (RequestTimeout("late"), Call.DEADLINE_EXCEEDED),
        (EngineFailed("failed"), Call.UNAVAILABLE),
        (RuntimeError("boom"), Call.INTERNAL),
    ],
)
async def test_errors_of_the_engine_have_their_status(served: Any, error: Exception, code: Any) -> None:
    connecting, engine = served()
    async with connecting as client:
        engine.admission_error = error
        found = await error_of(client.generate())
        assert found.code() == code
        retry = dict(found.trailing_metadata()).get("retry-after")
        assert retry == ("5" if isinstance(error, QueueFull) else None)
        engine.admission_error, engine.stream_error, engine.fail_at = None, error, 2
        assert (await error_of(client.generate(stream=True))).code() == code
        engine.begin_drain()
        assert (await error_of(client.generate())).code() == Call.UNAVAILABLE
        assert not (await client.ask("HealthCheck")).healthy


async def test_a_client_that_leaves_frees_the_engine(served: Any, until: Any) -> None:
    connecting, engine = served()
    engine.gate, engine.gate_at = asyncio.Event(), 2
    async with connecting as client:
        call = client.generate(stream=True)
        async for _ in call:
            break
        call.cancel()
        await until(lambda: engine.streams[0].closed)
        assert engine.streams[0].aborted.is_set()
        late = client.generate(stream=True, timeout=3.0)
        assert (await error_of(late)).code() == Call.DEADLINE_EXCEEDED
        await until(lambda: engine.streams[1].closed)
    assert engine.requests[0]["timeout"] is None
    assert 0 < engine.requests[1]["timeout"] < 4.0  # gRPC rounds it up


async def test_an_aborted_request_ends_with_its_tokens_so_far(served: Any, until: Any) -> None:
    connecting, engine = served(api_key="secret,other")
    engine.gate, engine.gate_at = asyncio.Event(), 2
    async with connecting as client:
        call = client.generate(KEY, request_id="mine", stream=True)
        reading = asyncio.create_task(everything(call))
        await until(lambda: engine.streams and engine.streams[0].at_gate)
        others = await client.ask("Abort", (("authorization", "Bearer other"),), request_id="mine")
        assert not others.success
        assert (await client.ask("Abort", KEY, request_id="mine")).success
        *_, last = await reading
        assert (last.complete.finish_reason, list(last.complete.output_ids)) == ("abort", [1000, 1001])
        assert not (await client.ask("Abort", KEY, request_id="nothing")).success


async def test_a_stopping_server_ends_its_calls_with_a_reason(served: Any, until: Any) -> None:
    connecting, engine = served()
    engine.gate, engine.gate_at = asyncio.Event(), 1
    async with connecting as client:
        reading = asyncio.create_task(error_of(client.generate(stream=True)))
        await until(lambda: engine.streams and engine.streams[0].at_gate)
        application: Any = engine.application
        await application.drain(0)
        assert (await reading).code() == Call.UNAVAILABLE


async def test_health_is_watched_and_knows_its_services(served: Any) -> None:
    connecting, engine = served()
    status = health_pb2.HealthCheckResponse
    async with connecting as client:
        stub = health_pb2_grpc.HealthStub(client.channel)
        unknown = await error_of(stub.Check(health_pb2.HealthCheckRequest(service="caf\u00e9")))
        assert (unknown.code(), unknown.details()) == (Call.NOT_FOUND, "There is no service 'caf\u00e9' here.")
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == status.SERVING
        engine.healthy = False
        assert (await watch.read()).status == status.NOT_SERVING
        watch.cancel()
        unhealthy = await client.ask("HealthCheck")
        assert (unhealthy.healthy, unhealthy.message) == (False, "worker-0 owes a step")


async def test_reflection_describes_the_services_to_those_with_a_key(served: Any) -> None:
    connecting, _ = served(api_key="secret")

    def described(port: int) -> list[str]:
        """By the synchronous client of grpcio."""
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                ProtoReflectionDescriptorDatabase(channel).get_services()
            except grpc.RpcError as error:
                refused = error.code()
            database = ProtoReflectionDescriptorDatabase(grpc.intercept_channel(channel, _WithKey()))
            names = list(database.get_services())
            service = descriptor_pool.DescriptorPool(database).FindServiceByName(SERVICE)
            request = message_factory.GetMessageClass(service.methods_by_name["Generate"].input_type)
            assert request(request_id="a").request_id == "a"
            return [refused.name, *names]

    async with connecting as client:
        refused, *names = await asyncio.to_thread(described, client.port)
    assert refused == "UNAUTHENTICATED"
    assert {SERVICE, "grpc.health.v1.Health"} <= set(names)


class _WithKey(grpc.StreamStreamClientInterceptor):
    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=KEY), requests)


async def test_the_model_the_server_and_their_load_are_reported(served: Any) -> None:
    connecting, _ = served(weight_version="v7")
    async with connecting as client:
        model = await client.ask("GetModelInfo")
        assert (model.served_model_name, model.is_generation, model.weight_version) == ("fake", True, "v7")
        assert (model.max_context_length, list(model.architectures)) == (4096, ["FakeForCausalLM"])
        server = await client.ask("GetServerInfo")
        assert (server.server_type, server.max_total_num_tokens) == ("grpc", 200)
        assert server.server_args["weight_version"] == "v7"
        loads = await client.ask("GetLoads")
        assert [one.num_waiting_reqs for one in loads.loads] == [0, 1]
        assert (loads.dp_rank_count, loads.aggregate.total_waiting_reqs) == (2, 1)
        [one] = (await client.ask("GetLoads", dp_rank=1)).loads
        assert one.dp_rank == 1
        assert (await error_of(client.ask("GetLoads", dp_rank=2))).code() == Call.INVALID_ARGUMENT


async def test_calls_are_counted_by_their_methods(served: Any) -> None:
    connecting, engine = served(api_key="secret")
    async with connecting as client:
        await everything(client.generate(KEY))
        await error_of(client.generate())
    counted = {
        (sample.labels.get("endpoint"), sample.labels.get("status")): sample.value
        for metric in engine.registry.collect()
        for sample in metric.samples
        if "endpoint" in sample.labels and sample.name.endswith("_total")
    }
    path = f"/{SERVICE}/Generate"
    assert (counted.get((path, "200")), counted.get((path, "401"))) == (1.0, 1.0), counted


async def test_a_call_belongs_to_the_clients_trace(served: Any) -> None:
    connecting, engine = served()
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    async with connecting as client:
        await everything(client.generate((("traceparent", trace), ("x-request-id", "mine"))))
    assert (engine.requests[0]["traceparent"], engine.requests[0]["request_id"]) == (trace, "mine")
    timeline = engine.streams[0].timeline
    assert (timeline.operation, timeline.traceparent, timeline.label) == ("text_completion", trace, "mine")


@pytest.mark.usefixtures("warm_workers")
async def test_an_encoder_embeds_and_classifies_token_ids(tmp_path: Path) -> None:
    for name, labels in (("embeds", 0), ("classifies", 1)):
        make_tiny_encoder(tmp_path / name, labels=labels)
        arguments = Arguments(
            model_path=str(tmp_path / name), skip_server_warmup=True, grpc_mode=True, grpc_port=0, host="127.0.0.1"
        )
        async with small_engine(tmp_path / name) as engine, connected(create_app(arguments, engine)) as client:
            ids, second = await engine.tokenize_pair("paris", "the lazy dog")
            types = [int(place >= second) for place in range(len(ids))]
            fields: dict[str, Any] = {"tokenized": {"input_ids": ids}}
            if labels:
                fields["token_type_ids"] = types
                async with engine.generate(ids, task=Classify(False, second)) as stream:
                    result: Any = [delta.result async for delta in stream][-1]
                expected = tuple(memoryview(result.values).cast("f"))
            else:
                expected = await engine.embed(ids)
                pair = await error_of(client.ask("Embed", token_type_ids=types, **fields))
                assert (pair.code(), "token_type_ids" in (pair.details() or "")) == (Call.INVALID_ARGUMENT, True)
            found = await client.ask("Embed", **fields)
            assert list(found.embedding) == pytest.approx(expected, abs=1e-6)
            assert (found.embedding_dim, found.prompt_tokens) == (len(expected), len(ids))
            assert (await error_of(client.generate())).code() == Call.INVALID_ARGUMENT
            wrong = await error_of(client.ask("Embed", **(fields | {"token_type_ids": [1, 0]})))
            assert wrong.code() == Call.INVALID_ARGUMENT
            await rest(engine)


async def test_a_generating_model_embeds_nothing(served: Any) -> None:
    connecting, engine = served()
    async with connecting as client:
        error = await error_of(client.ask("Embed", tokenized=PROMPT))
        assert (error.code(), "generates text" in (error.details() or "")) == (Call.INVALID_ARGUMENT, True)
        engine.model_info = SimpleNamespace(pooling=PoolingConfig("embed", "last"), hidden_size=3)
        found = await client.ask("Embed", tokenized=PROMPT)
        assert list(found.embedding) == pytest.approx([0.6, 0.0, 0.8])


async def test_a_port_in_use_is_refused_by_its_name(make_application: Callable[..., Troupe]) -> None:
    first = make_application(grpc_mode=True, grpc_port=0, host="127.0.0.1")
    first.open_grpc()
    assert first.grpc is not None
    second = make_application(grpc_mode=True, grpc_port=first.grpc.port, host="127.0.0.1")
    with pytest.raises(ArgumentError, match="choose another --grpc-port"):
        second.open_grpc()
    await first.grpc.stop()


async def test_a_traced_call_has_a_span_of_its_own(served: Any) -> None:
    connecting, engine = served()
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine.tracing = Tracing(provider)
    async with connecting as client:
        await everything(client.generate((("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),)))
        await error_of(client.generate(tokenized={}))
    good, bad = exporter.get_finished_spans()
    assert good.context.trace_id == int("a" * 32, 16)
    assert engine.requests[0]["traceparent"].split("-")[2] == f"{good.context.span_id:016x}"
    statuses = [dict(span.attributes)["http.response.status_code"] for span in (good, bad)]
    assert (good.name, statuses) == (f"POST /{SERVICE}/Generate", [200, 400])


async def test_more_messages_than_a_call_takes_hold_no_reader(served: Any) -> None:
    connecting, _ = served()
    one = health_pb2.HealthCheckRequest(service="").SerializeToString()
    call = ServerCall([])
    framed = b"".join(b"\0" + len(one).to_bytes(4) + one for _ in range(50))
    reading = asyncio.create_task(call.feed(framed, whole=False))
    request = await call.request(health_pb2.HealthCheckRequest)
    await asyncio.wait_for(reading, 30)
    await asyncio.wait_for(call.feed(framed, whole=True), 30)
    assert request.service == ""
    async with connecting as client:
        large = await error_of(
            client.channel.unary_unary("/grpc.health.v1.Health/Check")(b"\x0a\xff\xff\x07" + b"x" * 131_071)
        )
        assert (large.code(), "at most 65536" in (large.details() or "")) == (Call.RESOURCE_EXHAUSTED, True)
