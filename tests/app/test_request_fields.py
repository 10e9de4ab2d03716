"""Every field of a request reaches the engine from every API, under whichever of its names, and none another's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actors.arguments import Arguments
from actors.requests import LIMITS, Chat, SamplingParams
from app.errors import ApiError
from app.native_requests import GenerateRequest, batch_of
from app.openai.parameters import chat_params, chat_prompt, completion_params, label_of, salt_of
from app.openai.requests import ChatRequest, CompletionRequest

SHARED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.4,
    "top_k": 9,
    "min_p": 0.2,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": -0.6,
    "logit_bias": {5: -1.5},
    "n": 3,
    "stop": ["a", "b"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "speculative": False,
    "speculative_num_draft_tokens": 6,
}
OPENAI = SHARED | {
    "max_tokens": 50,
    "min_tokens": 2,
    "seed": 11,
    "include_stop_str_in_output": True,
    "bad_words": ["c"],
    "allowed_token_ids": [1, 2, 3],
    "prompt_logprobs": 4,
}
WANTED = SamplingParams(
    max_tokens=50,
    min_tokens=2,
    temperature=0.5,
    top_p=0.4,
    top_k=9,
    min_p=0.2,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=-0.6,
    logit_bias={5: -1.5},
    seed=11,
    n=3,
    stop=("a", "b"),
    stop_token_ids=(7,),
    include_stop_str_in_output=True,
    ignore_eos=True,
    skip_special_tokens=False,
    logprobs=8,
    prompt_logprobs=4,
    bad_words=("c",),
    allowed_token_ids=(1, 2, 3),
    speculative=False,
    speculative_num_draft_tokens=6,
)


def chat(**fields: Any) -> SamplingParams:
    return chat_params(msgspec.convert({"messages": [{"role": "user", "content": "a"}], **fields}, ChatRequest))


def completion(**fields: Any) -> SamplingParams:
    return completion_params(msgspec.convert({"prompt": "a", **fields}, CompletionRequest))


def native(sampling: dict[str, Any], **fields: Any) -> SamplingParams:
    body = msgspec.convert({"text": "a", "sampling_params": sampling, **fields}, GenerateRequest)
    return batch_of(body).items[0].params


def test_each_field_is_itself() -> None:
    assert chat(**OPENAI, logprobs=True, top_logprobs=8) == WANTED
    assert completion(**OPENAI, logprobs=8) == WANTED
    sampling = {**SHARED, "max_new_tokens": 50, "min_new_tokens": 2, "sampling_seed": 11}
    scored = native({**sampling, "no_stop_trim": True}, return_logprob=True, top_logprobs_num=8, logprob_start_len=0)
    less = {"bad_words": (), "allowed_token_ids": None, "prompt_logprobs": 8}  # SGLang's has no such fields
    assert scored == msgspec.structs.replace(WANTED, **less)


def test_what_is_left_out_is_left_to_the_engine() -> None:
    assert chat() == SamplingParams()
    assert completion() == SamplingParams(default_max_tokens=16)
    assert native({}) == SamplingParams(default_max_tokens=128)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5, "max_tokens": 9}, {"max_tokens": 5}),
        ({"no_stop_trim": True}, {"include_stop_str_in_output": True}),
        ({"stop": "word"}, {"stop": ("word",)}),
        ({"logprobs": True}, {"logprobs": 0}),
    ],
)
def test_other_spellings(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert chat(**fields) == SamplingParams(**wanted)


def test_scores_of_a_prompt_are_asked_for_by_echo_or_by_where_they_begin() -> None:
    assert completion(echo=True, logprobs=3).prompt_logprobs == 3
    assert completion(echo=True, logprobs=3, prompt_logprobs=1).prompt_logprobs == 1
    assert completion(echo=True).prompt_logprobs is completion(logprobs=3).prompt_logprobs is None
    for start, wanted in ((None, None), (-1, None), (0, 2), (4, 2)):
        assert native({}, return_logprob=True, top_logprobs_num=2, logprob_start_len=start).prompt_logprobs == wanted
    assert native({}, top_logprobs_num=2, logprob_start_len=0).logprobs is None


def conversation(messages: list[dict[str, Any]], **fields: Any) -> Chat:
    return chat_prompt(msgspec.convert({"messages": messages, **fields}, ChatRequest), Arguments(model_path="m"))


def test_a_template_is_given_all_of_a_conversation() -> None:
    call = {"name": "add", "arguments": '{"a": 1}'}
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    said = [
        {"role": "developer", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": "What is it?", "name": "eve"},
        {"role": "assistant", "tool_calls": [{"id": "c1", "function": call}], "reasoning_content": "hm"},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "refusal": "no"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters, "strict": True}}]
    chat = conversation(said, tools=tools, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert chat == Chat(
        messages=[
            {"role": "system", "content": "one\ntwo"},
            {"role": "user", "content": "What is it?", "name": "eve"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
                ],
            },
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
            {"role": "assistant", "content": "no"},
        ],
        tools=tools,
        template_kwargs={"enable_thinking": False, "reasoning_effort": "low"},
    )


def test_what_is_free_of_form_is_bounded_all_the_same() -> None:
    said, long = [{"role": "user", "content": "a"}], "x" * max(LIMITS.schema_bytes, LIMITS.template_kwargs_bytes)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"description": long}}}
    for field, fields in (
        ("tools[1].function.parameters", {"tools": [{"type": "function", "function": {"name": "f"}}, tool]}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"a": long}}),
    ):
        with pytest.raises(ApiError, match="bytes as JSON") as refused:
            conversation(said, **fields)
        assert refused.value.param == field


def test_who_goes_on_is_not_asked_to_begin() -> None:
    said = [{"role": "assistant", "content": "Once"}]

    def told(**fields: Any) -> tuple[bool, bool]:
        chat = conversation(said, **fields)
        return chat.add_generation_prompt, chat.continue_final_message

    assert told() == told(add_generation_prompt=True) == (True, False)
    assert told(add_generation_prompt=False) == (False, False)
    assert told(continue_final_message=True) == (False, True)
    assert told(continue_final_message=True, add_generation_prompt=False) == (False, True)
    with pytest.raises(ApiError, match="contradicts"):
        told(continue_final_message=True, add_generation_prompt=True)


def test_a_stream_tells_no_scores_of_its_prompt() -> None:
    for ask in (chat, completion):
        with pytest.raises(ApiError, match="not in a stream"):
            ask(stream=True, prompt_logprobs=1)


def test_names_of_requests_and_salts() -> None:
    def body(**fields: Any) -> CompletionRequest:
        return msgspec.convert({"prompt": "a", **fields}, CompletionRequest)

    assert label_of(body(rid="r", request_id="q")) == "r"
    assert label_of(body(request_id="q")) == "q"
    assert salt_of(body(cache_salt="s")) == "s"
    assert salt_of(body(extra_key="k")) == "k"
    assert len({salt_of(body(cache_salt=a, extra_key=b)) for a, b in (("s", "k"), ("k", "s"), ("s", "s"))}) == 3
    assert label_of(body()) is salt_of(body()) is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/generate", {"text": "a"}),
    ],
)
async def test_what_is_not_of_sampling_reaches_the_engine_too(
    application: Any, path: str, body: dict[str, Any]
) -> None:
    client = application.test_client()
    for fields in ({"priority": 7, "rid": "mine", "cache_salt": "s"}, {"extra_key": "k"}, {}):
        assert (await client.post(path, json={**body, **fields})).status_code == 200
    first, second, last = application.engine.requests
    assert (first["priority"], first["request_id"], first["cache_salt"]) == (7, "mine", "s")
    assert (second["priority"], second["cache_salt"]) == (0, "k")
    assert last["cache_salt"] is None
    assert len({first["request_id"], second["request_id"], last["request_id"]}) == 3
