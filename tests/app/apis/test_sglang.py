"""POST /generate in SGLang's form."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from actors.protocol.requests import Acceptance, InvalidRequest

ANSWER = "Paris is the capital of France."


async def post(application, path="/generate", method="post", **body):
    response = await getattr(application.test_client(), method)(path, json=body)
    return response, await response.get_data()


def events(data: bytes):
    blocks = data.decode().strip().split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    return [msgspec.json.decode(block.removeprefix("data: ")) for block in blocks[:-1]]


@pytest.mark.parametrize("method", ["post", "put"])
async def test_one_text(application, engine, method):
    response, data = await post(application, method=method, text="ab", rid="mine", sampling_params={"temperature": 0})
    reported = msgspec.json.decode(data)
    assert response.status_code == 200
    assert reported["text"] == ANSWER
    assert reported["output_ids"] == [1000, 1001, 1002, 1003, 1004, 1005]
    meta = reported["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "stop", "matched": None}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 6, 1)
    assert engine.requests[0]["params"].default_max_tokens == 128


async def test_a_batch_answers_with_a_list(application, engine):
    sampling = [{"max_new_tokens": 1}, {"max_new_tokens": 2}]
    _, data = await post(application, input_ids=[[97], [98]], sampling_params=sampling, rid=["a", "b"])
    reported = msgspec.json.decode(data)
    assert [item["text"] for item in reported] == ["Paris", "Paris is"]
    assert [item["meta_info"]["finish_reason"] for item in reported] == [
        {"type": "length", "length": 1},
        {"type": "length", "length": 2},
    ]
    assert [item["meta_info"]["id"] for item in reported] == ["a", "b"]


async def test_each_prompt_of_a_batch_has_a_name_of_its_own(application, engine):
    for fields, names in (({"rid": "job"}, ["job_0", "job_1"]), ({}, ["req-2", "req-3"])):
        reported = msgspec.json.decode((await post(application, text=["a", "b"], **fields))[1])
        assert [item["meta_info"]["id"] for item in reported] == names
    assert [request["request_id"] for request in engine.requests[:2]] == ["job_0", "job_1"]


async def test_ids_of_the_prompt_are_returned_on_request(application):
    for requested in (True, False):
        reported = msgspec.json.decode((await post(application, text="ab", return_prompt_token_ids=requested))[1])
        assert reported.get("prompt_token_ids") == ([97, 98] if requested else None)


async def test_what_became_of_draft_tokens_is_reported_of_each_choice(application, engine):
    engine.acceptance = Acceptance().and_step(3, 2).and_step(3, 0)
    meta = msgspec.json.decode((await post(application, text="ab"))[1])["meta_info"]
    assert {name: value for name, value in meta.items() if name.startswith("spec_")} == {
        "spec_verify_ct": 2,
        "spec_accept_length": 2.0,
        "spec_accept_rate": 2 / 6,
        "spec_accept_token_num": 2,
        "spec_draft_token_num": 6,
        "spec_accept_histogram": [1, 0, 1],
    }


async def test_several_choices_of_one_prompt_are_a_list(application):
    _, data = await post(application, text="ab", sampling_params={"n": 3})
    assert [item["text"] for item in msgspec.json.decode(data)] == [ANSWER] * 3


async def test_log_probabilities(application):
    _, data = await post(
        application,
        text="abc",
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=1,
        return_text_in_logprobs=True,
        sampling_params={"max_new_tokens": 1},
    )
    meta = msgspec.json.decode(data)["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 98, "b"], [-1.0, 99, "c"]]
    assert meta["output_token_logprobs"] == [[-0.5, 1000, "Paris"]]
    assert meta["output_top_logprobs"] == [[[-0.5, 1000, "Paris"]]]
    assert meta["input_top_logprobs"][0] is None


async def test_streams_are_cumulative(application):
    _, data = await post(application, text="ab", stream=True)
    received = events(data)
    assert [e["text"] for e in received][:2] == ["Paris", "Paris is"]
    assert received[-1]["text"] == ANSWER
    assert received[0]["meta_info"]["finish_reason"] is None
    assert received[-1]["meta_info"]["finish_reason"]["type"] == "stop"
    assert "index" not in received[0]


@pytest.mark.parametrize("stream_output", [False, True])
async def test_prompt_entries_come_with_the_first_event_only(make_application, stream_output):
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1, "return_prompt_token_ids": True}
    _, data = await post(make_application(stream_output=stream_output), text="abc", stream=True, **fields)
    first, *others = events(data)
    assert [entry[1] for entry in first["meta_info"]["input_token_logprobs"]] == [97, 98, 99]
    assert len(first["meta_info"]["input_top_logprobs"]) == 3
    assert first["prompt_token_ids"] == [97, 98, 99]
    for event in others:
        assert not {"input_token_logprobs", "input_top_logprobs"} & event["meta_info"].keys()
        assert "prompt_token_ids" not in event


@pytest.mark.parametrize("fields", [{}, {"return_logprob": True, "top_logprobs_num": 20}], ids=["text", "logprobs"])
async def test_cumulative_streams_grow_linearly_with_the_answer(application, engine, fields):
    sizes = []
    for tokens in (2000, 4000):
        engine.answer = ["word "] * tokens
        engine.step_seconds = 0
        sampling = {"max_new_tokens": tokens}
        _, data = await post(application, text="abc", stream=True, sampling_params=sampling, **fields)
        *_, last = events(data)
        assert last["text"] == "word " * tokens
        assert len(last["output_ids"]) == tokens
        if fields:
            assert len(last["meta_info"]["output_token_logprobs"]) == tokens
        sizes.append(len(data))
    assert sizes[1] < 2.5 * sizes[0]


async def test_streams_can_be_disjoint(make_application):
    _, data = await post(make_application(stream_output=True), text=["ab", "c"], stream=True)
    received = events(data)
    for index in (0, 1):
        mine = [e for e in received if e["index"] == index]
        assert "".join(e["text"] for e in mine) == ANSWER
        assert [token for e in mine for token in e["output_ids"]] == [1000, 1001, 1002, 1003, 1004, 1005]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_returns_what_was_there(application, engine, stream, until):
    engine.gate, engine.gate_at = asyncio.Event(), 2
    running = asyncio.create_task(post(application, text="ab", rid="job-1", stream=stream))
    await until(lambda: engine.streams)
    _, wrong = await post(application, "/abort_request", rid="job")
    assert msgspec.json.decode(wrong) == {"aborted": 0}
    await until(lambda: engine.streams[0].at_gate)
    _, reported = await post(application, "/abort_request", rid="job-1")
    assert msgspec.json.decode(reported) == {"aborted": 1}
    _, data = await running
    last = events(data)[-1] if stream else msgspec.json.decode(data)
    assert last["text"] == "Paris is"
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert not engine.open


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_stops_reports_it_and_not_that_a_client_aborted(application, engine, stream, until):
    engine.gate, engine.gate_at = asyncio.Event(), 2
    asking = asyncio.create_task(post(application, text="ab", stream=stream))
    await until(lambda: any(requested.at_gate for requested in engine.streams))
    await application.drain(0.0)
    response, data = await asking
    if stream:
        reported = events(data)[-1]
        assert reported["meta_info"]["finish_reason"]["type"] == "abort"
        assert "shutting down" in reported["meta_info"]["finish_reason"]["message"]
    else:
        assert response.status_code == 503
        assert "shutting down" in msgspec.json.decode(data)["error"]["message"]


async def test_an_openai_request_is_aborted_by_the_id_of_its_answer(application, engine, until):
    engine.gate = asyncio.Event()
    body = {"messages": [{"role": "user", "content": "x"}]}
    running = asyncio.create_task(post(application, "/v1/chat/completions", **body))
    await until(lambda: engine.streams)
    name = next(iter(application.service.live)).request_id
    assert name.startswith("chatcmpl-")
    _, reported = await post(application, "/abort_request", rid=name)
    assert msgspec.json.decode(reported) == {"aborted": 1}
    response, data = await running
    assert response.status_code == 499
    assert msgspec.json.decode(data)["error"]["code"] == "request_aborted"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"temperature": "x"}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
        ({"text": ["a"], "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params.n"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": ["a", "b"], "lora_path": ["x"]}, "lora_path"),
    ],
)
async def test_bad_fields_are_named(application, engine, body, param):
    response, data = await post(application, **body)
    assert response.status_code == 400
    assert msgspec.json.decode(data)["error"]["param"] == param
    assert not engine.open


async def test_a_batch_of_neutral_values_is_neutral(application):
    response, _ = await post(application, text=["a", "b"], lora_path=[None, None], image_data=[[], None])
    assert response.status_code == 200


@pytest.mark.parametrize(("body", "param"), [({"text": "a"}, "text"), ({"input_ids": [[7]]}, "input_ids")])
async def test_what_is_wrong_with_a_prompt_is_reported_under_its_field(application, engine, body, param):
    engine.ready_error = InvalidRequest("prompt holds token id 7.", param="prompt")
    response, data = await post(application, **body)
    error = msgspec.json.decode(data)["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"] == f"{param} holds token id 7."


@pytest.mark.parametrize(
    "raw",
    [
        b'"image_data":1e999',
        b'"image_data":"\xff"',
        b'"sampling_params":{"regex":-1e999}',
        b'"sampling_params":{"regex":"\xff"}',
        b'"sampling_params":{"\xff":1}',
        b'"sampling_params":[{"\xff":1}]',
        b'"\xff":1',
    ],
)
async def test_values_that_cannot_be_decoded_are_errors(application, engine, raw):
    response = await application.test_client().post(
        "/generate", data=b'{"text":"a",' + raw + b"}", headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400
    assert not engine.requests


@pytest.mark.parametrize("inside", [False, True])
async def test_an_object_of_countless_fields_is_refused(application, engine, inside):
    many = {f"field_{number}": None for number in range(300)}
    response, data = await post(application, text="a", **({"sampling_params": many} if inside else many))
    error = msgspec.json.decode(data)["error"]
    assert (response.status_code, error["code"]) == (400, "too_many_fields")
    assert error["param"] == ("sampling_params" if inside else None)
    assert engine.registry.get_sample_value("troupe_unknown_fields_total", {"field": "other"}) is None


async def test_unknown_sampling_fields_are_counted(application, engine):
    await post(application, text="a", sampling_params={"wibble": 1})
    assert engine.registry.get_sample_value("troupe_unknown_fields_total", {"field": "sampling_params.wibble"}) == 1


async def test_a_request_too_large_for_the_queue_is_a_mistake(make_application):
    application = make_application(max_running_requests=2, max_queued_requests=2)
    response, data = await post(application, text=["a", "b"], sampling_params={"n": 3})
    assert response.status_code == 400
    assert msgspec.json.decode(data)["error"]["param"] == "text"
    response, _ = await post(application, text="a", sampling_params={"n": 5})
    assert response.status_code == 200  # of one prompt's choices the engine itself says that they are too many


@pytest.mark.parametrize("name", ["data_parallel_rank", "routed_dp_rank"])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_a_request_names_its_replica(application, engine, path, name):
    prompts = {"/generate": {"text": "a"}, "/v1/completions": {"prompt": "a"}}
    body = prompts.get(path, {"messages": [{"role": "user", "content": "a"}]})
    response, _ = await post(application, path, **body, **{name: 1})
    assert (response.status_code, engine.requests[0]["replica"]) == (200, 1)
    response, data = await post(application, path, **body, **{name: -1})
    assert (response.status_code, msgspec.json.decode(data)["error"]["param"]) == (400, name)
    engine.admission_error = InvalidRequest("data_parallel_rank: 7, but replicas", param="data_parallel_rank")
    response, data = await post(application, path, **body, **{name: 7})
    error = msgspec.json.decode(data)["error"]
    assert (response.status_code, error["param"], error["message"]) == (400, name, f"{name}: 7, but replicas")
