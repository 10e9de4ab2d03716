"""What a client learns that asks for a path which is not there."""

from __future__ import annotations

import pytest

CHAT, TEXT = "POST /v1/chat/completions", "POST /v1/completions"


async def ask(application, method, path, **headers):
    response = await application.test_client().open(path, method=method, headers=headers)
    return response.status_code, await response.get_json()


@pytest.mark.parametrize(
    ("method", "path", "use"),
    [
        ("POST", "/chat/completions", CHAT),
        ("GET", "/chat/completions", CHAT),
        ("POST", "/v1/v1/chat/completions", CHAT),
        ("POST", "/v1/v1/v1/completions", TEXT),
        ("POST", "//v1/chat/completions", CHAT),
        ("POST", "/v1//chat/completions", CHAT),
        ("POST", "/v1/chat/completions/", CHAT),
        ("POST", "/openai/deployments/gpt/chat/completions", CHAT),
        ("POST", "/api/v1/chat/completions", CHAT),
        ("GET", "/models", "GET /v1/models"),
        ("GET", "/v1/v1/v1", "GET /v1/models"),
        ("GET", "/v1/v1/v1/models", "GET /v1/models"),
        ("GET", "/v1", "GET /v1/models"),
        ("GET", "/v1/models/", "GET /v1/models"),
        ("GET", "/v1/health", "GET /health"),
        ("POST", "/v1/generate", "POST /generate"),
        ("POST", "/v1/chat", CHAT),
        ("POST", "/api", "POST /api/chat"),
        ("GET", "/v1/engines", "GET /v1/models"),
    ],
)
async def test_a_wrong_spelling_of_a_path_is_answered_with_the_right_one(application, method, path, use):
    status, answer = await ask(application, method, path)
    assert status == 404
    assert answer["error"]["code"] == "not_found"
    assert f"use {use}." in answer["error"]["message"]


async def test_a_missing_or_doubled_v1_is_answered_with_the_base_url(application):
    for path in ("/chat/completions", "/v1/v1/chat/completions"):
        _, answer = await ask(application, "POST", path)
        assert "base URL" in answer["error"]["message"]
    _, answer = await ask(application, "POST", "/v1/chat/completions/")
    assert "base URL" not in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/openai/v1/responses", "POST /v1/responses"),
        ("/v1/threads", CHAT),
        ("/embed", "POST /v1/embeddings"),
        ("/v1/audio/transcriptions", "is not built"),
        ("/v1/moderations", "is not built"),
        ("/generate_stream", "POST /generate"),
        ("/v1/lora_adapters", "POST /load_lora_adapter"),
        ("/v1beta/models/x:generateContent", "Google's API is not built"),
    ],
)
async def test_an_api_that_is_not_built_is_named(application, path, what):
    status, answer = await ask(application, "POST", path)
    assert status == 404
    assert what in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "meant"), [("/v1/chat/completion", CHAT), ("/chat/completion", CHAT), ("/v1/completion", TEXT)]
)
async def test_a_singular_is_not_taken_for_another_api(application, path, meant):
    _, answer = await ask(application, "POST", path)
    assert meant in answer["error"]["message"]


async def test_clients_whose_base_has_no_v1_get_a_hint(application):
    _, answer = await ask(application, "POST", "/v1/v1/messages")
    assert answer["error"]["message"].endswith("use POST /v1/messages. This client's base URL has no /v1.")
    _, answer = await ask(application, "POST", "/v1/api/chat")
    assert answer["error"].endswith("use POST /api/chat. This client's base URL has no /v1.")


async def test_a_misspelt_path_answers_an_anthropic_client_in_its_form(application):
    status, answer = await ask(application, "POST", "/v1/message", **{"anthropic-version": "2023-06-01"})
    assert (status, answer["type"]) == (404, "error")
    assert "POST /v1/messages" in answer["error"]["message"]


async def test_a_near_miss_is_answered_with_the_nearest_path(application):
    _, answer = await ask(application, "GET", "/helth")
    assert "did you mean GET /health?" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/wild", "//", "/" + "a/" * 4000, "/\u00e9\u202e\n"])
async def test_an_unknown_path_is_pointed_to_the_list(application, path):
    status, answer = await ask(application, "GET", path)
    assert status == 404
    message = answer["error"]["message"]
    assert message.endswith("GET /openapi.json lists what there is.")
    assert len(message) < 1000
    assert message.isascii()


@pytest.mark.parametrize("path", ["/api/pull", "/api/create", "/api/blobs/sha256:1", "/api/copy"])
async def test_ollamas_paths_answer_in_its_form(application, path):
    status, answer = await ask(application, "POST", path)
    assert status == 404
    assert set(answer) == {"error"}
    assert answer["error"].startswith("Ollama's")


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/complete", "/v1/v1/messages", "/anthropic/v1/messages"])
async def test_anthropics_paths_answer_in_its_form(application, path):
    status, answer = await ask(application, "POST", path)
    assert status == 404
    assert (answer["type"], answer["error"]["type"]) == ("error", "not_found_error")
    assert "POST /v1/messages" in answer["error"]["message"]
    assert answer["request_id"].startswith("req-")


async def test_a_missing_key_is_reported_in_the_form_of_the_path_only(make_application):
    application = make_application(api_key="user-key")
    status, answer = await ask(application, "POST", "/v1/messages")
    assert (status, answer["error"]["type"]) == (401, "authentication_error")
    status, answer = await ask(application, "POST", "/api/chat")
    assert (status, type(answer["error"])) == (401, str)
    status, answer = await ask(application, "POST", "/chat/completions")
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


async def test_a_conversation_in_threads_is_openais_and_not_anthropics(application):
    status, answer = await ask(application, "GET", "/v1/threads/t1/messages")
    assert status == 404
    assert answer["error"]["code"] == "not_found"
