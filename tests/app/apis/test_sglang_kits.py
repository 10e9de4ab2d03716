"""What SGLang's clients count on, on the wire, with the included model: endpoints, greedy answers, stops, aborts, the
prefix cache, pauses, sessions, grammars, and Anthropic's messages."""

from __future__ import annotations

import json
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.kits.real_server import running
from tests.kits.waiting import PATIENCE, blocking_until

pytestmark = pytest.mark.long

PROMPT = "List 3 countries and their capitals."
MESSAGE = {"role": "user", "content": PROMPT}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    log: Path = tmp_path_factory.mktemp("kits") / "log"
    with (
        running(log, "--max-running-requests", "16") as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        yield client
        assert server.process.poll() is None, log.read_text()
        assert client.get("/health").status_code == 200


def generate(client: httpx.Client, prompt: str | list[int], **fields: Any) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": 24, **fields.pop("sampling_params", {})}
    text = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    answer = client.post("/generate", json={**text, "sampling_params": sampling, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def encode(client: httpx.Client, text: str) -> list[int]:
    ids: list[int] = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    return ids


def load(client: httpx.Client) -> dict[str, Any]:
    [one] = client.get("/v1/loads").json()["loads"]
    return dict(one)


# -- endpoints


def test_every_endpoint_of_the_contract_answers(client):
    for path in ("/health", "/health_generate"):
        assert client.get(path).status_code == 200
    assert client.get("/get_server_info").json()
    assert client.get("/get_model_info").json()["model_path"]


def test_the_model_default_is_the_served_one(client):
    body = {"model": "default", "temperature": 0, "max_tokens": 16}
    chat = client.post("/v1/chat/completions", json={**body, "messages": [MESSAGE]}).json()
    assert chat["choices"][0]["message"]["content"]
    assert chat["usage"]["completion_tokens"]
    completion = client.post("/v1/completions", json={**body, "prompt": PROMPT}).json()
    assert completion["choices"][0]["text"]
    assert completion["model"] == chat["model"] != "default"


def test_a_websocket_is_answered_with_what_to_use_instead(client):
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    answer = client.get("/v1/realtime", headers={**headers, "Sec-WebSocket-Key": "x3JJHMbDL1EzLkh9GBhXDw=="})
    assert answer.status_code == 404
    assert answer.headers["connection"] == "close"
    assert "POST /v1/responses" in answer.json()["error"]["message"]
    assert "POST /v1/responses" in client.get("/v1/realtime").json()["error"]["message"]


# -- greedy answers


def test_greedy_answers_repeat_and_are_text(client):
    first = generate(client, PROMPT, sampling_params={"max_new_tokens": 128})["text"]
    assert generate(client, PROMPT, sampling_params={"max_new_tokens": 128})["text"] == first
    assert sum(char.isascii() and (char.isprintable() or char.isspace()) for char in first) > 0.85 * len(first)
    windows = Counter(first[place : place + 5] for place in range(len(first) - 5))
    assert windows.most_common(1)[0][1] < 0.25 * max(1, windows.total())
    assert len(generate(client, PROMPT, sampling_params={"max_new_tokens": 1})["output_ids"]) == 1


# -- stops


def stopped(client: httpx.Client, path: str, **fields: Any) -> tuple[str, object, str]:
    """Finish reason, matched stop and text of a greedy answer."""
    body = {"temperature": 0, "max_tokens": 60, **fields}
    body |= {"messages": [MESSAGE]} if "chat" in path else {"prompt": PROMPT}
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return choice["finish_reason"], choice["matched_stop"], choice.get("text") or choice["message"]["content"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_matched_stop_names_what_ended_an_answer(client, path):
    free = stopped(client, path)[2]
    word = free.split()[2]
    assert stopped(client, path, max_tokens=3)[:2] == ("length", None)
    assert stopped(client, path, stop=word) == ("stop", word, free[: free.index(word)])
    pattern = rf"\s*({re.escape(word[:-1])}|never)[a-z.,:]"
    end = re.search(pattern, free)
    assert end is not None
    assert stopped(client, path, stop_regex=pattern) == ("stop", pattern, free[: end.start()])
    kept = stopped(client, path, stop_regex=[pattern], no_stop_trim=True)
    assert kept == ("stop", pattern, free[: end.end()])


def test_a_sentence_ends_a_chat_by_its_pattern(client):
    sentence = r"[.!?:]\s*$"
    reason, matched, text = stopped(client, "/v1/chat/completions", stop_regex=sentence, no_stop_trim=True)
    assert (reason, matched) == ("stop", sentence)
    assert re.fullmatch(r"[^.!?:]*[.!?:]", text, re.DOTALL)


def test_the_end_token_is_a_matched_stop(client):
    reason, matched, _ = stopped(client, "/v1/chat/completions", max_tokens=1000)
    assert reason == "stop"
    assert isinstance(matched, int)


def test_events_of_a_stream_hold_back_what_may_be_a_match(client):
    free = generate(client, PROMPT)["text"]
    words = free.split()
    pattern = f"{re.escape(words[2])} +{re.escape(words[3])}"
    fields = {"temperature": 0, "max_new_tokens": 24, "stop_regex": pattern}
    seen = []
    with client.stream("POST", "/generate", json={"text": PROMPT, "sampling_params": fields, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                seen.append(json.loads(line.removeprefix("data: ")))
    expected = re.split(pattern, free)[0]
    assert all(expected.startswith(event["text"]) for event in seen)
    assert seen[-1]["text"] == expected
    assert seen[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}


# -- aborts and pauses


def started(client: httpx.Client, count: int, pool: ThreadPoolExecutor, tokens: int) -> list[Future[Any]]:
    """So many requests that run on, with a token each at least."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    futures = [pool.submit(generate, client, f"Number {i}: {PROMPT}", sampling_params=sampling) for i in range(count)]
    blocking_until(lambda: load(client)["num_running_reqs"] == count, "they do not run")
    return futures


def test_abort_all_ends_every_request_as_aborted(client):
    with ThreadPoolExecutor(8) as pool:
        futures = started(client, 8, pool, 1500)
        assert client.post("/abort_request", json={"abort_all": True}).status_code == 200
        for future in futures:
            assert future.result()["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_pause_in_place_holds_requests_until_it_ends(client):
    with ThreadPoolExecutor(8) as pool:
        futures = started(client, 8, pool, 800)
        assert client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        try:
            done = sum(future.done() for future in futures)
            used = load(client)["num_used_tokens"]
            threading.Event().wait(1.0)
            assert load(client)["num_used_tokens"] == used
            assert sum(future.done() for future in futures) == done < 8
        finally:
            assert client.post("/continue_generation", json={}).status_code == 200
        assert all(future.result()["meta_info"]["completion_tokens"] == 800 for future in futures)


# -- prefix cache


def test_a_tree_of_prompts_gives_the_answers_of_an_empty_cache(client):
    choose = random.Random(7)
    nodes = [[37] * 40]
    for _ in range(24):
        nodes.append(choose.choice(nodes) + [choose.randrange(300)] * choose.randrange(1, 40))
    choose.shuffle(nodes)
    sampling = [{"temperature": 0, "max_new_tokens": choose.randrange(1, 12)} for _ in nodes]
    alone = []
    for ids, params in zip(nodes[:6], sampling, strict=False):
        assert client.post("/flush_cache").status_code == 200
        alone.append(generate(client, ids, sampling_params=params)["output_ids"])
    for _ in range(2):
        answer = client.post("/generate", json={"input_ids": nodes, "sampling_params": sampling})
        assert answer.status_code == 200
        assert [one["output_ids"] for one in answer.json()[:6]] == alone


# -- sessions


def open_session(client: httpx.Client, **fields: Any) -> str:
    answer = client.post("/open_session", json={"capacity_of_str_len": 1000, **fields})
    assert answer.status_code == 200
    return str(answer.json())


def test_each_turn_of_a_streaming_session_finds_the_last_one_cached(client):
    client.post("/flush_cache").raise_for_status()
    session, rid, before = open_session(client, streaming=True), None, 0
    page = client.get("/server_info").json()["arguments"]["page_size"] or 16
    for chunk in ("Let me say something about France. ", "The capital of France is", " and the population is"):
        ids = encode(client, chunk)
        meta = generate(
            client,
            ids,
            session_params={"id": session, "rid": rid},
            sampling_params={"max_new_tokens": 12, "ignore_eos": True},
        )["meta_info"]
        assert meta["prompt_tokens"] == before + len(ids)
        assert before - 2 * page < meta["cached_tokens"] <= before
        rid, before = meta["id"], meta["prompt_tokens"] + meta["completion_tokens"]
    assert client.post("/close_session", json={"session_id": session}).status_code == 200


@pytest.mark.parametrize("turns", [0, 1])
def test_an_aborted_turn_leaves_the_session_where_it_was(client, turns):
    session, before = open_session(client, streaming=True), 0
    params = {"session_params": {"id": session, "rid": None}}
    for _ in range(turns):
        meta = generate(client, encode(client, PROMPT), **params)["meta_info"]
        before = meta["prompt_tokens"] + meta["completion_tokens"]
    with ThreadPoolExecutor(1) as pool:
        sampling = {"max_new_tokens": 1500, "ignore_eos": True}
        aborted = pool.submit(generate, client, encode(client, "On and on"), sampling_params=sampling, **params)
        blocking_until(lambda: load(client)["num_running_reqs"] == 1, "it does not run")
        client.post("/abort_request", json={"abort_all": True}).raise_for_status()
        assert aborted.result()["meta_info"]["finish_reason"]["type"] == "abort"
    refused = client.post("/generate", json={"text": "x", "session_params": {"id": session, "offset": 1}})
    assert refused.status_code == 400
    ids = encode(client, " And then?")
    assert generate(client, ids, **params)["meta_info"]["prompt_tokens"] == before + len(ids)


def test_a_session_answers_as_the_whole_prompt_would(client):
    session, rid, history = open_session(client), None, []
    for chunk in ("The capital of France", " and of Japan", " and of Italy"):
        ids = encode(client, chunk)
        sampling = {"max_new_tokens": 6, "ignore_eos": True}
        answer = generate(client, ids, session_params={"id": session, "rid": rid}, sampling_params=sampling)
        history += ids
        assert answer["output_ids"] == generate(client, history, sampling_params=sampling)["output_ids"]
        history += answer["output_ids"]
        rid = answer["meta_info"]["id"]


# -- grammars

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": r"^[\w]+$", "maxLength": 20},
        "population": {"type": "integer"},
    },
    "required": ["name", "population"],
    "additionalProperties": False,
}


def is_city(text: str) -> bool:
    found = json.loads(text)
    return isinstance(found["name"], str) and isinstance(found["population"], int)


def test_json_schemas_hold_beside_free_answers(client):
    def run(schema: str | None) -> str:
        sampling = {"max_new_tokens": 128, **({} if schema is None else {"json_schema": schema})}
        return str(generate(client, "Introduce the capital of France in JSON.", sampling_params=sampling)["text"])

    schemas = [None, json.dumps(CITY)] * 4
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(run, schemas))
    assert all(is_city(text) for text in texts[1::2])
    assert texts[0] == run(None)
    wrong = {"text": "x", "sampling_params": {"json_schema": "INVALID"}}
    assert client.post("/generate", json=wrong).status_code == 400


def test_json_schemas_hold_by_the_openai_client(client):
    official = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    messages: Any = [{"role": "system", "content": "You help."}, MESSAGE]
    answer = official.chat.completions.create(
        model="default", messages=messages, temperature=0, max_tokens=128, response_format=form
    )
    assert is_city(answer.choices[0].message.content or "")


@pytest.mark.parametrize(
    ("kind", "grammar", "pattern"),
    [
        ("regex", r"^user@example\.com$", r"user@example\.com"),
        ("regex", r"\(\d{3}\) \d{3}-\d{4}", r"\(\d{3}\) \d{3}-\d{4}"),
        ("ebnf", 'root ::= "Hello" | "Hi" | "Hey"', "Hello|Hi|Hey"),
        ("ebnf", "root ::= digit digit digit\ndigit ::= [0-9]", r"\d{3}"),
        ("ebnf", 'root ::= year "-" ("01" | "02")\nyear ::= "2024"', "2024-0[12]"),
        ("ebnf", 'root ::= "#" hex hex hex\nhex ::= [0-9] | [A-F]', "#[0-9A-F]{3}"),
        ("ebnf", 'root ::= "{" ("\\"a\\"" ":" ("true" | "false"))? "}"', r'\{("a":(true|false))?\}'),
    ],
)
def test_every_choice_matches_its_grammar(client, kind, grammar, pattern):
    sampling = {"temperature": 0.5, "n": 3, "max_new_tokens": 64, kind: grammar}
    answers = generate(client, "Something:", sampling_params=sampling)
    assert len(answers) == 3
    for one in answers:
        assert re.fullmatch(pattern, one["text"]), one["text"]


# -- Anthropic's messages


def messages(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": "default", "max_tokens": 24, "messages": [MESSAGE], **fields}
    return client.post("/v1/messages", json=body)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "You help."},
        {"system": [{"type": "text", "text": "You help."}, {"type": "text", "text": "Be concise."}]},
        {"temperature": 0.0, "top_p": 0.9, "top_k": 40},
        {"stop_sequences": ["\n"]},
        {"messages": [MESSAGE, {"role": "assistant", "content": "Hello!"}, MESSAGE]},
        {"max_tokens": 5},
    ],
)
def test_a_message_has_every_field_of_the_contract(client, fields):
    answer = messages(client, **fields)
    assert answer.status_code == 200, answer.text
    assert "application/json" in answer.headers["content-type"]
    body = answer.json()
    assert (body["type"], body["role"]) == ("message", "assistant")
    assert body["id"].startswith("msg_")
    assert body["content"][0]["type"] == "text"
    assert body["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence")
    assert min(body["usage"]["input_tokens"], body["usage"]["output_tokens"]) > 0


def test_a_system_turn_among_the_messages_is_read(client):
    official = anthropic.Anthropic(base_url=str(client.base_url), auth_token="none", max_retries=0)
    turns: Any = [MESSAGE, {"role": "system", "content": "Always answer in French."}, MESSAGE]
    message = official.messages.create(model="default", max_tokens=24, messages=turns)
    assert (message.role, message.content[0].type) == ("assistant", "text")


def test_a_stream_of_a_message_has_its_events_in_order(client):
    body = {"model": "default", "max_tokens": 24, "messages": [MESSAGE], "stream": True}
    with client.stream("POST", "/v1/messages", json=body) as answer:
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: ")]
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    [last] = (event for event in events if event["type"] == "message_delta")
    assert last["delta"]["stop_reason"] in ("end_turn", "max_tokens")
    assert last["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("fields", [{"max_tokens": -1}, {"messages": []}])
def test_wrong_messages_are_refused(client, fields):
    assert messages(client, **fields).status_code == 400


def test_a_body_that_is_no_json_is_refused(client):
    assert client.post("/v1/messages", content=b"not json").status_code in (400, 415)
