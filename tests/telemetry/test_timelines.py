"""What an engine writes into the timelines of its requests, with a worker in a real child process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from actors.engine.engine import Engine
from actors.faults import Fault, FaultPlan
from actors.protocol.requests import (
    Chat,
    InvalidRequest,
    QueueFull,
    RequestAborted,
    RequestFailed,
    RequestTimeout,
    SamplingParams,
)
from actors.requests.streams import RequestStream
from actors.runtime import Event, EventKind
from telemetry.timeline import Hop, Outcome, RequestTimeline, Timelines
from tests.kits import engines
from tests.kits.waiting import until

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)

pytestmark = pytest.mark.asyncio(loop_scope="module")

small_engine = partial(
    engines.small_engine,
    max_running_requests=4,
    max_queued_requests=4,
    chunked_prefill_size=32,
    max_total_tokens=1024,
    standby_worker=False,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path) -> AsyncIterator[Engine]:
    async with small_engine(tiny_model) as started:
        yield started


async def read_out(stream: RequestStream) -> None:
    async with asyncio.timeout(60):
        async for _ in stream:
            pass


async def record(engine: Engine, stream: RequestStream) -> RequestTimeline:
    await read_out(stream)
    return recorded(engine, stream)


def recorded(engine: Engine, stream: RequestStream) -> RequestTimeline:
    timeline = engine.timelines.find(stream.request_id)
    assert timeline is not None
    return timeline


def hops(timeline: RequestTimeline, name: str, choice: int | None = 0) -> list[Hop]:
    return [hop for hop in timeline.hops if (hop.name, hop.choice) == (name, choice)]


def marks(timeline: RequestTimeline) -> list[str]:
    return [mark.name for mark in timeline.marks]


def check_whole(timeline: RequestTimeline) -> None:
    assert timeline.end is not None
    assert timeline.outcome is not None
    for hop in timeline.hops:
        assert hop.end is not None
        assert timeline.started <= hop.start <= hop.end <= timeline.end, hop


async def test_a_request_passes_every_hop_in_order(engine: Engine) -> None:
    params = msgspec.structs.replace(GREEDY, temperature=0.5, seed=3, stop=("never",))
    timeline = await record(engine, engine.generate("one two three four " * 12, params, request_id="mine"))
    check_whole(timeline)
    assert timeline.label == "mine"
    assert timeline.operation == "text_completion"
    assert timeline.request == {
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stop_sequences": ("never",),
    }
    assert timeline.outcome is not None
    assert timeline.outcome.error_type == ""
    assert timeline.outcome.finish_reasons == ("length",)
    names = list(dict.fromkeys(hop.name for hop in timeline.hops))
    assert names == ["admission", "tokenize", "queue", "cache", "prefill", "decode", "detokenize", "stream"]
    assert marks(timeline) == ["first_token"]

    (tokenize,) = hops(timeline, "tokenize", None)
    assert tokenize.attributes["tokens"] == timeline.prompt_tokens > 32
    assert tokenize.attributes["characters"] == len("one two three four " * 12)
    assert 0 <= float(str(tokenize.attributes["wait"])) <= (tokenize.end or 0.0) - tokenize.start
    prefills = hops(timeline, "prefill")
    assert len(prefills) == -(-timeline.prompt_tokens // 32)
    assert sum(int(str(hop.attributes["tokens"])) for hop in prefills) == timeline.prompt_tokens
    assert [hop.attributes["position"] for hop in prefills] == list(range(0, timeline.prompt_tokens, 32))
    assert all(float(str(hop.attributes["device_seconds"])) > 0 for hop in prefills)
    assert {hop.attributes["worker"] for hop in prefills} == {"worker-0"}
    (decode,) = hops(timeline, "decode")
    assert decode.attributes == {"tokens": 12, "steps": 11, "preemptions": 0}
    (detokenize,) = hops(timeline, "detokenize")
    assert detokenize.attributes["tokens"] == timeline.output_tokens == 12
    (stream,) = hops(timeline, "stream", None)
    assert 1 <= int(str(stream.attributes["deltas"])) <= 12


async def test_the_cache_hop_reports_what_was_found(engine: Engine) -> None:
    prompt = list(range(5, 60))
    await read_out(engine.generate(prompt, GREEDY))
    timeline = await record(engine, engine.generate(prompt, GREEDY))
    (cache,) = hops(timeline, "cache")
    assert cache.attributes == {"cached_tokens": 48, "pages": 3}
    assert timeline.cached_tokens == 48
    assert [hop.attributes["position"] for hop in hops(timeline, "prefill")] == [48]
    assert not hops(timeline, "tokenize", None)  # there was nothing to encode


async def test_each_choice_has_its_own_hops(engine: Engine) -> None:
    chat = Chat(messages=[{"role": "user", "content": "Hello"}])
    timeline = await record(engine, engine.generate(chat, msgspec.structs.replace(GREEDY, n=2)))
    check_whole(timeline)
    assert timeline.operation == "chat"
    (tokenize,) = hops(timeline, "tokenize", None)
    assert int(str(tokenize.attributes["characters"])) > len("Hello")  # as the template has rendered it
    assert float(str(tokenize.attributes["render"])) > 0
    for choice in (0, 1):
        for name in ("queue", "cache", "prefill", "decode", "detokenize"):
            assert len(hops(timeline, name, choice)) == 1, (name, choice)
    assert marks(timeline) == ["first_token", "first_token"]
    assert timeline.outcome is not None
    assert timeline.outcome.finish_reasons == ("length", "length")
    assert timeline.output_tokens == 24


async def test_a_choice_that_a_string_stops_ends_its_hops(engine: Engine) -> None:
    params = msgspec.structs.replace(LONG, stop=tuple("abcdefghijklmnop"))
    timeline = await record(engine, engine.generate([5, 6, 7], params))
    check_whole(timeline)
    (decode,) = hops(timeline, "decode")
    assert decode.attributes["tokens"] == timeline.output_tokens < 400


async def test_a_preempted_request_reports_each_stay(tiny_model: Path) -> None:
    async with small_engine(tiny_model, max_total_tokens=320, schedule_conservativeness=0) as engine:
        streams = [
            engine.generate([5 + number] * 40, msgspec.structs.replace(LONG, max_tokens=200)) for number in (0, 1)
        ]
        timelines = [recorded(engine, stream) for stream in streams]
        await asyncio.gather(*map(read_out, streams))
    victims = [timeline for timeline in timelines if "preempted" in marks(timeline)]
    assert victims
    for timeline in victims:
        check_whole(timeline)
        stays = len(hops(timeline, "decode"))
        assert marks(timeline).count("resumed") == marks(timeline).count("preempted") == stays - 1
        assert [hop.attributes.get("resumed", False) for hop in hops(timeline, "queue")] == [False] + [True] * (
            stays - 1
        )
        assert sum(int(str(hop.attributes["tokens"])) for hop in hops(timeline, "decode")) == 200
        assert len(hops(timeline, "cache")) == stays
        assert marks(timeline).count("first_token") == 1


async def test_a_killed_worker_is_seen_in_what_it_ran(tiny_model: Path) -> None:
    async with small_engine(tiny_model) as engine:
        stream = engine.generate([5] * 40, LONG)
        timeline = recorded(engine, stream)
        reader = asyncio.create_task(read_out(stream))
        await until(lambda: hops(timeline, "decode"), "no decode")
        assert engine._system is not None
        events: list[Event] = []
        engine._system.on_event(events.append)
        os.kill(int(engine.describe()["workers"][0]["pid"]), signal.SIGKILL)
        await reader
    check_whole(timeline)
    assert marks(timeline) == ["first_token", "worker_died", "resumed"]
    died = timeline.marks[1]
    assert [died.at] == [event.at for event in events if event.kind is EventKind.DIED]
    assert died.choice == 0
    assert "SIGKILL" in str(died.attributes["reason"])
    assert [hop.attributes.get("resumed", False) for hop in hops(timeline, "queue")] == [False, True]
    assert len(hops(timeline, "decode")) == 2
    assert timeline.outcome is not None
    assert timeline.outcome.error_type == ""


async def test_a_request_that_is_quarantined_reports_it(tiny_model: Path) -> None:
    with FaultPlan() as plan:
        async with small_engine(tiny_model, faults=plan) as engine:
            stream = engine.generate([5] * 40, LONG)
            timeline = recorded(engine, stream)
            reader = asyncio.create_task(read_out(stream))
            await until(lambda: hops(timeline, "decode"), "no decode")
            plan.add(Fault("decode", "kill", mark=5))
            with pytest.raises(RequestFailed):
                await reader
    check_whole(timeline)
    died = ["worker_died", "resumed"]
    assert marks(timeline) == ["first_token", *died, *died, "worker_died", "quarantined"]
    assert timeline.outcome is not None
    assert (timeline.outcome.error_type, timeline.outcome.finish_reasons) == ("RequestFailed", ("error",))


async def test_a_new_scheduler_queues_what_ran(engine: Engine) -> None:
    stream = engine.generate([5] * 40, LONG)
    timeline = recorded(engine, stream)
    reader = asyncio.create_task(read_out(stream))
    await until(lambda: hops(timeline, "decode"), "no decode")
    assert engine._system is not None
    engine._system.crash_actor("scheduler", RuntimeError("injected"))
    await reader
    check_whole(timeline)
    assert marks(timeline) == ["first_token", "resumed"]
    assert [hop.attributes.get("resumed", False) for hop in hops(timeline, "queue")] == [False, True]


async def test_aborted_abandoned_and_overdue_requests_end_as_such(engine: Engine) -> None:
    aborted = engine.generate([5] * 40, LONG)
    reader = asyncio.create_task(read_out(aborted))
    timeline = recorded(engine, aborted)
    await until(lambda: hops(timeline, "decode"), "no decode")
    await engine.abort(aborted.request_id)
    with pytest.raises(RequestAborted):
        await reader
    check_whole(timeline)
    assert marks(timeline)[-1] == "aborted"
    assert timeline.outcome is not None
    assert (timeline.outcome.error_type, timeline.outcome.finish_reasons) == ("abort", ("abort",))

    left = engine.generate([5] * 40, LONG)
    timeline = recorded(engine, left)
    await left.__anext__()
    await left.aclose()
    check_whole(timeline)
    assert marks(timeline)[-1] == "client_gone"
    assert timeline.outcome is not None
    assert timeline.outcome.error_type == "abort"

    late = engine.generate([5] * 40, LONG, timeout=0.05)
    timeline = recorded(engine, late)
    with pytest.raises(RequestTimeout):
        await read_out(late)
    assert marks(timeline)[-1] == "deadline"
    assert timeline.outcome is not None
    assert timeline.outcome.error_type == "RequestTimeout"


async def test_refused_requests_have_a_timeline_that_ends_at_admission(engine: Engine) -> None:
    with pytest.raises(InvalidRequest):
        engine.generate([5], SamplingParams(temperature=-1))
    timeline = engine.timelines.recent[-1]
    check_whole(timeline)
    assert marks(timeline) == ["rejected"]
    assert timeline.outcome is not None
    assert timeline.outcome.error_type == "InvalidRequest"
    assert "temperature" in timeline.outcome.message

    admitted = engine.generate([5], GREEDY)
    with pytest.raises(QueueFull):
        engine.generate([5], msgspec.structs.replace(GREEDY, n=8))
    assert engine.timelines.recent[-1].outcome is not None
    assert engine.timelines.recent[-1].outcome.error_type == "QueueFull"
    await read_out(admitted)

    with pytest.raises(InvalidRequest):
        await engine.generate("", GREEDY).ready()
    timeline = engine.timelines.recent[-1]
    assert [hop.name for hop in timeline.hops] == ["admission", "tokenize"]
    assert timeline.outcome is not None
    assert timeline.outcome.error_type == "InvalidRequest"
    assert not list(engine.timelines.live())


async def test_a_timeline_ends_once_and_takes_nothing_afterwards() -> None:
    reported: list[str] = []

    class Listener:
        def began(self, timeline: RequestTimeline) -> None:
            reported.append("began")

        def hop_ended(self, timeline: RequestTimeline, hop: Hop) -> None:
            reported.append(hop.name)

        def marked(self, timeline: RequestTimeline, mark: object) -> None:
            reported.append("mark")

        def ended(self, timeline: RequestTimeline) -> None:
            reported.append("ended")

    timelines = Timelines(keep=1)
    timelines.listen(Listener())
    timeline = timelines.open("a", operation="chat", model="m")
    for number in range(300):
        timeline.finish(timeline.begin("prefill", 1.0 + number, 0), 2.0 + number)
    assert len(timeline.hops) == 256
    timelines.close(timeline, Outcome())
    timelines.close(timeline, Outcome(error_type="again"))
    timeline.mark("late", 3.0)
    assert timeline.outcome == Outcome()
    assert reported == ["began", *["prefill"] * 300, "admission", "ended"]
    assert timelines.find("a") is timeline
    timelines.close(timelines.open("b", operation="chat", model="m"), Outcome())
    assert timelines.find("a") is None
