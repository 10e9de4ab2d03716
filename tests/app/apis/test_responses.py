"""OpenAI's Responses API: answers, events, the store, conversations, and background responses."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from actors.options import Arguments
from app.apis.responses import handlers
from app.apis.responses.store import History
from app.application import Troupe, create_app
from tests.kits.fake_engine import FakeEngine, Server

Until = Callable[[Callable[[], object]], Awaitable[None]]

THOUGHT = ["<think>", "\nHm", ", so\n", "</think>", "\n\n"]
CALL = ['<tool_call>{"name": "add", "arguments": {"a"', ": 1}}</tool_call>"]
CUSTOM = ['<tool_call>{"name": "shell", "arguments": {"input": "ls -l"}}</tool_call>']
ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}}
SHELL: dict[str, Any] = {"type": "custom", "name": "shell", "description": "a shell"}
TEXT = "Paris is the capital of France."


class Person(BaseModel):
    name: str


class Client:
    """The SDK, and the engine behind the server that it speaks with."""

    def __init__(self, application: Troupe, url: str, key: str = "none") -> None:
        self.application = application
        self.engine: Any = application.engine
        self.url = url
        self.sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)

    async def create(self, given: Any = "Hi", **fields: Any) -> Any:
        return await self.sdk.responses.create(input=given, **fields)

    def prompt(self) -> list[dict[str, Any]]:
        """The messages that the engine got last."""
        messages: list[dict[str, Any]] = self.engine.requests[-1]["prompt"].messages
        return messages


def application(**options: Any) -> Troupe:
    arguments = Arguments(model_path="/models/fake", served_model_name=("fake",), skip_server_warmup=True, **options)
    engine = FakeEngine(arguments)
    engine.chat_template = "<think></think>"
    return create_app(arguments, engine)  # type: ignore[arg-type]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[Client]]]:
    server = Server()
    clients: list[Client] = []

    async def start(key: str = "none", **options: Any) -> Client:
        made = application(**options)
        clients.append(Client(made, await server(made), key))
        return clients[-1]

    yield start
    for client in clients:
        await client.sdk.close()
    await server.aclose()


@pytest.fixture
async def client(serve: Callable[..., Awaitable[Client]]) -> Client:
    return await serve()


async def test_a_whole_answer(client: Client) -> None:
    answer = await client.create(
        "Capital of France?",
        instructions="Be brief.",
        max_output_tokens=100,
        temperature=0.5,
        metadata={"a": "b"},
        reasoning={"effort": "low"},
        prompt_cache_key="k",
        safety_identifier="s",
        truncation="disabled",
        max_tool_calls=3,
    )
    assert answer.output_text == TEXT
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.metadata, answer.instructions, answer.prompt_cache_key) == ({"a": "b"}, "Be brief.", "k")
    assert (answer.safety_identifier, answer.max_tool_calls, answer.reasoning.effort) == ("s", 3, "low")
    assert answer.usage.input_tokens + answer.usage.output_tokens == answer.usage.total_tokens
    assert answer.id.startswith("resp_")
    assert answer.output[0].id.startswith("msg_")
    assert [message["role"] for message in client.prompt()] == ["system", "user"]
    params = client.engine.requests[-1]["params"]
    assert (params.max_tokens, params.temperature) == (100, 0.5)
    assert client.engine.requests[-1]["prompt"].template_kwargs["reasoning_effort"] == "low"


async def events_of(stream: Any) -> list[Any]:
    return [event async for event in stream]


def types(events: list[Any]) -> list[str]:
    """The types of events, without repetitions."""
    names = [event.type.removeprefix("response.") for event in events]
    return [name for place, name in enumerate(names) if not place or names[place - 1] != name]


async def test_the_events_of_a_thought_a_text_and_a_call(client: Client) -> None:
    client.engine.answer = [*THOUGHT, "I add.", "\n", *CALL]
    events = await events_of(await client.create(tools=[ADD], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    part = ["content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    assert types(events) == [
        *("created", "in_progress"),
        *("output_item.added", *(name.format("reasoning_text") for name in part)),
        *("output_item.added", *(name.format("output_text") for name in part)),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    adapter = TypeAdapter(ResponseStreamEvent)
    for event in events:
        adapter.validate_python(event.to_dict())
    final = events[-1].response
    thought, message, call = final.output
    assert (thought.content[0].text.strip(), thought.summary) == ("Hm, so", [])
    assert message.content[0].text.strip() == "I add."
    assert (call.name, json.loads(call.arguments), call.status) == ("add", {"a": 1}, "completed")
    assert call.id.startswith("fc_")
    assert final.usage.output_tokens_details.reasoning_tokens > 0
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert deltas == message.content[0].text


async def test_a_stream_is_framed_by_names_and_has_no_done(client: Client) -> None:
    response = await client.application.test_client().post("/v1/responses", json={"input": "Hi", "stream": True})
    blocks = (await response.get_data()).decode().strip().split("\n\n")
    assert blocks[0].startswith("event: response.created\ndata: {")
    assert blocks[-1].startswith("event: response.completed\ndata: {")


async def test_a_summary_takes_the_place_of_the_thought(client: Client) -> None:
    client.engine.answer = [*THOUGHT, "Yes."]
    include: Any = ["reasoning.encrypted_content"]
    events = await events_of(await client.create(reasoning={"summary": "auto"}, include=include, stream=True))
    assert "reasoning_summary_part.added" in types(events)
    assert "reasoning_text.delta" not in types(events)
    thought = events[-1].response.output[0]
    assert (thought.summary[0].text.strip(), thought.content) == ("Hm, so", None)
    again = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
    await client.create([again, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Sure?"}])
    assert client.prompt()[0]["reasoning_content"].strip() == "Hm, so"
    with pytest.raises(openai.BadRequestError, match="encrypted_content"):
        await client.create([{**again, "encrypted_content": "gAAAA"}, {"role": "user", "content": "Sure?"}])


async def test_a_custom_tool_gets_a_text(client: Client) -> None:
    client.engine.answer = CUSTOM
    events = await events_of(await client.create(tools=[SHELL], stream=True))
    assert "custom_tool_call_input.done" in types(events)
    call = events[-1].response.output[0]
    assert (call.type, call.name, call.input) == ("custom_tool_call", "shell", "ls -l")
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "a.txt"}
    await client.create([{"role": "user", "content": "ls"}, call.to_dict(), output], tools=[SHELL])
    assert [message["role"] for message in client.prompt()] == ["user", "assistant", "tool"]
    assert client.prompt()[1]["tool_calls"][0]["function"]["arguments"] == {"input": "ls -l"}


async def test_the_sdk_parses_and_streams_a_model(client: Client) -> None:
    client.engine.answer = ['{"name": ', '"Anna"}']
    parsed = await client.sdk.responses.parse(input="Who?", text_format=Person, model="fake")
    assert parsed.output_parsed == Person(name="Anna")
    assert client.engine.requests[-1]["params"].grammar.kind == "json_schema"
    async with client.sdk.responses.stream(input="Who?", text_format=Person, model="fake") as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_response()).output_parsed == Person(name="Anna")


async def test_log_probabilities_are_included(client: Client) -> None:
    include: Any = ["message.output_text.logprobs"]
    answer = await client.create(include=include, top_logprobs=2)
    scored = answer.output[0].content[0].logprobs
    assert "".join(token.token for token in scored) == TEXT
    assert scored[0].top_logprobs
    events = await events_of(await client.create(include=include, stream=True))
    tokens = [token.token for e in events if e.type == "response.output_text.delta" for token in e.logprobs]
    assert "".join(tokens) == TEXT


@pytest.mark.parametrize(
    "answer",
    [
        ["x", "<too", "bc", " d"],  # the parser waits whether "<too" begins a call
        ["a <", "b", " c"],
        ["Yes", " ", *CALL, " ", "and more"],
        ["Yes", *CALL],
        [*THOUGHT, "Yes", "."],
    ],
)
async def test_log_probabilities_belong_to_their_text(client: Client, answer: list[str]) -> None:
    client.engine.answer = answer
    found = await client.create(tools=[ADD], top_logprobs=1)
    parts = [item.content[0] for item in found.output if item.type == "message"]
    assert parts
    for part in parts:
        assert "".join(token.token for token in part.logprobs) == part.text


async def test_a_cut_call_does_not_end_a_conversation(client: Client) -> None:
    client.engine.answer = CALL
    made = await client.sdk.conversations.create()
    cut = await client.create("Add", conversation=made.id, tools=[ADD], max_output_tokens=1)
    assert cut.output[0].status == "incomplete"
    arguments = cut.output[0].arguments
    await client.create("Go on", conversation=made.id)
    [call] = client.prompt()[1]["tool_calls"]
    assert call["function"]["arguments"] == {"INVALID_JSON": arguments}
    deep = ['{"a":' + "[" * depth + "]" * depth + "}" for depth in (100, 10_000)]
    for text in ("5", "{", *deep):
        await client.create([{"type": "function_call", "call_id": "c", "name": "add", "arguments": text}])
        assert client.prompt()[0]["tool_calls"][0]["function"]["arguments"] == {"INVALID_JSON": text}


async def test_any_tool_is_shown_as_openai_names_it(client: Client) -> None:
    client.engine.answer = CALL
    assert (await client.create(tools=[ADD], tool_choice="any")).tool_choice == "required"


async def test_ids_of_items_do_not_repeat(client: Client) -> None:
    first: Any = {"type": "message", "role": "user", "content": "One", "id": "msg_x"}
    made = await client.sdk.conversations.create(items=[first])
    for call in (
        client.sdk.conversations.create(items=[first, first]),
        client.sdk.conversations.items.create(made.id, items=[first]),
        client.create([first], conversation=made.id),
        client.create([first, first]),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await call
        assert caught.value.code == "duplicate_item"
    with pytest.raises(openai.BadRequestError, match="after"):
        await client.sdk.conversations.items.list(made.id, after="msg_y")


def full(*_: object) -> None:
    raise sqlite3.OperationalError("database or disk is full")


async def test_a_full_disk_refuses_background_responses(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    store = client.application.service.responses.store
    assert store is not None
    monkeypatch.setattr(store, "put", full)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.create(background=True)
    assert caught.value.code == "store_failed"
    assert not client.engine.open
    assert (await client.create()).output_text == TEXT
    monkeypatch.setattr(store, "put_conversation", full)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.sdk.conversations.create()
    assert caught.value.code == "store_failed"


async def test_what_could_not_be_stored_is_failed(
    client: Client, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = client.application.service.responses.store
    assert store is not None
    client.engine.gate = asyncio.Event()
    begun = await client.create(background=True)
    monkeypatch.setattr(store, "put", full)
    client.engine.gate.set()
    await until(lambda: not client.application.service.responses.runs)
    assert (await client.sdk.responses.retrieve(begun.id)).status == "failed"


async def test_bytes_of_background_responses_are_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_MAX_RUN_BYTES", 100_000)
    client.engine.gate = asyncio.Event()
    begun = await client.create(background=True, instructions="x" * 200_000)  # one is never refused
    [run] = client.application.service.responses.runs.values()
    assert run.size > 200_000
    assert sum(map(len, run._events)) < 100_000
    with pytest.raises(openai.RateLimitError, match="MiB"):
        await client.create(background=True)
    await client.sdk.responses.cancel(begun.id)
    events = await events_of(await client.sdk.responses.retrieve(begun.id, stream=True))
    assert types(events) == ["created", "queued", "in_progress", "incomplete"]
    assert [event.sequence_number for event in events] == [0, 1, 2, 3]
    assert [event.response.status for event in events] == ["queued", "queued", "in_progress", "cancelled"]


async def test_a_cut_answer_is_incomplete(client: Client) -> None:
    events = await events_of(await client.create(max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert events[-1].response.output[0].status == "incomplete"


@pytest.mark.parametrize("answer", [[""], ["\n\n"]])
async def test_an_empty_answer_is_an_empty_message(client: Client, answer: list[str]) -> None:
    client.engine.answer = answer
    assert (await client.create()).output[0].content[0].text == answer[0]


async def test_a_conversation_goes_on_from_a_response(client: Client) -> None:
    first = await client.create("One", instructions="Old.")
    second = await client.create("Two", previous_response_id=first.id)
    third = await client.create("Three", previous_response_id=second.id, instructions="New.")
    assert [message["content"] for message in client.prompt()] == ["New.", "One", TEXT, "Two", TEXT, "Three"]
    assert third.previous_response_id == second.id
    assert (await client.sdk.responses.retrieve(second.id)).output_text == TEXT
    items = [item async for item in client.sdk.responses.input_items.list(third.id)]
    assert [item.content[0].text for item in items] == ["Three"]
    await client.sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.sdk.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
        await client.create("Four", previous_response_id=third.id)
    [message] = second.output
    await client.create([{"type": "item_reference", "id": message.id}, {"role": "user", "content": "Five"}])
    assert [message["content"] for message in client.prompt()] == [TEXT, "Five"]


@pytest.mark.parametrize("large", [False, True])
async def test_a_large_history_is_decoded_in_a_thread(
    client: Client, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    threads = []

    class Watched(History):
        def read(self) -> list[Any]:
            threads.append(threading.current_thread())
            return super().read()

    monkeypatch.setattr("app.apis.responses.store.History", Watched)
    monkeypatch.setattr("app.apis.responses.preparing._LARGE", 0 if large else 1 << 20)
    first = await client.create("One")
    threads.clear()
    await client.create("Two", previous_response_id=first.id)
    assert [message["content"] for message in client.prompt()] == ["One", TEXT, "Two"]
    assert [thread is threading.main_thread() for thread in threads] == [not large]


async def test_without_store_nothing_is_kept(client: Client, serve: Callable[..., Awaitable[Client]]) -> None:
    answer = await client.create(store=False)
    with pytest.raises(openai.NotFoundError):
        await client.sdk.responses.retrieve(answer.id)
    off = await serve(response_store_mib=0)
    assert (await off.create()).output_text == TEXT
    for fields in ({"previous_response_id": answer.id}, {"background": True}, {"conversation": "conv_1"}):
        with pytest.raises(openai.BadRequestError, match="--response-store-mib"):
            await off.create(**fields)
    with pytest.raises(openai.BadRequestError, match="--response-store-mib"):
        await off.sdk.conversations.create()


async def test_conversations_keep_items(client: Client) -> None:
    first: Any = {"type": "message", "role": "user", "content": "One"}
    made = await client.sdk.conversations.create(items=[first], metadata={"a": "b"})
    await client.create("Two", conversation=made.id)
    await client.create("Three", conversation={"id": made.id})
    assert [message["content"] for message in client.prompt()] == ["One", "Two", TEXT, "Three"]
    items = [item async for item in client.sdk.conversations.items.list(made.id, limit=2, order="asc")]
    assert [item.content[0].text for item in items] == ["One", "Two", TEXT, "Three", TEXT]
    found = await client.sdk.conversations.items.retrieve(items[1].id, conversation_id=made.id)
    assert found.content[0].text == "Two"
    await client.sdk.conversations.items.delete(items[1].id, conversation_id=made.id)
    added = await client.sdk.conversations.items.create(made.id, items=[first])
    assert added.data[0].content[0].text == "One"
    assert (await client.sdk.conversations.update(made.id, metadata={"c": "d"})).metadata == {"c": "d"}
    assert (await client.sdk.conversations.retrieve(made.id)).metadata == {"c": "d"}
    assert len([item async for item in client.sdk.conversations.items.list(made.id)]) == 5
    assert (await client.sdk.conversations.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.create("Four", conversation=made.id)


async def test_a_background_response_goes_on_alone(client: Client, until: Until) -> None:
    client.engine.gate, client.engine.gate_at = asyncio.Event(), 1
    begun = await client.create(background=True)
    assert begun.status in ("queued", "in_progress")
    assert (await client.sdk.responses.retrieve(begun.id)).status == "in_progress"
    stream = await client.sdk.responses.retrieve(begun.id, stream=True)
    client.engine.gate.set()
    events = await events_of(stream)
    assert types(events)[:3] == ["created", "queued", "in_progress"]
    assert events[-1].response.output_text == TEXT
    await until(lambda: not client.application.service.responses.runs)
    assert (await client.sdk.responses.retrieve(begun.id)).output_text == TEXT
    later = await events_of(await client.sdk.responses.retrieve(begun.id, stream=True, starting_after=4))
    assert [e.sequence_number for e in later] == [e.sequence_number for e in events[5:]]
    foreground = await client.create()
    with pytest.raises(openai.BadRequestError, match="only responses of the background"):
        await client.sdk.responses.retrieve(foreground.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="only responses of the background"):
        await client.sdk.responses.cancel(foreground.id)


async def test_a_background_stream_survives_its_client(client: Client, until: Until) -> None:
    client.engine.gate, client.engine.gate_at = asyncio.Event(), 1
    stream = await client.create(background=True, stream=True)
    first = await anext(aiter(stream))
    await stream.close()
    client.engine.gate.set()
    await until(lambda: not client.application.service.responses.runs)
    assert (await client.sdk.responses.retrieve(first.response.id)).status == "completed"


async def test_a_background_response_is_cancelled(client: Client) -> None:
    client.engine.gate = asyncio.Event()
    begun = await client.create(background=True)
    cancelled = await client.sdk.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert (await client.sdk.responses.retrieve(begun.id)).status == "cancelled"
    assert (await client.sdk.responses.cancel(begun.id)).status == "cancelled"
    assert not client.engine.open


async def test_wrong_background_requests_are_refused_at_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.create(background=True, temperature=-1)
    assert caught.value.param == "temperature"
    assert not client.application.service.responses.runs
    monkeypatch.setattr(handlers, "_MAX_RUNS", 1)
    client.engine.gate = asyncio.Event()
    await client.create(background=True)
    with pytest.raises(openai.RateLimitError, match="background"):
        await client.create(background=True)


async def test_an_error_inside_of_a_stream_is_its_last_event(client: Client) -> None:
    client.engine.fail_at = 2
    events = await events_of(await client.create(stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with pytest.raises(openai.InternalServerError):
        await client.create()


async def test_a_key_sees_only_its_own(serve: Callable[..., Awaitable[Client]]) -> None:
    mine = await serve("a", api_key="a,b", admin_api_key="root")
    others = Client(mine.application, mine.url, "b")
    answer = await mine.create()
    made = await mine.sdk.conversations.create()
    mine.engine.gate = asyncio.Event()
    running = await mine.create(background=True)
    for call in (
        others.sdk.responses.retrieve(answer.id),
        others.sdk.responses.retrieve(running.id),
        others.sdk.responses.cancel(running.id),
        others.sdk.responses.delete(answer.id),
        others.create(previous_response_id=answer.id),
        others.create([{"type": "item_reference", "id": answer.output[0].id}]),
        others.create(conversation=made.id),
        others.sdk.conversations.retrieve(made.id),
        others.sdk.conversations.delete(made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    admin = Client(mine.application, mine.url, "root")
    assert (await admin.sdk.responses.retrieve(answer.id)).output_text == TEXT
    await mine.sdk.responses.cancel(running.id)
    await others.sdk.close()
    await admin.sdk.close()


async def test_responses_outlive_the_server(tmp_path: Path) -> None:
    first = application(file_storage_path=str(tmp_path))
    await first.startup()
    posted = await first.test_client().post("/v1/responses", json={"input": "One"})
    answer = json.loads(await posted.get_data())
    engine: Any = first.engine
    engine.gate = asyncio.Event()
    posted = await first.test_client().post("/v1/responses", json={"input": "Two", "background": True})
    cut = json.loads(await posted.get_data())
    await first.shutdown()
    second = application(file_storage_path=str(tmp_path))
    await second.startup()
    body = {"input": "Three", "previous_response_id": answer["id"]}
    assert (await second.test_client().post("/v1/responses", json=body)).status_code == 200
    found = await second.test_client().get(f"/v1/responses/{cut['id']}")
    assert json.loads(await found.get_data())["status"] == "failed"
    await second.shutdown()


async def test_truncation_leaves_out_the_oldest_turns(client: Client) -> None:
    client.engine.context_length = 60
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "old " * 20},
        {"role": "assistant", "content": "old"},
        {"role": "user", "content": "new"},
    ]
    await client.create(turns, truncation="auto", max_output_tokens=10)
    assert [message["content"] for message in client.prompt()] == ["S", "new"]
    await client.create(turns, truncation="disabled")
    assert len(client.prompt()) == 4


async def test_input_tokens_are_counted(client: Client) -> None:
    counted = await client.sdk.responses.input_tokens.count(input="Hi")
    answer = await client.create("Hi")
    assert counted.input_tokens == answer.usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**SHELL, "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"include": ["everything"]}, "include[0]"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ],
)
async def test_a_wrong_field_is_named(client: Client, fields: dict[str, Any], param: str) -> None:
    response = await client.application.test_client().post("/v1/responses", json={"input": "Hi", **fields})
    answer = json.loads(await response.get_data())
    assert (response.status_code, answer["error"]["param"]) == (400, param), answer


async def test_forced_calls_take_a_custom_tool(client: Client) -> None:
    client.engine.answer = CUSTOM
    answer = await client.create(tools=[ADD, SHELL], tool_choice={"type": "custom", "name": "shell"})
    assert answer.output[0].input == "ls -l"
    assert client.engine.requests[-1]["params"].grammar is not None
    allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    assert (await client.create(tools=[ADD, SHELL], tool_choice=allowed)).status == "completed"


async def test_only_fields_without_effect_are_reported(client: Client) -> None:
    body = {"input": "Hi", "store": True, "include": [], "text": {"verbosity": "low"}, "service_tier": "flex"}
    response = await client.application.test_client().post("/v1/responses", json=body)
    assert response.headers["x-ignored-fields"] == "service_tier, text.verbosity"
