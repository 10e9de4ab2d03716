"""The feed of the live page: what a frame holds, what it hides, who may look, and what looking costs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from types import SimpleNamespace

import httpx
import msgspec
import pytest

from actors.options import Arguments
from actors.requests.adapters import Adapters
from actors.runtime import ActorStatus
from app.live.feed import frames
from app.live.feed.frames import MAX_ADAPTERS, MAX_VIEWERS
from app.live.feed.graph import edges
from app.live.feed.requests import RequestViews
from kernels.contract.adapters import AdapterInfo
from telemetry.metrics.actor_messages import ActorMessages
from telemetry.timeline import Outcome, Timelines
from tests.kits.waiting import PATIENCE

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def status(name, state="running", incarnation=0, depth=0):
    return ActorStatus(
        name=name,
        state=state,
        incarnation=incarnation,
        pid=None,
        mailbox={"data": depth, "control": 1},
        message=None,
        message_age=None,
        heartbeat_age=None,
    )


def handle(traffic, actor, message, times=1):
    for _ in range(times):
        traffic.handled(actor, message, wait=0.5, duration=0.25, depth=0, traceparent=None, error=None)


async def events(url, path, count, **keywords):
    """The first ``count`` frames of a feed."""
    found = []
    async with httpx.AsyncClient(timeout=60) as client, client.stream("GET", url + path, **keywords) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                found.append(msgspec.json.decode(line[6:]))
            if len(found) == count:
                break
    return found


async def frame(application):
    response = await application.test_client().get("/stage?frames=1")
    data = (await response.get_data()).decode()
    first, done, rest = data.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return msgspec.json.decode(first.removeprefix("data: "))


def request_of(engine, name="req-1", **keywords):
    return engine.timelines.open(name, operation="chat", model="fake", traceparent=TRACE, **keywords)


async def test_a_frame_reports_actors_and_what_goes_between_them(application, engine):
    engine.company = [status("scheduler", depth=3), status("worker-0", "restarting", incarnation=2)]
    handle(engine.actor_messages, "scheduler", "Submit", 5)
    handle(engine.actor_messages, "scheduler", "StepDone", 7)
    answer = await frame(application)
    assert answer["whole"]
    assert answer["model"]["name"] == "fake"
    assert answer["restarts"] == 2
    scheduler, worker = answer["actors"]
    assert (scheduler["role"], scheduler["depth"], scheduler["handled"], scheduler["busy"]) == ("scheduler", 4, 12, 3.0)
    assert (worker["role"], worker["state"], worker["restarts"]) == ("worker", "restarting", 2)
    ways = {(edge["source"], edge["target"]): edge["count"] for edge in answer["edges"]}
    assert ways["tokenizer", "scheduler"] == 5
    assert ways["worker", "scheduler"] == 7


@pytest.fixture
def adapters(engine):
    infos = [AdapterInfo(name, 8, ("q_proj",)) for name in ("pirate", "poet")]
    engine.adapters = Adapters(Arguments.from_keywords(lora_paths=["pirate=a", "poet=b"]), list)
    engine.adapters.begin(infos, None, {})
    return engine.adapters


async def test_a_frame_reports_adapters_with_their_requests_and_places(application, engine, adapters):
    poet = adapters.find("poet")
    engine.board.resident_adapters = (poet.index,)
    for _ in range(3):
        adapters.use(poet)
    adapters.leave(poet)
    timeline = request_of(engine, request={"troupe.adapter": "poet"})
    timeline.begin("queue", time.monotonic(), 0)
    answer = await frame(application)
    assert answer["adapters"] == [
        {"name": "poet", "requests": 3, "live": 1, "resident": 1},
        {"name": "pirate", "requests": 0, "live": 0, "resident": 0},
    ]
    assert answer["adapters_loaded"] == 2
    assert answer["requests"][0]["adapter"] == "poet"
    full = await application.test_client().get(f"/stage/requests/{answer['requests'][0]['handle']}")
    assert (await full.get_json())["request"]["troupe.adapter"] == "poet"


async def test_a_frame_has_few_of_many_adapters(application, engine):
    names = [f"a{number}" for number in range(MAX_ADAPTERS + 5)]
    engine.adapters = Adapters(Arguments.from_keywords(lora_paths=[f"{name}=x" for name in names]), list)
    engine.adapters.begin([AdapterInfo(name, 8, ("q_proj",)) for name in names], None, {})
    engine.adapters.use(engine.adapters.find(names[-1]))
    answer = await frame(application)
    assert (len(answer["adapters"]), answer["adapters_loaded"]) == (MAX_ADAPTERS, MAX_ADAPTERS + 5)
    assert answer["adapters"][0]["name"] == names[-1]


def test_what_a_renderer_made_reaches_the_tokenizer_from_there():
    traffic = ActorMessages()
    handle(traffic, "renderer-0", "RenderTemplate", 3)
    handle(traffic, "tokenizer-0", "Encode", 2)
    handle(traffic, "tokenizer-1", "Encode", 2)
    handle(traffic, "stranger", "Hello", 2)
    ways = {(edge.source, edge.target): edge.count for edge in edges(traffic.flows, steps=8, tokens=9)}
    assert ways == {
        ("http", "renderer"): 3,
        ("renderer", "tokenizer"): 3,
        ("http", "tokenizer"): 1,
        ("scheduler", "worker"): 8,
        ("detokenizer", "streams"): 9,
        ("streams", "http"): 9,
    }


async def test_frames_follow_each_other_and_report_only_what_changed(application, engine, serve):
    url = await serve(application)
    timeline = request_of(engine)
    timeline.begin("queue", time.monotonic(), 0)
    async with httpx.AsyncClient(timeout=60) as client, client.stream("GET", f"{url}/stage?frames=4") as response:
        answer = []
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                answer.append(msgspec.json.decode(line[6:]))
                if len(answer) == 2:
                    timeline.begin("decode", time.monotonic(), 0)
    assert [one["whole"] for one in answer] == [True, False, False, False]
    assert [one["number"] for one in answer] == list(range(answer[0]["number"], answer[0]["number"] + 4))
    assert all(later["at"] > before["at"] for before, later in itertools.pairwise(answer))
    spans = [[span[0] for request in one["requests"] for span in request["spans"]] for one in answer]
    assert spans[0] == ["queue"]
    assert spans[1] == []
    assert ["queue", "decode"] in spans[2:]


async def test_one_picture_is_drawn_for_all_viewers(application, engine, serve, monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr(frames, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    url = await serve(application)
    answer = await asyncio.gather(*(events(url, "/stage", 1) for _ in range(6)))
    assert [one["number"] for seen in answer for one in seen] == [1] * 6
    assert application.service.feed.drawn == 1


async def test_nothing_is_drawn_without_a_viewer(application, engine, serve, until):
    url = await serve(application)
    await events(url, "/stage", 1)
    await until(lambda: application.service.feed.viewers == 0)
    drawn = application.service.feed.drawn
    await asyncio.sleep(3 * frames.FRAME_SECONDS)
    assert application.service.feed.drawn == drawn


async def test_viewers_are_bounded_and_leave(application, engine, serve, until):
    url = await serve(application)
    stage = application.service.feed
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            httpx.AsyncClient(limits=httpx.Limits(max_connections=100), timeout=60)
        )
        for _ in range(MAX_VIEWERS):
            response = await stack.enter_async_context(client.stream("GET", f"{url}/stage"))
            assert response.status_code == 200
        refused = await client.get(f"{url}/stage")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_viewers"
        assert refused.headers["Retry-After"] == "5"
        assert stage.viewers == MAX_VIEWERS
    await until(lambda: stage.viewers == 0)
    assert len(await events(url, "/stage", 1)) == 1


async def test_a_timer_that_is_early_gives_no_frame_twice(application, monkeypatch):
    stage = application.service.feed
    sleep = asyncio.sleep
    monkeypatch.setattr(frames.asyncio, "sleep", lambda delay: sleep(delay / 3))
    number, _ = await stage.next(0)
    assert [(await stage.next(number + seen))[0] for seen in range(3)] == [number + 1, number + 2, number + 3]


async def test_a_viewer_that_missed_a_frame_gets_a_whole_one(application, engine):
    stage = application.service.feed
    number, _ = await stage.next(0)
    request_of(engine)
    for _ in range(2):
        seen, _ = await stage.next(stage.drawn)
    _, data = await stage.next(0)
    late = msgspec.json.decode(data)
    assert seen == number + 2
    assert late["whole"]
    assert len(late["requests"]) == 1


async def test_a_stopping_server_ends_the_feed(application, engine, serve, until):
    url = await serve(application)

    async def look():
        async with httpx.AsyncClient(timeout=60) as client, client.stream("GET", f"{url}/stage") as response:
            return [line async for line in response.aiter_lines() if line]

    looking = asyncio.create_task(look())
    await until(lambda: application.service.feed.viewers)
    await application.drain(0)
    lines = await asyncio.wait_for(looking, PATIENCE)
    assert lines[-1] == "data: [DONE]"
    assert "error" in lines[-2]


@pytest.mark.parametrize("frames", ["0", "-1", "x", "", "1e3", "99999999", "٣"])
async def test_a_number_of_frames_is_a_number(application, frames):
    response = await application.test_client().get("/stage", query_string={"frames": frames})
    assert response.status_code == 400
    assert msgspec.json.decode(await response.get_data())["error"]["param"] == "frames"


async def test_the_feed_requires_the_key(make_application):
    application = make_application(api_key="user-key")
    for path in ("/stage?frames=1", "/stage/requests/x"):
        assert (await application.test_client().get(path)).status_code == 401
    with_key = await application.test_client().get("/stage?frames=1", headers={"Authorization": "Bearer user-key"})
    assert with_key.status_code == 200


async def test_a_key_sees_its_own_requests_and_the_admin_key_all(make_application):
    application = make_application(api_key="first,second", admin_api_key="admin-key")
    client = application.test_client()
    for key, prompt in (("first", "a"), ("first", "ab"), ("second", "abc")):
        await client.post("/v1/completions", json={"prompt": prompt}, headers={"x-api-key": key})
    seen = {}
    for key in ("first", "second", "admin-key"):
        headers = {"x-api-key": key}
        response = await client.get("/stage?frames=1", headers=headers)
        answer = msgspec.json.decode((await response.get_data()).decode().split("\n\n")[0].removeprefix("data: "))
        seen[key] = {request["handle"] for request in answer["requests"]}
    assert len(seen["first"]) == 2
    assert len(seen["second"]) == 1
    assert seen["admin-key"] == seen["first"] | seen["second"]
    (handle,) = seen["second"]
    for key, status in (("first", 404), ("second", 200), ("admin-key", 200)):
        assert (await client.get(f"/stage/requests/{handle}", headers={"x-api-key": key})).status_code == status


async def test_changes_of_a_frame_are_those_of_its_viewer(application, engine):
    stage = application.service.feed
    mine, others = request_of(engine, "mine", tenant="key-1"), request_of(engine, "others", tenant="key-2")
    number, _ = await stage.next(0, "key-1")
    await stage.next(0, "admin")
    number, _ = await stage.next(number, "key-1")  # has seen nothing change yet
    for timeline in (mine, others):
        timeline.begin("queue", timeline.started, 0)
    _, own = await stage.next(number, "key-1")
    _, all_ = await stage.next(number, "admin")
    assert not msgspec.json.decode(own)["whole"]
    assert [len(msgspec.json.decode(data)["requests"]) for data in (own, all_)] == [1, 2]


async def test_no_text_of_a_request_is_sent(application, engine):
    timeline = request_of(engine, "chatcmpl-secret-id", label="secret-label", request={"gen_ai.request.seed": 7})
    timeline.request |= {"gen_ai.request.stop_sequences": ("secret-stop",), "gen_ai.request.user": "secret-user"}
    timeline.begin("queue", timeline.started, 0, note="secret-note", wait=1.5, worker="worker-0")
    timeline.mark("preempted", timeline.started, 0, text="secret-mark", pages=3)
    answer = await frame(application)
    handle = answer["requests"][0]["handle"]
    shown = application.service.feed.requests.waterfall(handle)
    engine.timelines.close(timeline, Outcome(error_type="InvalidRequest", message="secret-message"))
    after = application.service.feed.requests.waterfall(handle)
    everything = msgspec.json.encode([answer, await frame(application), shown, after]).decode()
    assert "secret" not in everything
    queue = next(hop for hop in after.hops if hop.name == "queue")
    assert queue.attributes == {"wait": 1.5, "worker": "worker-0"}
    assert after.request == {"gen_ai.request.seed": 7}
    assert after.marks[0].attributes == {"pages": 3}


async def test_a_request_in_full_by_its_handle_or_its_id(application, engine):
    timeline = request_of(engine, "chatcmpl-1")
    hop = timeline.begin("prefill", timeline.started + 0.5, 0, tokens=12)
    timeline.finish(hop, timeline.started + 0.75)
    client = application.test_client()
    by_id = msgspec.json.decode(await (await client.get("/stage/requests/chatcmpl-1")).get_data())
    assert by_id["duration"] is None
    assert by_id["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    answer = next(hop for hop in by_id["hops"] if hop["name"] == "prefill")
    assert (answer["start"], answer["end"], answer["attributes"]) == (
        pytest.approx(0.5),
        pytest.approx(0.75),
        {"tokens": 12},
    )
    engine.timelines.close(timeline, Outcome(finish_reasons=("stop",)))
    by_handle = msgspec.json.decode(await (await client.get(f"/stage/requests/{by_id['handle']}")).get_data())
    assert by_handle["duration"] > 0
    assert by_handle["finish_reasons"] == ["stop"]
    assert by_id["handle"] not in ("chatcmpl-1", "")
    assert (await client.get("/stage/requests/chatcmpl-2")).status_code == 404


def test_ended_requests_leave_the_stage_and_the_rest_is_bounded():
    timelines = Timelines()
    views = RequestViews(timelines)
    for number in range(200):
        timelines.open(f"req-{number}", operation="chat", model="fake")
    assert len(views.all(time.monotonic())) == 64
    for timeline in list(timelines.live()):
        timelines.close(timeline, Outcome())
    assert len(views.all(time.monotonic())) == 64
    assert views.all(time.monotonic() + 60) == []


def test_a_request_is_sent_again_only_when_it_changed():
    timelines = Timelines()
    views = RequestViews(timelines)
    timeline = timelines.open("req-1", operation="chat", model="fake")
    now = time.monotonic()
    assert len(views.changed(now)) == 1
    assert views.changed(now) == []
    hop = timeline.begin("decode", now, 0)
    assert [span.name for span in views.changed(now)[0].spans] == ["decode"]
    assert views.changed(now) == []
    timeline.finish(hop, now)
    assert views.changed(now)[0].spans[0].end is not None
    timelines.close(timeline, Outcome(error_type="abort"))
    assert views.changed(now)[0].error == "abort"
    assert views.changed(now) == []


async def test_the_description_names_the_number_of_frames(application):
    response = await application.test_client().get("/openapi.json")
    feed = msgspec.json.decode(await response.get_data())["paths"]["/stage"]["get"]
    (parameter,) = feed["parameters"]
    assert (parameter["name"], parameter["in"], parameter["schema"]["minimum"]) == ("frames", "query", 1)
    most = parameter["schema"]["maximum"]
    too_many = await application.test_client().get(f"/stage?frames={most + 1}")
    assert too_many.status_code == 400
