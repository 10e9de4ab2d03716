"""llama.cpp's own API: completions, fill in the middle, facts for its front ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.kits.app_requests import events, post
from tests.kits.fake_engine import ANSWER

BODY = {"prompt": "Capital of France?"}


async def ask(application: Any, path: str, body: dict[str, Any] | None = None, **keywords: Any) -> tuple[int, Any]:
    if body is None:
        response = await application.test_client().get(path)
        data = await response.get_data()
    else:
        response, data = await post(application, body, path, **keywords)
    return response.status_code, msgspec.json.decode(data)


async def test_a_completion_has_llamas_form(application) -> None:
    status, answer = await ask(application, "/completion", {**BODY, "return_tokens": True})
    assert status == 200
    assert (answer["content"], answer["stop"], answer["stop_type"]) == ("".join(ANSWER), True, "eos")
    assert answer["tokens"] == [1000 + step for step in range(len(ANSWER))]
    assert (answer["tokens_evaluated"], answer["tokens_predicted"]) == (len(BODY["prompt"]), len(ANSWER))
    assert answer["timings"]["predicted_n"] == len(ANSWER)
    assert answer["tokens_cached"] == len(BODY["prompt"]) // 2


async def test_a_whole_answer_times_its_tokens_from_the_first(application, engine) -> None:
    engine.step_seconds = 0.02
    _, answer = await ask(application, "/completion", BODY)
    assert answer["timings"]["predicted_ms"] >= 20 * (len(ANSWER) - 2)  # every step sleeps that long


async def test_a_stream_ends_with_the_facts(application, engine) -> None:
    engine.matched_stop = "."
    response, data = await post(application, {**BODY, "stream": True, "stop": ["."]}, "/completion")
    *parts, last = events(data)
    assert response.content_type.startswith("text/event-stream")
    assert "".join(part["content"] for part in parts) == "".join(ANSWER)
    assert not any(part["stop"] for part in parts)
    assert (last["content"], last["stop"], last["stop_type"], last["stopping_word"]) == ("", True, "word", ".")


async def test_several_prompts_have_several_answers(application) -> None:
    _, answers = await ask(application, "/completion", {"prompt": ["a", "b"], "n_predict": 2})
    assert [(answer["index"], answer["stop_type"]) for answer in answers] == [(0, "limit"), (1, "limit")]


async def test_fields_are_parameters(application, engine) -> None:
    fields = {
        "n_predict": -1, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": -1, "stop": "x",
        "repeat_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.2, "ignore_eos": True,
        "logit_bias": [[5, 1.5], [6, False], ["no", False]], "n_probs": 1, "json_schema": {"type": "object"},
    }  # fmt: skip
    _, answer = await ask(application, "/completion", {**BODY, **fields})
    params = engine.requests[-1]["params"]
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (None, 0.5, 3, 0.9, 0.1)
    assert (params.seed, params.stop, params.repetition_penalty, params.ignore_eos) == (None, ("x",), 1.1, True)
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)
    assert (params.logit_bias, params.bad_words) == ({5: 1.5, 6: -100.0}, ("no",))
    assert params.grammar.kind == "json_schema"
    found = answer["completion_probabilities"][0]
    assert (found["id"], found["token"], found["logprob"]) == (1000, ANSWER[0], -0.5)
    assert found["top_logprobs"][0]["id"] == 1000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mirostat": 2}, "mirostat"),
        ({"n_predict": 0}, "n_predict"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        ({"grammar": "root ::= 'a'", "json_schema": {}}, "json_schema"),
        ({"logit_bias": [["x", 1]]}, "logit_bias[0]"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)
async def test_what_cannot_be_kept_is_named(application, fields: dict[str, Any], param: str) -> None:
    status, answer = await ask(application, "/completion", {**BODY, **fields})
    error = answer["error"]
    assert (status, error["code"], error["type"], error["param"]) == (400, 400, "invalid_request_error", param)


async def test_a_text_is_filled_in_by_the_template(make_application, tmp_path) -> None:
    template = tmp_path / "fill.jinja"
    template.write_text("<P>{{ prompt }}<S>{{ suffix }}<M>")
    application = make_application(completion_template=str(template))
    body = {"input_prefix": "a", "input_suffix": "b", "prompt": "c"}
    status, answer = await ask(application, "/infill", body)
    assert (status, answer["content"]) == (200, "".join(ANSWER))
    assert application.engine.requests[-1]["prompt"] == "<P>a<S>b<M>c"
    status, answer = await ask(application, "/infill", {**body, "input_extra": [{"text": "x"}]})
    assert (status, answer["error"]["param"]) == (400, "input_extra")


async def test_without_a_template_nothing_is_filled_in(application) -> None:
    status, answer = await ask(application, "/infill", {"input_prefix": "a"})
    assert (status, answer["error"]["param"]) == (400, "input_suffix")


async def test_front_ends_learn_the_servers_facts(application, engine) -> None:
    engine.chat_template = "{{ messages }}"
    _, props = await ask(application, "/props")
    assert props["default_generation_settings"]["n_ctx"] == engine.context_length
    assert (props["model_alias"], props["chat_template"]) == ("fake", "{{ messages }}")
    assert "/models/fake" not in str(props)
    _, slots = await ask(application, "/slots")
    assert len(slots) == props["total_slots"] == application.arguments.max_running_requests
    assert not any(slot["is_processing"] for slot in slots)


async def test_busy_slots_are_a_status_when_requested(make_application) -> None:
    application = make_application(max_running_requests=1)
    application.engine.open.add(object())
    assert (await ask(application, "/slots"))[1][0]["is_processing"]
    status, answer = await ask(application, "/slots?fail_on_no_slot=1")
    application.engine.open.clear()
    assert (status, answer["error"]["type"]) == (503, "unavailable_error")


async def test_a_template_is_applied_without_an_answer(application, engine) -> None:
    status, answer = await ask(application, "/apply-template", {"messages": [{"role": "user", "content": "Hi"}]})
    assert (status, answer) == (200, {"prompt": "user: Hi\n"})
    assert engine.requests == []


async def test_tokens_have_llamas_form(application) -> None:
    _, answer = await ask(application, "/tokenize", {"content": "Hi"})
    assert answer["tokens"] == [72, 105]
    _, answer = await ask(application, "/tokenize", {"content": "Hi", "with_pieces": True})
    assert answer["tokens"] == [{"id": 72, "piece": "H"}, {"id": 105, "piece": "i"}]
    _, answer = await ask(application, "/detokenize", {"tokens": [72, 105]})
    assert answer["content"] == "Hi"
    status, answer = await ask(application, "/tokenize", {"content": "Hi", "parse_special": False})
    assert (status, answer["error"]["param"]) == (400, "parse_special")


async def test_a_stream_that_fails_ends_with_an_error(application, engine) -> None:
    engine.fail_at = 2
    _, data = await post(application, {**BODY, "stream": True}, "/completion")
    assert events(data)[-1]["error"]["code"] == 500
