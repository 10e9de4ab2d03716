"""Tool calls in the text of a model, and in the answers of the chat API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.arguments import Arguments
from app.application import create_app
from app.openai.tool_calls import ToolCallReader
from tests.app.conftest import FakeEngine
from tests.app.test_chat import BODY, events, post

NAMES = ("get_weather", "add")
OSLO = '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "Oslo"}}\n</tool_call>'
SUM = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
CALLS = {re.sub("</?tool_call>", "", text).strip() for text in (OSLO, SUM, '{"name": "add"}')}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]


def pieces(*texts: str, size: int = 7) -> list[str]:
    return [text[at : at + size] for text in texts for at in range(0, len(text), size)]


Read = tuple[str, list[tuple[str, str]]]

TEXTS: dict[str, Read] = {
    "": ("", []),
    "a < b </tool_call> <tool_cal <think": ("a < b </tool_call> <tool_cal <think", []),
    OSLO: ("", [("get_weather", '{"city":  "Oslo"}')]),
    f"Let me look. {OSLO}\n{SUM}\n": ("Let me look. ", [("get_weather", '{"city":  "Oslo"}'), ("add", '{"a": 1}')]),
    f"{SUM}  so <b>": ("so <b>", [("add", '{"a": 1}')]),
    '<tool_call>{"name": "add"}</tool_call>': ("", [("add", "{}")]),
    f"<think>\nI say {OSLO} </think>\n\n{SUM}": (f"<think>\nI say {OSLO} </think>\n\n", [("add", '{"a": 1}')]),
    OSLO.removesuffix("</tool_call>"): ("", [("get_weather", '{"city":  "Oslo"}')]),
    f"<think>{OSLO}": (f"<think>{OSLO}", []),
    f" \n<think>{OSLO}</think><think>{SUM}": (f" \n<think>{OSLO}</think><think>", [("add", '{"a": 1}')]),
    f"I <think> so. {SUM}": ("I <think> so. ", [("add", '{"a": 1}')]),
    f"{SUM}<think>{SUM}": ("<think>", [("add", '{"a": 1}')] * 2),
    **{
        text: (text, [])
        for text in (
            '<tool_call>{"name": "rm", "arguments": {}}</tool_call> x',
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "add", "arguments": "[1]"}</tool_call>',
            '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
            '<tool_call>{"name": "add", "arguments": {"a": ',
            "<tool_call>__import__('os')</tool_call>\n",
            f'<tool_call>{{"name": "add", "arguments": {"[" * 5000}</tool_call>',
        )
    },
}


def read(pieces: list[str], **keywords: Any) -> Read:
    reader = ToolCallReader(NAMES, **keywords)
    told = [*map(reader.read, pieces), reader.end()]
    calls = [call for _, some in told for call in some]
    assert [call.index for call in calls] == list(range(reader.calls))
    assert len({call.id for call in calls}) == len(calls)
    return "".join(text for text, _ in told), [(call.function.name, call.function.arguments) for call in calls]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:60]))
def test_a_text_is_taken_apart_however_it_comes(text: str) -> None:
    for size in (len(text) + 1, 1, 2, 5, 11):
        assert read(pieces(text, size=size)) == TEXTS[text]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([*TEXTS, "<tool_call>", "</tool_call>", "<think>", "</think>", "\n", "é"]), max_size=6))
def test_nothing_but_calls_is_lost(parts: list[str]) -> None:
    text = "".join(parts)
    whole = read([text])
    assert read(list(text)) == whole
    thought = re.match(r"\s*<think>.*?(?:</think>|\Z)|", text, re.DOTALL)[0]
    assert whole[0] == thought + re.sub(
        r"<tool_call>(.*?)(?:</tool_call>|\Z)\s*", left, text[len(thought) :], flags=re.DOTALL
    )


def left(block: re.Match[str]) -> str:
    """Nothing of a call, all of another block."""
    return "" if block[1].strip() in CALLS else block[0]


def test_a_thought_may_have_begun_in_the_prompt() -> None:
    text = f"I say {OSLO}<think> </think>{SUM}"
    assert read(list(text), thinking=True) == (text.removesuffix(SUM), [("add", '{"a": 1}')])
    assert read([OSLO], thinking=True) == (OSLO, [])


def test_text_is_told_as_soon_as_it_cannot_be_a_call() -> None:
    reader = ToolCallReader(NAMES)
    told = [reader.read(piece)[0] for piece in ("Hel", "lo <", "b> <tool", "_box>")]
    assert told == ["Hel", "lo ", "<b> ", "<tool_box>"]


def test_only_the_first_call_where_there_may_be_one() -> None:
    assert read([f"x {OSLO}{SUM} y"], parallel=False) == ("x y", [("get_weather", '{"city":  "Oslo"}')])


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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_template_may_begin_the_thought(stream: bool, application, engine) -> None:
    detokenize, engine.answer = engine.detokenize, pieces(OSLO, "</think>")

    async def without_special_tokens(ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = await detokenize(ids)
        return text.replace("<think>", "") if skip_special_tokens else text

    engine.detokenize = without_special_tokens
    for said, count in (("Hello! <think>\n", 0), ("<think></think>", 1)):  # the fake engine's prompts end with it
        body = {"messages": [{"role": "user", "content": said}], "tools": TOOLS, "stream": stream}
        _, data = await post(application, body)
        assert data.count(b'"name":"get_weather"') == count


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
    assert (text, end) == ("No need. <tool_call>what?</tool_call>", "stop")


async def test_marks_are_read_where_they_are_special_tokens(application, engine) -> None:
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    asked = ({}, marks), ({"skip_special_tokens": True}, ()), ({"tool_choice": "none"}, ()), ({"tools": []}, ())
    for fields, shown in asked:
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
        asked: dict[str, Any] = {**BODY, "tools": TOOLS, "tool_choice": "auto", "logprobs": True}
        async with client.chat.completions.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            [choice] = (await stream.get_final_completion()).choices
        whole = await client.chat.completions.create(**asked)
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look.\n"
    assert len(choice.logprobs.content) == len(engine.answer)
    assert [call.function.name for call in choice.message.tool_calls] == list(NAMES)
    functions = [(call.type, call.function.arguments) for call in choice.message.tool_calls]
    assert functions == [("function", '{"city":  "Oslo"}'), ("function", '{"a": 1}')]
    assert [(call.type, call.function.arguments) for call in whole.choices[0].message.tool_calls] == functions
