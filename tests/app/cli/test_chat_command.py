"""``troupe chat``: what it sends, shows, keeps and saves."""

from __future__ import annotations

import asyncio
import http.server
import io
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.application import Troupe
from app.cli.chat import ChatSession, chat
from app.cli.client import ApiClient, ClientError
from app.cli.command import main

Serve = Callable[[Troupe], Awaitable[str]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ScriptedServer(ApiClient):
    """Answers with deltas, one list a request; keeps the bodies."""

    def __init__(self, *answers: list[dict[str, Any]] | Exception) -> None:
        super().__init__()
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []

    def get(self, path: str) -> Any:
        return {"data": [{"id": "one"}, {"id": "two"}]}

    def events(self, path: str, body: bytes) -> Iterator[dict[str, Any]]:
        self.bodies.append(json.loads(body))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        for delta in answer:
            if isinstance(delta, BaseException):
                raise delta
            yield {"choices": [{"delta": delta}]}


def session(server: ScriptedServer, *lines: str, **options: Any) -> tuple[ChatSession, io.StringIO]:
    rest = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    out = Terminal()
    return ChatSession(server, "one", read, out, options), out


def test_turns_are_sent_with_those_before_them() -> None:
    server = ScriptedServer([{"content": "Hel"}, {"content": "lo"}], [{"content": "Bye"}])
    chat, out = session(server, "Hi\\", "there", "/system be kind", "Bye", temperature=0.5)
    chat.run()
    assert "Hello\n" in out.getvalue()
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Hi\nthere"}]
    assert server.bodies[0]["temperature"] == 0.5
    assert [m["role"] for m in server.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert server.bodies[1]["messages"][2]["content"] == "Hello"


def test_a_thought_is_dimmed_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    chat, out = session(ScriptedServer([{"reasoning_content": "hm"}, {"content": "42"}]), "?")
    chat.run()
    assert "\x1b[2mhm\x1b[22m\n\n42" in out.getvalue()
    assert chat.messages[1] == {"role": "assistant", "content": "42"}


def test_escape_sequences_of_a_model_are_not_printed() -> None:
    chat, out = session(ScriptedServer([{"content": "a\x1b]0;title\x07b\u200dc"}]), "?")
    chat.run()
    assert "\x1b]" not in out.getvalue()
    assert "a]0;titleb\u200dc" in out.getvalue()


def test_calls_are_shown_and_their_results_are_sent() -> None:
    first = {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"a"'}}]}
    second = {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}
    server = ScriptedServer([first, second], [{"content": "done"}])
    chat, out = session(server, "go", "the result", tools=[{"type": "function"}])
    chat.run()
    assert 'f({"a": 1})' in out.getvalue()
    assert server.bodies[1]["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "the result"}
    assert server.bodies[1]["tools"] == [{"type": "function"}]
    assert chat.messages[-1]["content"] == "done"


@pytest.mark.parametrize("end", [ClientError("the queue is full", 429), KeyboardInterrupt()])
def test_a_turn_without_an_answer_is_forgotten(end: BaseException) -> None:
    server = ScriptedServer([end], [{"content": "yes"}])  # type: ignore[list-item]
    chat, out = session(server, "first", "second")
    chat.run()
    assert [m["content"] for m in chat.messages] == ["second", "yes"]
    assert ("the queue is full" in out.getvalue()) == isinstance(end, ClientError)


def test_an_error_behind_half_an_answer_has_a_line_of_its_own() -> None:
    chat, out = session(ScriptedServer([{"content": "half"}, ClientError("the answer was cut")]), "?")  # type: ignore[list-item]
    chat.run()
    assert "half\nerror: the answer was cut\n" in out.getvalue()
    assert chat.messages == []


def test_an_answer_stopped_by_the_user_is_kept() -> None:
    chat, out = session(ScriptedServer([{"content": "half"}, KeyboardInterrupt()]), "?")  # type: ignore[list-item]
    chat.run()
    assert chat.messages[1]["content"] == "half"
    assert "(stopped)" in out.getvalue()


def test_commands(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    server = ScriptedServer([{"content": "yes"}])
    words = [
        "q",
        "/model two",
        "/model three",
        f"/save {file}",
        f"/save {file}",
        "/clear",
        "/nonsense",
        "/help",
        "/quit",
    ]
    chat, out = session(server, *words, "never read")
    chat.run()
    assert json.loads(file.read_text()) == {
        "model": "two",
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}],
    }
    assert (chat.model, chat.messages) == ("two", [])
    for text in ("* two", "three: is none", "cannot be written", "is empty", "/nonsense", "/save FILE"):
        assert text in out.getvalue()


async def test_a_chat_with_a_server(application: Troupe, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    url = await serve(application)
    monkeypatch.setattr("sys.stdin", io.StringIO("Capital of France?\n/model\n"))
    out = io.StringIO()
    assert await asyncio.to_thread(chat, ["--url", url + "/v1"], out) == 0
    assert "Paris is the capital of France.\n* fake\n" in out.getvalue()


async def test_a_failed_turn_of_piped_input_ends_with_status_1(
    application: Troupe, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = await serve(application)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert await asyncio.to_thread(chat, ["--url", url, "--model", "missing"], io.StringIO()) == 1


async def test_a_chat_needs_the_key_of_the_server(
    make_application: Callable[..., Troupe], serve: Serve, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("TROUPE_API_KEY", raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    url = await serve(make_application(api_key="secret"))
    assert await asyncio.to_thread(chat, ["--url", url]) == 1
    assert "API key is required" in capsys.readouterr().err
    assert await asyncio.to_thread(chat, ["--url", url, "--api-key", "secret"], io.StringIO()) == 0
    monkeypatch.setenv("TROUPE_API_KEY", "secret,other")
    assert await asyncio.to_thread(chat, ["--url", url], io.StringIO()) == 0


def test_without_a_server_the_error_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "127.0.0.1:1"]) == 1
    assert "Start a server with: troupe serve" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--url", "file:///etc/passwd"], ["--nonsense"], ["--tools", "/nowhere.json"]])
def test_wrong_words_end_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", *words]) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (['{"choices": [{"delta": {"content": "whole"}, "finish_reason": "stop"}]}'], "whole\n"),
        (['{"choices": [{"delta": {"content": "whole"}}]}', "[DONE]"], "whole\n"),
        (['{"choices": [{"delta": {"content": "half"}}]}'], "half\nerror: http://127.0.0.1:"),
        ([], "error: http://127.0.0.1:"),
    ],
)
def test_a_stream_ends_with_done_or_a_finish_reason_or_was_cut(lines: list[str], shown: str) -> None:
    class Stream(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write("".join(f"data: {line}\n\n" for line in lines).encode())

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Stream) as server:
        threading.Thread(target=server.handle_request).start()
        out = io.StringIO()
        talk = ChatSession(ApiClient(f"http://127.0.0.1:{server.server_port}"), "one", lambda prompt: "", out, {})
        talk.ask("?")
    assert out.getvalue().startswith(shown)
    assert talk.failed == ("error" in shown)
    assert bool(talk.messages) != talk.failed


def test_a_redirect_does_not_take_the_key_elsewhere() -> None:
    class Redirect(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1:1/v1/models")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Redirect) as server:
        threading.Thread(target=server.handle_request).start()
        with pytest.raises(ClientError, match="status 302"):
            ApiClient(f"http://127.0.0.1:{server.server_port}", "secret").get("/v1/models")


def test_a_key_of_the_environment_stays_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_API_KEY", "secret")
    assert "Authorization" in ApiClient("http://localhost:1")._headers
    assert "Authorization" not in ApiClient("https://example.com/v1")._headers
