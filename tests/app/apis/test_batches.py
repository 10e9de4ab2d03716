"""Files and batches: OpenAI's forms, limits, keys, cancellation, and a restart of the server in the middle."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from actors.options import ArgumentError
from app.apis.batches import handlers, runner, storage, upload
from app.apis.batches.handlers import BatchRequest
from app.apis.batches.runner import Gate
from app.apis.batches.storage import StoredFile
from app.application import Troupe
from app.server import request_body
from app.server.background import detached_exchange
from app.server.request_body import RequestBody
from app.server.upload_budget import UploadBudget
from tests.kits.app_requests import MESSAGES

Serve = Callable[[Troupe], Awaitable[str]]
Until = Callable[[Callable[[], object]], Awaitable[None]]


def line(number: int, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": {"messages": MESSAGES, **body}}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


@pytest.fixture
def make(make_application: Callable[..., Troupe], tmp_path: Path) -> Callable[..., Troupe]:
    return lambda **options: make_application(file_storage_path=str(tmp_path / "store"), **options)


@pytest.fixture
async def troupe(make: Callable[..., Troupe]) -> AsyncIterator[Troupe]:
    application = make()
    await application.startup()
    yield application
    await application.shutdown()


def form(data: bytes, name: str = "in.jsonl", **fields: str) -> dict[str, Any]:
    boundary = "b0undary"
    parts = [f'--{boundary}\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n' for k, v in fields.items()]
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    content = "".join(parts).encode() + head.encode() + data + f"\r\n--{boundary}--\r\n".encode()
    return {"data": content, "headers": {"Content-Type": f"multipart/form-data; boundary={boundary}"}}


async def ask(application: Troupe, method: str, path: str, key: str = "", **options: Any) -> tuple[int, Any]:
    headers = {**options.pop("headers", {}), **({"x-api-key": key} if key else {})}
    response = await application.test_client().open(path, method=method, headers=headers, **options)
    data = await response.get_data()
    return response.status_code, json.loads(data) if response.content_type == "application/json" else data


async def uploaded(application: Troupe, data: bytes, key: str = "") -> str:
    status, file = await ask(application, "POST", "/v1/files", key, **form(data, purpose="batch"))
    assert status == 200, file
    return str(file["id"])


async def begun(application: Troupe, data: bytes, key: str = "", **fields: Any) -> str:
    body = {
        "input_file_id": await uploaded(application, data, key),
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        **fields,
    }
    status, batch = await ask(application, "POST", "/v1/batches", key, json=body)
    assert status == 200, batch
    return str(batch["id"])


async def finished(application: Troupe, batch_id: str, until: Until, key: str = "") -> dict[str, Any]:
    assert application.service.batches is not None
    record = application.service.batches.get(batch_id)
    assert record is not None
    await until(lambda: record.status not in runner.UNFINISHED)
    return (await ask(application, "GET", f"/v1/batches/{batch_id}", key))[1]  # type: ignore[no-any-return]


async def results(application: Troupe, file_id: str, key: str = "") -> dict[str, Any]:
    _, data = await ask(application, "GET", f"/v1/files/{file_id}/content", key)
    return {one["custom_id"]: one for one in map(json.loads, data.splitlines())}


async def test_a_batch_answers_each_line_and_keeps_errors_apart(troupe: Troupe, until: Until) -> None:
    data = jsonl(line(1), line(2, temperature=-1), line(3, max_tokens=2), line(4, model="other"))
    batch = await finished(troupe, await begun(troupe, data, metadata={"a": "b"}), until)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 4, "completed": 2, "failed": 2}
    assert batch["metadata"] == {"a": "b"}
    assert batch["usage"]["output_tokens"] == 8
    good = await results(troupe, batch["output_file_id"])
    assert set(good) == {"r1", "r3"}
    answer = good["r1"]["response"]
    assert (answer["status_code"], good["r1"]["error"]) == (200, None)
    assert answer["body"]["choices"][0]["message"]["content"] == "Paris is the capital of France."
    assert answer["request_id"] == answer["body"]["id"]
    bad = await results(troupe, batch["error_file_id"])
    assert {name: one["response"]["status_code"] for name, one in bad.items()} == {"r2": 400, "r4": 404}
    assert bad["r2"]["response"]["body"]["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("data", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"{\n", "invalid_json_line", 1),
        (jsonl(line(1), line(1)), "duplicate_custom_id", 2),
        (jsonl(line(1, "/v1/completions")), "invalid_url", 1),
        (jsonl(line(1, stream=True)), "invalid_value", 1),
        (jsonl({**line(1), "body": 5}), "invalid_json_line", 1),
        (jsonl({**line(1), "method": "GET"}), "invalid_json_line", 1),
    ],
)
async def test_a_wrong_line_fails_the_batch_before_any_runs(
    troupe: Troupe, until: Until, data: bytes, code: str, number: int | None
) -> None:
    batch = await finished(troupe, await begun(troupe, data), until)
    assert batch["status"] == "failed"
    assert [(one["code"], one["line"]) for one in batch["errors"]["data"]] == [(code, number)]
    assert not troupe.engine.streams
    assert batch["output_file_id"] is None


async def test_a_restart_runs_only_lines_without_a_result(make: Callable[..., Troupe], until: Until) -> None:
    first = make(api_key="a")
    await first.startup()
    engine: Any = first.engine
    engine.gate, engine.gate_at = asyncio.Event(), 1
    batch_id = await begun(first, jsonl(line(1, max_tokens=1), line(2), line(3, max_tokens=1)), "a")
    assert first.service.batches is not None
    record = first.service.batches.get(batch_id)
    await until(lambda: record.completed == 2 and len(engine.streams) == 3)
    await first.shutdown()
    output = next(first.service.batches.store.batches.glob("*.output"))
    output.write_bytes(output.read_bytes() + b'{"id":"batch_re')  # as by a loss of power
    second = make(api_key="b,a")  # another order of keys
    await second.startup()
    batch = await finished(second, batch_id, until, "a")
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert len(second.engine.streams) == 1
    assert second.engine.streams[0].tenant == "key-2"
    assert set(await results(second, batch["output_file_id"], "a")) == {"r1", "r2", "r3"}
    await second.shutdown()


async def test_a_batch_of_a_removed_key_does_not_run(make: Callable[..., Troupe], until: Until) -> None:
    first = make(api_key="a,b", admin_api_key="root")
    await first.startup()
    engine: Any = first.engine
    engine.gate = asyncio.Event()
    batch_id = await begun(first, jsonl(line(1)), "a")
    await until(lambda: engine.streams)
    await first.shutdown()
    second = make(api_key="c,b", admin_api_key="root")
    await second.startup()
    batch = await finished(second, batch_id, until, "root")
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "key_removed")
    assert not second.engine.streams
    await second.shutdown()


@pytest.mark.parametrize("lost", ["record", "adopt"])
async def test_a_restart_while_files_are_made_repeats_no_line(
    make: Callable[..., Troupe], until: Until, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    first = make()
    await first.startup()
    batches = first.service.batches
    assert batches is not None

    move, adopt = os.replace, batches.store.adopt

    def die_before(source: Path, target: Path) -> None:
        if source.suffix == ".output":
            raise asyncio.CancelledError  # as by a signal
        move(source, target)

    def die_behind(part: Path, file: StoredFile) -> None:
        adopt(part, file)
        if file.purpose == "batch_output":
            raise asyncio.CancelledError

    if lost == "record":
        monkeypatch.setattr(batches.store, "adopt", die_behind)
    else:
        monkeypatch.setattr("app.apis.batches.storage.os.replace", die_before)
    batch_id = await begun(first, jsonl(line(1), line(2)))
    await until(lambda: not batches._tasks)
    monkeypatch.undo()
    await first.shutdown()
    second = make()
    await second.startup()
    batch = await finished(second, batch_id, until)
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 2)
    assert not second.engine.streams
    assert set(await results(second, batch["output_file_id"])) == {"r1", "r2"}
    assert second.service.batches is not None
    store = second.service.batches.store
    assert sum(store._held.values()) == sum(path.stat().st_size for path in store._folder.glob("*.bin"))
    await second.shutdown()


async def test_bytes_without_a_record_are_deleted_at_the_start(make: Callable[..., Troupe], tmp_path: Path) -> None:
    folder = tmp_path / "store" / "files"
    folder.mkdir(parents=True)
    (folder / f"file-{'0' * 32}.bin").write_bytes(b"x")
    make()
    assert not list(folder.iterdir())


async def test_a_cancelled_batch_keeps_what_is_done(troupe: Troupe, until: Until) -> None:
    engine: Any = troupe.engine
    engine.gate, engine.gate_at = asyncio.Event(), 1
    batch_id = await begun(troupe, jsonl(line(1, max_tokens=1), *(line(n) for n in range(2, 300))))
    assert troupe.service.batches is not None
    record = troupe.service.batches.get(batch_id)
    await until(lambda: record.completed == 1 and len(engine.streams) == runner.MAX_AT_ONCE + 1)
    status, batch = await ask(troupe, "POST", f"/v1/batches/{batch_id}/cancel")
    assert (status, batch["status"]) == (200, "cancelling")
    batch = await finished(troupe, batch_id, until)
    assert (batch["status"], batch["request_counts"]["completed"]) == ("cancelled", 1)
    assert set(await results(troupe, batch["output_file_id"])) == {"r1"}
    assert not engine.open
    assert (await ask(troupe, "POST", f"/v1/batches/{batch_id}/cancel"))[0] == 409
    engine.gate = None  # and the places of the cancelled lines are free again
    assert (await finished(troupe, await begun(troupe, jsonl(line(1))), until))["status"] == "completed"


async def test_lines_after_the_window_expire(troupe: Troupe, until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_WINDOW", -1)
    batch = await finished(troupe, await begun(troupe, jsonl(line(1))), until)
    assert batch["status"] == "expired"
    assert (await results(troupe, batch["error_file_id"]))["r1"]["error"]["code"] == "batch_expired"


async def test_a_line_for_a_full_queue_is_tried_again(troupe: Troupe, until: Until) -> None:
    from actors.protocol.requests import QueueFull

    engine: Any = troupe.engine
    engine.admission_error = QueueFull("full", retry_after=0.01)
    batch_id = await begun(troupe, jsonl(line(1)))
    await asyncio.sleep(0.1)
    engine.admission_error = None
    assert (await finished(troupe, batch_id, until))["request_counts"]["completed"] == 1


async def test_few_lines_run_beside_interactive_requests(troupe: Troupe) -> None:
    gate = Gate(troupe.service)
    assert gate.limit == runner.MAX_AT_ONCE
    route = troupe.service.table.find("POST", "/v1/chat/completions")
    assert route is not None
    async with detached_exchange(troupe.service, route, tenant="") as exchange:
        exchange.own(troupe.engine.generate([1]))
        assert gate.limit == runner.MAX_AT_ONCE
        exchange.background = False
        assert gate.limit == runner.MAX_AT_ONCE // 8


async def test_lines_have_the_lowest_priority(make: Callable[..., Troupe], until: Until) -> None:
    application = make(enable_priority_scheduling=True)
    await application.startup()
    await finished(application, await begun(application, jsonl(line(1, priority=1000))), until)
    assert application.engine.requests[0]["priority"] < -1000
    await application.shutdown()


async def test_a_batch_without_a_window_has_a_day() -> None:
    body = msgspec.convert({"input_file_id": "f", "endpoint": "/v1/completions"}, BatchRequest)
    assert body.completion_window == "24h"


async def test_a_key_sees_only_its_own(make: Callable[..., Troupe], until: Until) -> None:
    application = make(api_key="a,b", admin_api_key="root")
    await application.startup()
    batch_id = await begun(application, jsonl(line(1)), "a")
    batch = await finished(application, batch_id, until, "a")
    paths = [f"/v1/batches/{batch_id}", *(f"/v1/files/{batch[n]}" for n in ("input_file_id", "output_file_id"))]
    for path in paths:
        assert [(await ask(application, "GET", path, key))[0] for key in ("a", "b", "root")] == [200, 404, 200]
    assert (await ask(application, "DELETE", paths[1], "b"))[0] == 404
    assert (await ask(application, "GET", "/v1/files", "b"))[1]["data"] == []
    assert (await ask(application, "GET", "/v1/batches", "b"))[1]["data"] == []
    body = {"input_file_id": batch["input_file_id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    assert (await ask(application, "POST", "/v1/batches", "b", json=body))[0] == 400
    await application.shutdown()


async def test_names_of_clients_are_no_paths(troupe: Troupe, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    for name in ("../../evil", "/etc/passwd", "..\\evil", "\x00"):
        status, file = await ask(troupe, "POST", "/v1/files", **form(b"{}", name=name, purpose="batch"))
        assert status in (200, 400)
        if status == 200:
            assert "/" not in file["filename"]
    assert sorted(tmp_path.iterdir()) == before
    for bad in ("..%2f..%2fevil", "file-..", "lock", "file-" + "g" * 32):
        for path in (f"/v1/files/{bad}", f"/v1/files/{bad}/content", f"/v1/batches/{bad}"):
            assert (await ask(troupe, "GET", path))[0] == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "purpose"),
        ({"purpose": "assistants"}, "purpose"),
        ({"purpose": "batch", "other": "1"}, "other"),
        ({"purpose": "batch", "expires_after[seconds]": "5"}, "expires_after.seconds"),
        ({"purpose": "batch", "expires_after[anchor]": "now"}, "expires_after.anchor"),
        ({"purpose": "x" * 5000}, "purpose"),
    ],
)
async def test_a_wrong_field_of_a_form_is_named(troupe: Troupe, fields: dict[str, str], param: str) -> None:
    status, answer = await ask(troupe, "POST", "/v1/files", **form(b"{}", **fields))
    assert (status, answer["error"]["param"]) == (400, param)
    assert not list((await ask(troupe, "GET", "/v1/files"))[1]["data"])


@pytest.mark.parametrize("cut", [10, 100, 200])
async def test_a_cut_form_leaves_nothing(troupe: Troupe, cut: int) -> None:
    whole = form(b"{}" * 50, purpose="batch")
    whole["data"] = whole["data"][:cut]
    assert (await ask(troupe, "POST", "/v1/files", **whole))[0] == 400
    assert troupe.service.batches is not None
    assert not list((troupe.service.batches.store._folder).iterdir())
    assert not troupe.service.batches.store._held


async def test_storage_is_bounded(make: Callable[..., Troupe], monkeypatch: pytest.MonkeyPatch, until: Until) -> None:
    application = make(file_storage_gib=1e-6)  # 1,073 bytes
    await application.startup()
    status, answer = await ask(application, "POST", "/v1/files", **form(b"x" * 1100, purpose="batch"))
    assert (status, answer["error"]["code"]) == (413, "storage_full")
    data = jsonl(line(1), line(2))
    batch_id = await begun(application, data)
    batch = await finished(application, batch_id, until)
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "storage_full")
    for file in (await ask(application, "GET", "/v1/files"))[1]["data"]:
        assert (await ask(application, "DELETE", f"/v1/files/{file['id']}"))[1]["deleted"]
    assert application.service.batches is not None
    assert not application.service.batches.store._held
    monkeypatch.setattr(upload, "MAX_UPLOAD", 100)
    status, answer = await ask(application, "POST", "/v1/files", **form(b"x" * 101, purpose="batch"))
    assert (status, answer["error"]["code"]) == (413, "file_too_large")
    await application.shutdown()


async def test_batches_of_a_key_are_bounded(troupe: Troupe, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = troupe.engine
    engine.gate = asyncio.Event()
    monkeypatch.setattr(handlers, "_MAX_UNFINISHED", 1)
    batch_id = await begun(troupe, jsonl(line(1)))
    assert troupe.service.batches is not None
    record = troupe.service.batches.get(batch_id)
    assert record is not None
    body = {"input_file_id": record.input_file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    status, answer = await ask(troupe, "POST", "/v1/batches", json=body)
    assert (status, answer["error"]["code"]) == (429, "too_many_batches")
    status, answer = await ask(troupe, "DELETE", f"/v1/files/{record.input_file_id}")
    assert (status, answer["error"]["code"]) == (400, "file_in_use")


async def test_keys_share_no_number_of_files_and_batches(
    make: Callable[..., Troupe], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_MAX_KEPT", 1)
    monkeypatch.setattr(storage, "MAX_FILES", 5)
    application = make(api_key="a,b")
    await application.startup()
    mine = await begun(application, jsonl(line(1)), "b")
    await finished(application, mine, until, "b")
    for _ in range(2):
        await finished(application, await begun(application, jsonl(line(1)), "a"), until, "a")
    await begun(application, b"{", "a")
    assert (await ask(application, "POST", "/v1/files", "a", **form(b"{}", purpose="batch")))[0] == 413
    assert (await ask(application, "GET", f"/v1/batches/{mine}", "b"))[0] == 200
    await uploaded(application, b"{}", "b")
    await application.shutdown()


async def test_uploads_of_a_key_are_bounded(troupe: Troupe, monkeypatch: pytest.MonkeyPatch) -> None:
    assert troupe.service.batches is not None
    monkeypatch.setattr(storage, "MAX_UPLOADS", 1)
    with troupe.service.batches.store.writing(""):
        status, answer = await ask(troupe, "POST", "/v1/files", **form(b"{}", purpose="batch"))
    assert (status, answer["error"]["code"]) == (429, "too_many_uploads")
    await uploaded(troupe, b"{}")


async def test_a_slow_upload_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def feed() -> None:
        for _ in range(200):
            await body.receive()
        await body.receive()

    body = RequestBody(receive, [(b"content-length", b"200")], "1.1", UploadBudget(), upload=True)
    monkeypatch.setattr(request_body, "_UPLOAD_SECONDS", 0.1)
    feeding = asyncio.create_task(feed())
    with pytest.raises(TimeoutError):
        _ = [piece async for piece in body.pieces()]
    assert not feeding.done()
    feeding.cancel()


async def test_the_loop_goes_on_beside_lines_that_expire(
    troupe: Troupe, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_WINDOW", -1)
    batch_id = await begun(troupe, jsonl(*(line(n) for n in range(200))))
    assert troupe.service.batches is not None
    record = troupe.service.batches.get(batch_id)
    assert record is not None
    seen = set()
    while record.status in runner.UNFINISHED:
        seen.add(record.failed)
        await asyncio.sleep(0)
    assert len(seen) > 100


async def test_files_expire(troupe: Troupe, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    _, file = await ask(troupe, "POST", "/v1/files", **form(b"{}", **fields))
    assert file["expires_at"] == file["created_at"] + 3600
    monkeypatch.setattr("app.apis.batches.storage.time.time", lambda: file["expires_at"] + 1)
    assert (await ask(troupe, "GET", f"/v1/files/{file['id']}"))[0] == 404


async def test_a_file_that_a_batch_reads_does_not_expire(troupe: Troupe, until: Until) -> None:
    engine: Any = troupe.engine
    engine.gate = asyncio.Event()
    batch_id = await begun(troupe, jsonl(line(1)))
    assert troupe.service.batches is not None
    record = troupe.service.batches.get(batch_id)
    assert record is not None
    file = troupe.service.batches.store.get(record.input_file_id)
    assert file is not None
    file.expires_at = 1
    assert (await ask(troupe, "GET", f"/v1/files/{file.id}"))[0] == 200
    await until(lambda: record.status == "in_progress")  # set when the batch begins
    record.status = "completed"
    assert (await ask(troupe, "GET", f"/v1/files/{file.id}"))[0] == 404


async def test_without_a_directory_the_answer_says_how_to_get_one(application: Troupe) -> None:
    status, answer = await ask(application, "GET", "/v1/files")
    assert (status, answer["error"]["code"]) == (400, "files_disabled")
    assert "--file-storage-path" in answer["error"]["message"]


async def test_a_directory_has_one_server(troupe: Troupe, make: Callable[..., Troupe]) -> None:
    with pytest.raises(ArgumentError, match="another server uses it"):
        make()


async def test_the_sdk_uploads_runs_lists_and_reads(make: Callable[..., Troupe], serve: Serve, until: Until) -> None:
    application = make()
    client = openai.AsyncOpenAI(base_url=await serve(application) + "/v1", api_key="none", max_retries=0)
    data = jsonl(*(line(n) for n in range(30)))
    file = await client.files.create(
        file=("in.jsonl", data), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
    )
    assert (file.bytes, file.filename, file.purpose) == (len(data), "in.jsonl", "batch")
    assert (await client.files.content(file.id)).content == data
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
    )
    assert application.service.batches is not None
    record = application.service.batches.get(batch.id)
    await until(lambda: record.status == "completed")
    batch = await client.batches.retrieve(batch.id)
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.error_file_id) == (30, None)
    assert batch.output_file_id is not None
    assert (await client.files.content(batch.output_file_id)).text.count("\n") == 30
    assert [one.id async for one in client.batches.list(limit=1)] == [batch.id]
    assert {one.id async for one in client.files.list(limit=1)} == {file.id, batch.output_file_id}
    assert (await client.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file.id)
    large = jsonl(*(line(n, user="x" * 400) for n in range(20_000)))  # more than any other body
    assert (await client.files.create(file=large, purpose="batch")).bytes == len(large)
    await client.close()
