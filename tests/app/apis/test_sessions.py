"""Sessions of SGLang's API: what a request continues, who may, and for how long."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from actors.protocol.requests import InvalidRequest
from app.apis import sessions as module
from app.server.errors import ApiError
from tests.kits.app_requests import events
from tests.kits.waiting import until


async def call(application, path, **body):
    response = await application.test_client().post(path, json=body)
    data = await response.get_data()
    return response.status_code, msgspec.json.decode(data) if data else None


async def opened(application, **fields):
    status, name = await call(application, "/open_session", capacity_of_str_len=1000, **fields)
    assert status == 200
    return name


async def turn(application, session, ids, after=None, **fields):
    """A request of a session; the engine's answer to each has the tokens 1000 to 1005."""
    params = {"id": session, "rid": after, **fields.pop("params", {})}
    return await call(application, "/generate", input_ids=ids, session_params=params, **fields)


def prompts(engine):
    return [request["prompt"] for request in engine.requests]


ANSWER = [1000, 1001, 1002, 1003, 1004, 1005]


async def test_a_request_continues_the_one_that_it_names(application, engine):
    session = await opened(application)
    rid = "first"
    await turn(application, session, [1, 2], rid=rid, sampling_params={"max_new_tokens": 2})
    await turn(application, session, [3], rid, rid="second")
    await turn(application, session, [4], "second", rid="mine")
    await turn(application, session, [5], "mine", params={"drop_previous_output": True})
    await turn(application, session, [6], "mine", params={"offset": 3})
    await turn(application, session, [7], rid, params={"offset": -1})
    await turn(application, session, [8])
    history = [1, 2, 1000, 1001, 3, *ANSWER]
    assert prompts(engine) == [
        [1, 2],
        [1, 2, 1000, 1001, 3],
        [*history, 4],
        [*history, 4, 5],
        [1, 2, 1000, 6],
        [1, 2, 1000, 7],
        [8],
    ]


async def test_replace_drops_what_continued_a_request(application, engine):
    session = await opened(application)
    await turn(application, session, [1], rid="a")
    await turn(application, session, [2], "a", rid="b")
    await turn(application, session, [3], "b", rid="c")
    assert (await turn(application, session, [4], "a", rid="d", params={"replace": True}))[0] == 200
    for gone in ("b", "c"):
        status, answer = await turn(application, session, [5], gone)
        assert (status, answer["error"]["param"]) == (400, "session_params.rid")
    assert (await turn(application, session, [6], params={"replace": True}))[0] == 200
    assert (await turn(application, session, [7], "d"))[0] == 400


async def test_replace_aborts_a_request_that_is_running(application, engine):
    session = await opened(application)
    engine.gate, engine.gate_at = asyncio.Event(), 2
    running = asyncio.create_task(turn(application, session, [1], rid="a"))
    await until(lambda: engine.streams and engine.streams[0].at_gate)
    status, answer = await turn(application, session, [2], "a")
    assert (status, answer["error"]["param"]) == (400, "session_params.rid")
    engine.gate.set()
    engine.gate = asyncio.Event()
    replacing = asyncio.create_task(turn(application, session, [3], "a", rid="b", params={"replace": True}))
    await until(lambda: len(engine.streams) == 2)
    engine.gate.set()
    assert (await replacing)[0] == 200
    await running
    assert prompts(engine)[1][:1] == [1]
    assert prompts(engine)[1][-1:] == [3]


async def test_texts_and_chats_and_completions_continue_too(application, engine):
    session = await opened(application)
    await call(application, "/generate", text="ab", rid="a", session_params={"id": session})
    params = {"id": session, "rid": "a"}
    status, completion = await call(application, "/v1/completions", prompt="cd", session_params=params)
    assert status == 200
    message = {"role": "user", "content": "x"}
    params = {"id": session, "rid": completion["id"]}
    status, chat = await call(application, "/v1/chat/completions", messages=[message], session_params=params)
    assert status == 200
    status, _ = await call(application, "/generate", text="!", session_params={"id": session, "rid": chat["id"]})
    assert status == 200
    first, second, third, fourth = prompts(engine)
    assert first == [97, 98]
    assert second == [*first, *ANSWER, 99, 100]
    assert third[: len(second) + 6] == [*second, *ANSWER]
    assert len(third) > len(second) + 6
    assert fourth == [*third, *ANSWER, 33]


async def test_streams_are_kept_as_whole_answers_are(application, engine):
    session = await opened(application, streaming=True)
    for ids in ([1], [2]):
        body = {"input_ids": ids, "stream": True, "session_params": {"id": session}}
        response = await application.test_client().post("/generate", json=body)
        assert events(await response.get_data())
    assert prompts(engine) == [[1], [1, *ANSWER, 2]]


async def test_a_streaming_session_goes_back_behind_a_failed_request(application, engine):
    session = await opened(application, streaming=True)
    await turn(application, session, [1])
    engine.fail_at = 2
    assert (await turn(application, session, [2]))[0] == 500
    engine.fail_at = None
    await turn(application, session, [3])
    assert prompts(engine) == [[1], [1, *ANSWER, 2], [1, *ANSWER, 3]]


async def test_a_streaming_session_has_one_request_and_takes_its_end_only(application, engine):
    session = await opened(application, streaming=True)
    for field, value in (("replace", True), ("offset", 1), ("drop_previous_output", True)):
        status, answer = await turn(application, session, [1], params={field: value})
        assert (status, answer["error"]["param"]) == (400, f"session_params.{field}")
    engine.gate = asyncio.Event()
    running = asyncio.create_task(turn(application, session, [1]))
    await until(lambda: engine.streams and engine.streams[0].at_gate)
    status, answer = await turn(application, session, [2])
    assert (status, answer["error"]["param"]) == (400, "session_params.id")
    engine.gate.set()
    await running
    assert (await turn(application, session, [3]))[0] == 200


async def test_ids_of_sessions_are_given_once_and_end_when_closed(application):
    session = await opened(application, session_id="mine")
    assert session == "mine"
    status, answer = await call(application, "/open_session", session_id="mine")
    assert (status, answer["error"]["param"]) == (400, "session_id")
    assert await call(application, "/close_session", session_id="mine") == (200, None)
    assert (await call(application, "/close_session", session_id="mine"))[0] == 404
    status, answer = await turn(application, "mine", [1])
    assert (status, answer["error"]["param"]) == (400, "session_params.id")
    assert len(await opened(application)) == 32


async def test_one_prompt_and_one_choice_take_part(application):
    session = await opened(application)
    for path, fields in (
        ("/generate", {"text": ["a", "b"]}),
        ("/generate", {"text": "a", "sampling_params": {"n": 2}}),
        ("/v1/completions", {"prompt": "a", "n": 2}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
    ):
        status, answer = await call(application, path, session_params={"id": session}, **fields)
        assert (status, answer["error"]["param"]) == (400, "session_params")


async def test_sessions_belong_to_their_key(make_application):
    application = make_application(api_key="one,two")

    async def ask(key, path, **body):
        response = await application.test_client().post(path, json=body, headers={"x-api-key": key})
        return response.status_code

    assert await ask("one", "/open_session", session_id="s") == 200
    assert await ask("two", "/generate", text="a", session_params={"id": "s"}) == 400
    assert await ask("two", "/close_session", session_id="s") == 404
    assert await ask("two", "/open_session", session_id="s") == 200
    assert await ask("one", "/generate", text="a", session_params={"id": "s"}) == 200


def test_a_session_ends_after_its_time_without_requests():
    now = [0.0]
    kept = module.Sessions(lambda: now[0])
    kept.open("", "short", streaming=False, seconds=10.0)
    kept.open("", "long", streaming=False, seconds=None)
    now[0] = 11.0
    kept.open("", "short", streaming=False, seconds=10.0)  # free again
    now[0] = 3601.0
    kept.open("", "long", streaming=False, seconds=None)


async def test_the_number_of_short_requests_is_bounded(monkeypatch, application):
    monkeypatch.setattr(module, "_MAX_TOKENS", 1000)
    session = await opened(application)
    assert [(await turn(application, session, [1]))[0] for _ in range(4)] == [200, 200, 200, 400]


async def test_replace_drops_a_chain_of_two_thousand_requests():
    sessions, exchange = module.Sessions(), SimpleNamespace(error=RuntimeError(), stream_ids=("engine",))
    sessions.open("", "s", streaming=False, seconds=None)

    async def nothing():
        for delta in ():
            yield delta

    async def complete(rid, after, **fields):
        params = module.SessionParams(id="s", rid=after, **fields)
        turn = sessions.begin("", params, [1], opening=(), rid=rid, exchange=exchange)
        async for _ in turn.follow(nothing()):
            pass

    await complete("0", None)
    for number in range(1, 2000):
        await complete(str(number), str(number - 1), offset=1)
    await complete("new", "0", replace=True)
    for gone in ("1", "1999"):
        with pytest.raises(ApiError, match="has no request"):
            await complete("more", gone)


async def test_the_least_used_session_of_a_key_makes_room(monkeypatch, application):
    monkeypatch.setattr(module, "_MAX_SESSIONS", 2)
    for name in ("a", "b"):
        await opened(application, session_id=name)
    await turn(application, "a", [1])
    await opened(application, session_id="c")
    assert [(await turn(application, name, [1]))[0] for name in ("a", "b", "c")] == [200, 400, 200]


async def test_refused_requests_leave_nothing_in_their_session(application, engine):
    session = await opened(application)
    engine.ready_error = InvalidRequest("too long", param="prompt")
    for name in ("a", "b"):
        assert (await turn(application, session, [1], rid=name))[1]["error"]["param"] == "input_ids"
    engine.ready_error = None
    assert (await turn(application, session, [1], "a"))[1]["error"]["param"] == "session_params.rid"
    assert (await turn(application, session, [1]))[0] == 200
    [kept] = application.service.sessions._sessions.values()
    assert len(kept.requests) == 1


async def test_tokens_of_a_key_are_bounded(monkeypatch, application):
    monkeypatch.setattr(module, "_MAX_TOKENS", 20)
    monkeypatch.setattr(module, "_REQUEST_TOKENS", 0)
    for name in ("a", "b"):
        await opened(application, session_id=name)
    await turn(application, "a", [1], rid="1")
    await turn(application, "b", [1] * 14)
    assert (await turn(application, "a", [2], "1"))[0] == 400  # "a" made room
    status, answer = await turn(application, "b", [1] * 10)
    assert (status, answer["error"]["param"]) == (400, "session_params")
    assert (await turn(application, "b", [2], params={"replace": True}))[0] == 200
