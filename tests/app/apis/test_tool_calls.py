"""Tool calls in the answers of the chat API."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import openai
import pytest

from actors.options import Arguments
from app.apis.choice_reader import ChoiceReader
from app.apis.collecting import CollectedChoice
from app.apis.events import read_whole
from app.application import create_app
from app.parsers.tools.hermes import HermesParser
from tests.kits.app_requests import BODY, events, post
from tests.kits.fake_engine import FakeEngine
from tests.kits.tool_formats import ADD, written
from tests.kits.tool_formats import TOOLS as SCHEMAS

NAMES = ("get_weather", "add")
OSLO = '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "Oslo"}}\n</tool_call>'
SUM = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
CALLS = {re.sub("</?tool_call>", "", text).strip() for text in (OSLO, SUM, '{"name": "add"}')}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]


def pieces(*texts: str, size: int = 7) -> list[str]:
    return [text[at : at + size] for text in texts for at in range(0, len(text), size)]


async def test_an_answer_holds_the_calls(application, engine) -> None:
    engine.answer = pieces(OSLO, "\n", SUM)
    _, data = await post(application, {**BODY, "tools": TOOLS, "n": 2})
    for choice in msgspec.json.decode(data)["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        first, second = choice["message"]["tool_calls"]
        assert first.pop("id") != second.pop("id")
        assert first == {"type": "function", "function": {"name": "get_weather", "arguments": '{"city":  "Oslo"}'}}
        assert second == {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    _, data = await post(application, {**BODY, "tools": TOOLS, "parallel_tool_calls": False})
    assert len(msgspec.json.decode(data)["choices"][0]["message"]["tool_calls"]) == 1


async def test_the_loop_runs_while_a_long_answer_is_parsed() -> None:
    arguments = msgspec.json.encode({"text": "word " * 4000}).decode()
    choice = CollectedChoice()
    choice.text = pieces(f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>')
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(turn())
    answer = await read_whole(choice, ChoiceReader(HermesParser({"add": {}}), None))
    other.cancel()
    assert [call.arguments for call in answer.calls] == [arguments]
    assert turns >= 5


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_need_not_be_called(stream: bool, application, engine) -> None:
    engine.answer = pieces("No need. ", "<tool_call>what?</tool_call>")
    _, data = await post(application, {**BODY, "tools": TOOLS, "stream": stream})
    if stream:
        choices = [event["choices"][0] for event in events(data)[:-1]]
        assert not any("tool_calls" in choice["delta"] for choice in choices)
        text, end = "".join(choice["delta"].get("content", "") for choice in choices), choices[-1]["finish_reason"]
    else:
        [choice] = msgspec.json.decode(data)["choices"]
        assert "tool_calls" not in choice["message"]
        text, end = choice["message"]["content"], choice["finish_reason"]
    assert (text, end) == ("No need. what?", "stop")


async def test_marks_are_read_where_they_are_special_tokens(application, engine) -> None:
    marks = ("<tool_call>", "</tool_call>")
    request = ({}, marks), ({"skip_special_tokens": True}, marks), ({"tool_choice": "none"}, ()), ({"tools": []}, ())
    for fields, shown in request:
        await post(application, {**BODY, "tools": TOOLS, **fields})
        params = engine.requests[-1]["params"]
        assert (params.skip_special_tokens, params.shown_special_tokens) == (True, shown)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "options"),
    [({}, {}), ({"tools": TOOLS, "tool_choice": "none"}, {}), ({"tools": TOOLS}, {"tool_call_parser": "off"})],
)
async def test_without_tools_or_parser_all_is_text(fields, options, stream: bool) -> None:
    arguments = Arguments(model_path="/models/fake", served_model_name=("fake",), skip_server_warmup=True, **options)
    engine = FakeEngine(arguments)
    engine.answer = pieces("Look: ", OSLO)
    _, data = await post(create_app(arguments, engine), {**BODY, **fields, "stream": stream})
    if stream:
        choices = [event["choices"][0] for event in events(data)[:-1]]
        text, end = "".join(choice["delta"].get("content", "") for choice in choices), choices[-1]["finish_reason"]
    else:
        [choice] = msgspec.json.decode(data)["choices"]
        text, end = choice["message"]["content"], choice["finish_reason"]
        assert "tool_calls" not in choice["message"]
    assert (text, end) == (f"Look: {OSLO}", "stop")


async def test_the_openai_client_assembles_the_calls_of_a_stream(application, engine, serve) -> None:
    engine.answer = pieces("Let me look.\n", OSLO, SUM)
    client = openai.AsyncOpenAI(
        base_url=f"{await serve(application)}/v1", api_key="none", _strict_response_validation=True, max_retries=0
    )
    async with client:
        request: dict[str, Any] = {**BODY, "tools": TOOLS, "tool_choice": "auto", "logprobs": True}
        async with client.chat.completions.stream(**request) as stream:
            kinds = [event.type async for event in stream]
            [choice] = (await stream.get_final_completion()).choices
        whole = await client.chat.completions.create(**request)
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look.\n"
    assert len(choice.logprobs.content) == len(engine.answer)
    assert [call.function.name for call in choice.message.tool_calls] == list(NAMES)
    functions = [(call.type, call.function.arguments) for call in choice.message.tool_calls]
    assert functions == [("function", '{"city":  "Oslo"}'), ("function", '{"a": 1}')]
    assert [(call.type, call.function.arguments) for call in whole.choices[0].message.tool_calls] == functions


@pytest.mark.parametrize("name", ["apertus", "hy_v3", "kimi_k3", "minimax-m3"])
async def test_the_openai_client_sees_deltas_of_calls_in_every_format(name: str, serve) -> None:
    arguments = Arguments(
        model_path="/models/fake", served_model_name=("fake",), skip_server_warmup=True, tool_call_parser=name
    )
    engine = FakeEngine(arguments)
    weather = ("get_weather", {"city": 'In Oslo "é"\n, Norway', "days": 2, "tags": ["a", {"b": 1.5}]})
    engine.answer = pieces("I look.\n", written(name, weather, ADD), size=5)
    tools: Any = [
        {"type": "function", "function": {"name": tool, "parameters": schema}} for tool, schema in SCHEMAS.items()
    ]
    base_url = f"{await serve(create_app(arguments, engine))}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        stream: Any = await client.chat.completions.create(**{**BODY, "tools": tools, "stream": True})
        choices = [chunk.choices[0] async for chunk in stream]
    deltas = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert "".join(choice.delta.content or "" for choice in choices).strip() == "I look."
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    assert [call.index for call in deltas] == sorted(call.index for call in deltas)
    for index, (called, given) in enumerate((weather, ADD)):
        first, *others = [call for call in deltas if call.index == index]
        assert (first.function.name, first.type, bool(first.id)) == (called, "function", True)
        assert not any(call.id or call.type or call.function.name for call in others)
        parts = [call.function.arguments or "" for call in (first, *others)]
        assert msgspec.json.decode("".join(parts)) == given
        if index == 0:
            assert sum(map(bool, parts)) > 3  # they come as they are made
    assert len({call.id for call in deltas if call.id}) == 2
