"""Thoughts in the answers of the chat API."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest

from actors.options import Arguments
from actors.protocol.requests import ThoughtBudget
from app.application import create_app
from tests.kits.app_requests import BODY, events, post
from tests.kits.fake_engine import FakeEngine

THOUGHT = ["<think>", "\nHm", ", so\n", "</think>", "\n\n", "It ", "is."]
CALL = ['<tool_call>{"name": "add", "arguments": {"a"', ": 1}}</tool_call>"]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def served(template: str | None = "<think></think>", **options: Any) -> tuple[Any, FakeEngine]:
    arguments = Arguments(model_path="/models/fake", served_model_name=("fake",), skip_server_warmup=True, **options)
    engine = FakeEngine(arguments)
    engine.chat_template = template
    engine.answer = list(THOUGHT)
    tokenize = engine.tokenize

    async def with_marks(prompt: Any, **keywords: Any) -> list[int]:
        return [1000 + THOUGHT.index(prompt)] if prompt in THOUGHT else await tokenize(prompt, **keywords)

    engine.tokenize = with_marks
    return create_app(arguments, engine), engine


async def complete(application: Any, stream: bool, **fields: Any) -> dict[str, Any]:
    """Thought, content and calls of the first choice, whole or joined from the stream."""
    extra = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    _, data = await post(application, {**BODY, **fields, **extra})
    if not stream:
        answer = msgspec.json.decode(data)
        [choice] = answer["choices"]
        message = choice["message"]
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        thought, content, end = message.get("reasoning_content"), message["content"], choice["finish_reason"]
        assert message.get("reasoning") == thought
        usage = answer["usage"]
    else:
        parts = [event for event in events(data) if event != "[DONE]"]
        deltas = [part["choices"][0]["delta"] for part in parts if part["choices"]]
        assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
        thought = "".join(delta.get("reasoning_content", "") for delta in deltas) or None
        content = "".join(delta.get("content", "") for delta in deltas) or None
        pieces = "".join(call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ()))
        calls = [pieces] if pieces else []
        [end] = [part["choices"][0]["finish_reason"] for part in parts[:-1] if part["choices"][0]["finish_reason"]]
        usage = parts[-1]["usage"]
    tokens = usage.get("completion_tokens_details", {}).get("reasoning_tokens")
    return {"thought": thought, "content": content, "calls": calls, "end": end, "tokens": tokens}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_thought_is_a_field_of_its_own(stream: bool) -> None:
    application, engine = served()
    answer = await complete(application, stream)
    assert answer == {"thought": "Hm, so", "content": "It is.", "calls": [], "end": "stop", "tokens": 3}
    assert engine.requests[-1]["params"].shown_special_tokens == ("<think>", "</think>")


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_follow_the_thought(stream: bool) -> None:
    application, engine = served()
    engine.answer[5:] = CALL
    answer = await complete(application, stream, tools=TOOLS)
    assert answer == {"thought": "Hm, so", "content": None, "calls": ['{"a": 1}'], "end": "tool_calls", "tokens": 3}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_cut_by_the_limit_is_reported(stream: bool) -> None:
    application, engine = served()
    engine.answer = [*CALL, "x"]
    answer = await complete(application, stream, tools=TOOLS, max_tokens=1)
    assert (answer["content"], answer["calls"], answer["end"]) == (None, ['{"a"'], "length")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_template_may_begin_or_end_the_thought(stream: bool) -> None:
    application, engine = served()
    detokenize = engine.detokenize

    async def without_special_tokens(ids: Any, *, skip_special_tokens: bool = True) -> str:
        text: str = await detokenize(ids)
        return text.replace("<think>", "") if skip_special_tokens else text

    engine.detokenize = without_special_tokens
    engine.answer = THOUGHT[1:]
    messages = [{"role": "user", "content": "Hello! <think>"}]
    assert (await complete(application, stream, messages=messages))["thought"] == "Hm, so"
    messages = [{"role": "user", "content": "<think></think>"}]
    assert (await complete(application, stream, messages=messages))["thought"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_fields_of_the_request_choose_where_the_thought_goes(stream: bool) -> None:
    application, _ = served()
    whole = "".join(THOUGHT)
    answer = await complete(application, stream, separate_reasoning=False)
    assert (answer["thought"], answer["content"]) == (None, whole)
    answer = await complete(application, stream, include_reasoning=False)
    assert (answer["thought"], answer["content"], answer["tokens"]) == (None, "It is.", 3)
    assert (await complete(application, stream, stream_reasoning=False))["thought"] == "Hm, so"
    _, data = await post(application, {**BODY, "stream": True, "stream_reasoning": False})
    assert data.count(b'"reasoning_content"') == 1


@pytest.mark.parametrize("options", [{"reasoning_parser": "off"}, {"reasoning_parser": "mistral"}])
async def test_the_server_chooses_the_format(options: dict[str, Any]) -> None:
    application, _ = served(**options)
    assert (await complete(application, False))["content"] == "".join(THOUGHT)


async def test_harmony_answers_have_both() -> None:
    application, engine = served(None, reasoning_parser="gpt-oss", tool_call_parser="gpt-oss")
    engine.answer = [
        "<|channel|>analysis<|message|>Hm<|end|>",
        "<|start|>assistant<|channel|>commentary to=functions.add",
    ]
    engine.answer += ["<|message|>{}"]
    answer = await complete(application, True, tools=TOOLS)
    assert (answer["thought"], answer["content"], answer["calls"], answer["end"]) == ("Hm", None, ["{}"], "tool_calls")


async def test_effort_reaches_templates_that_know_it_or_a_switch() -> None:
    application, engine = served()
    for fields, expected in (
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        ({"reasoning_effort": "minimal"}, {"reasoning_effort": "minimal"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
    ):
        await post(application, {**BODY, **fields})
        assert engine.requests[-1]["prompt"].template_kwargs == expected


async def test_the_openai_client_reads_the_thought(serve: Any) -> None:
    application, _ = served()
    client = openai.AsyncOpenAI(base_url=f"{await serve(application)}/v1", api_key="none", max_retries=0)
    async with client:
        answer = await client.chat.completions.create(**BODY)
        thought = ""
        async for chunk in await client.chat.completions.create(**BODY, stream=True):
            thought += (chunk.choices[0].delta.model_extra or {}).get("reasoning_content") or ""
    assert answer.choices[0].message.model_extra["reasoning_content"] == thought == "Hm, so"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3


async def test_a_budget_names_the_marks_tokens() -> None:
    application, engine = served()
    for fields in ({"thinking_budget": 7}, {"max_thinking_tokens": 7}, {"reasoning": {"max_tokens": 7}}):
        await post(application, {**BODY, **fields})
        assert engine.requests[-1]["params"].thought_budget == ThoughtBudget(7, 1000, 1003)
    for name, options in (("off", {"reasoning_parser": "off"}), ("kimi", {"reasoning_parser": "kimi"})):
        response, data = await post(served(**options)[0], {**BODY, "thinking_budget": 7})
        assert (response.status_code, msgspec.json.decode(data)["error"]["param"]) == (400, "thinking_budget"), name


@pytest.mark.parametrize("stream", [False, True])
async def test_special_tokens_are_left_out_after_the_thought_is_read(stream: bool) -> None:
    application, engine = served()
    detokenize = engine.detokenize

    async def without_special_tokens(ids: Any, *, skip_special_tokens: bool = True) -> str:
        return "" if skip_special_tokens and list(ids) in ([1000], [1003]) else str(await detokenize(ids))

    engine.detokenize = without_special_tokens
    engine.answer = [*THOUGHT, "</think>", "<think>", "!"]
    answer = await complete(application, stream, skip_special_tokens=True)
    assert (answer["thought"], answer["content"]) == ("Hm, so", "It is.!")
    answer = await complete(application, stream, skip_special_tokens=False)
    assert (answer["thought"], answer["content"]) == ("Hm, so", "It is.</think><think>!")
