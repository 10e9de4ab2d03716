"""``troupe batch run``: answers, errors, progress, and going on where a run was stopped."""

from __future__ import annotations

import asyncio
import http.server
import io
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import app.application
from actors.protocol.requests import QueueFull
from app.application import Troupe
from app.cli.batch import Progress, batch
from app.cli.command import main
from tests.kits.app_requests import MESSAGES
from tests.kits.fake_engine import FakeEngine

Serve = Callable[[Troupe], Awaitable[str]]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES, "n": n}}
        for n in range(3)
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(source), str(tmp_path / "out.jsonl")


def ids(path: str) -> list[str]:
    return sorted(json.loads(line)["custom_id"] for line in Path(path).read_text().splitlines())


async def test_a_server_answers_and_the_next_run_takes_the_rest(
    application: Troupe, serve: Serve, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    engine: Any = application.engine
    words = ["run", *files, "--url", await serve(application)]
    assert await asyncio.to_thread(batch, words) == 1  # n: 0 is refused
    assert (ids(files[1]), ids(files[1].replace(".jsonl", ".errors.jsonl"))) == (["r1", "r2"], ["r0"])
    stderr = capsys.readouterr().err
    assert "1 failed" in stderr
    assert "first error: r0: n must be " in stderr
    answered = len(engine.streams)
    out = Path(files[1])
    out.write_text(out.read_text() + '{"id":"batch_req')  # as of a run that was killed
    Path(files[0]).write_text(Path(files[0]).read_text().replace('"n": 0', '"n": 1'))
    assert await asyncio.to_thread(batch, words) == 0
    assert (ids(files[1]), len(engine.streams) - answered) == (["r0", "r1", "r2"], 1)
    assert not Path(files[1].replace(".jsonl", ".errors.jsonl")).exists()


async def test_a_full_queue_is_asked_again(application: Troupe, serve: Serve, files: tuple[str, str]) -> None:
    engine: Any = application.engine
    engine.admission_error = QueueFull("full", retry_after=0.01)
    url = await serve(application)
    running = asyncio.create_task(asyncio.to_thread(batch, ["run", *files, "--url", url]))
    await asyncio.sleep(0.3)
    engine.admission_error = None
    assert await running == 1
    assert ids(files[1]) == ["r1", "r2"]


async def test_a_wrong_key_ends_the_run_with_the_reason(
    make_application: Callable[..., Troupe],
    serve: Serve,
    files: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = await serve(make_application(api_key="secret"))
    assert await asyncio.to_thread(batch, ["run", *files, "--url", url, "--api-key", "wrong"]) == 1
    assert "API key" in capsys.readouterr().err
    assert not Path(files[1].replace(".jsonl", ".errors.jsonl")).exists()


def test_an_engine_of_its_own(files: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Troupe] = []

    def create(arguments: Any) -> Troupe:
        made.append(Troupe(FakeEngine(), arguments))  # type: ignore[arg-type]
        return made[0]

    monkeypatch.delenv("TROUPE_ARGS", raising=False)
    monkeypatch.setattr(app.application, "create_app", create)
    assert main(["batch", "run", *files, "--max-running-requests", "4", "--skip-server-warmup"]) == 1
    assert ids(files[1]) == ["r1", "r2"]
    assert made[0].arguments.max_running_requests == 4
    assert made[0].engine.closed  # type: ignore[attr-defined]


def test_a_server_that_is_gone_ends_the_run(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert batch(["run", *files, "--url", "127.0.0.1:1"]) == 1
    assert "The same command goes on from here." in capsys.readouterr().err


@pytest.mark.parametrize("cuts", [2, 100])
def test_a_cut_answer_is_requested_again(
    files: tuple[str, str], cuts: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = [cuts]

    class Cutting(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            left[0] -= 1
            self.send_response(200)
            self.send_header("Content-Length", "8" if left[0] < 0 else "100")
            self.end_headers()
            self.wfile.write(b'{"a": 1}')

        def log_message(self, *args: Any) -> None:
            pass

    monkeypatch.setattr("app.cli.batch._RETRY", 0.0)
    with http.server.HTTPServer(("127.0.0.1", 0), Cutting) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            status = batch(["run", *files, "--at-once", "1", "--url", f"127.0.0.1:{server.server_port}"])
        finally:
            server.shutdown()
            serving.join()
    assert (status, len(ids(files[1]))) == ((0, 3) if cuts == 2 else (1, 0))
    assert ("the answer was cut" in capsys.readouterr().err) == (cuts != 2)


def test_answers_of_other_servers_become_one_line_each(files: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [(200, b'{\n  "a": 1\n}', "id"), (200, b"<html>\n</html>", ""), (502, b"<html>", "")]
    monkeypatch.setattr("app.cli.client.ApiClient.post", lambda *_: answers.pop())
    assert batch(["run", *files, "--url", "127.0.0.1:1"]) == 1
    [good] = map(json.loads, Path(files[1]).read_text().splitlines())
    assert good["response"]["body"] == {"a": 1}
    bad = [json.loads(line) for line in Path(files[1].replace(".jsonl", ".errors.jsonl")).read_text().splitlines()]
    assert [one["error"]["code"] for one in bad] == ["no_json", "no_json"]


def test_another_file_is_not_taken_for_results(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for content in ("dear diary", "dear diary\n", '{"a": 1}\n'):
        Path(files[1]).write_text(content)
        assert batch(["run", *files, "--url", "127.0.0.1:1"]) == 2
        assert Path(files[1]).read_text() == content
    assert "choose another file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["run", "nowhere", "out"], "nowhere"),
        (["run", "IN", "IN"], "three files"),
        (["run", "IN", "OUT", "--url", "127.0.0.1:1", "--port", "1"], "--port"),
        (["run", "IN", "OUT", "--prot", "1"], "did you mean --port?"),
        (["run", "IN", "OUT", "--at-once", "0"], "--at-once"),
        (["walk"], "walk"),
    ],
)
def test_wrong_words(words: list[str], reason: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    replaced = {"IN": files[0], "OUT": files[1]}
    assert main(["batch", *(replaced.get(word, word) for word in words)]) == 2
    assert reason in capsys.readouterr().err


def test_a_wrong_line_is_named(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with Path(files[0]).open("a") as file:
        file.write("{\n")
    assert batch(["run", *files]) == 2
    assert "line 4" in capsys.readouterr().err
    assert not Path(files[1]).exists()


def test_the_progress_counts() -> None:
    progress = Progress(10, 4, io.StringIO())
    progress.count()
    progress.count("r1: wrong")
    progress.count("r2: wrong as well")
    assert progress.line().startswith("[#####################.........] 7 of 10 lines, 2 failed, 0:0")
