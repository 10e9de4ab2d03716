"""Runs batches after all other requests, and takes unfinished ones up again after a restart of the server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from app.apis.batches.lines import (
    BatchLine,
    LineError,
    Tokens,
    check_lines,
    decode_line,
    finished_lines,
    read_lines,
    result_line,
)
from app.apis.batches.records import UNFINISHED, BatchRecord, Status
from app.apis.batches.storage import (
    FileStore,
    StorageFull,
    StoredFile,
    is_id,
    new_file_id,
    read_record,
    write_record,
)
from app.server.background import answer_request, interactive_requests
from app.server.routes import Route
from app.server.service import Service

__all__ = ["MAX_AT_ONCE", "BatchRunner", "Gate"]

log = logging.getLogger("troupe.batches")

MAX_AT_ONCE = 64
"""Lines that run together, over all batches."""

_SHARE = 8  # beside interactive requests an eighth of the lines run, and at least one
_POLL = 0.05  # seconds
_REST = 5.0  # seconds after an interactive request, in which the next one of its client may come
_MAX_KEPT = 10_000  # finished batches of one owner that are remembered


class Gate:
    """Lets lines begin: many while the server has nothing else to do, and few beside interactive requests."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._max_concurrent = max(1, min(MAX_AT_ONCE, service.arguments.max_running_requests // 2))
        self.running = 0
        self._interactive = -_REST  # when an interactive request was last seen

    @property
    def limit(self) -> int:
        """Lines that may run now."""
        now = time.monotonic()
        if interactive_requests(self._service):
            self._interactive = now
        return max(1, self._max_concurrent // _SHARE) if now - self._interactive < _REST else self._max_concurrent

    async def enter(self) -> None:
        """Wait for a place. Follow it with :meth:`leave`."""
        while self.running >= self.limit:  # noqa: ASYNC110 - others change it
            await asyncio.sleep(_POLL)
        self.running += 1

    def leave(self) -> None:
        self.running -= 1


class BatchRunner:
    """All batches of a directory, and a task for each that is not finished."""

    def __init__(self, service: Service, store: FileStore) -> None:
        self.store = store
        self._service = service
        self._gate = Gate(service)
        self._records: dict[str, BatchRecord] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        for path in sorted(store.batches.glob("batch_*.json")):
            record = read_record(path, BatchRecord)
            if record is not None and record.id == path.stem and is_id(record.id):
                self._records[record.id] = record
        store.uses = self.uses

    def start(self) -> None:
        """Take up what an earlier server has left."""
        for record in self._records.values():
            if record.status in UNFINISHED:
                self.store.hold(record.owner, sum(_size(self._path(record, kind)) for kind in ("output", "errors")))
                self._begin(record)

    async def stop(self) -> None:
        """Stop. Lines without a result run again at the next start."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def aclose(self) -> None:
        await self.stop()
        self.store.close()

    def get(self, batch_id: str) -> BatchRecord | None:
        return self._records.get(batch_id)

    def newest_first(self) -> list[BatchRecord]:
        return sorted(self._records.values(), key=lambda record: (record.created_at, record.id), reverse=True)

    def unfinished(self, owner: str) -> int:
        return sum(record.owner == owner and record.status in UNFINISHED for record in self._records.values())

    def uses(self, file_id: str) -> bool:
        """Whether an unfinished batch reads this file."""
        return any(r.input_file_id == file_id and r.status in UNFINISHED for r in self._records.values())

    def add(self, record: BatchRecord) -> None:
        """Run a new batch."""
        finished = [old for old in self.newest_first() if old.owner == record.owner and old.status not in UNFINISHED]
        for old in finished[_MAX_KEPT:]:
            del self._records[old.id]
            self._path(old, "json").unlink(missing_ok=True)
        self._records[record.id] = record
        self._save(record)
        self._begin(record)

    def cancel(self, record: BatchRecord) -> None:
        """Begin no more lines of a batch, and end those that run."""
        self._set(record, "cancelling")
        task = self._tasks.get(record.id)
        if task is not None:
            task.cancel()

    def _path(self, record: BatchRecord, kind: str) -> Path:
        if not is_id(record.id):
            raise ValueError(record.id)
        return self.store.batches / f"{record.id}.{kind}"

    def _save(self, record: BatchRecord) -> None:
        write_record(self._path(record, "json"), record)

    def _set(self, record: BatchRecord, status: Status) -> None:
        record.status = status
        record.times[f"{status}_at"] = int(time.time())
        self._save(record)

    def _begin(self, record: BatchRecord) -> None:
        task = asyncio.create_task(self._run(record), name=f"troupe-{record.id}")
        self._tasks[record.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(record.id, None))

    # -- one batch

    async def _run(self, record: BatchRecord) -> None:
        try:
            while self._service.status.phase == "starting":  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(_POLL)
            tenant = self._service.keyring.tenant_of(record.owner)
            if record.ending is not None:
                self._end(record, record.ending)
            elif tenant is None:
                self._fail(record, LineError("key_removed", "the key of this batch is no key of this server any more"))
            elif await self._validated(record):
                await self._run_lines(record, tenant)
        except asyncio.CancelledError:
            if record.status != "cancelling":  # the server stops
                return
            self._end(record, "cancelled")
        except StorageFull:
            self._fail(record, LineError("storage_full", "the storage has no room for more results; delete files"))
        except Exception:
            log.exception("%s met an unexpected error", record.id)
            self._fail(record, LineError("internal_error", f"the server met an error; see its log under {record.id}"))

    async def _validated(self, record: BatchRecord) -> bool:
        """Check the lines, unless that was done before. Returns whether they may run."""
        if record.status == "cancelling":
            self._end(record, "cancelled")
            return False
        if record.status != "validating":
            return True
        checked = await asyncio.to_thread(check_lines, self.store.path(record.input_file_id), record.endpoint)
        record.total, record.model = checked.total, checked.model
        if checked.errors:
            self._fail(record, *checked.errors)
            return False
        self._set(record, "in_progress")
        return True

    async def _run_lines(self, record: BatchRecord, tenant: str) -> None:
        route = self._service.table.find("POST", record.endpoint)
        if route is None:
            self._fail(record, LineError("invalid_endpoint", f"{record.endpoint} is not served here"))
            return
        path = self.store.path(record.input_file_id)
        async with self._results(record) as results, asyncio.TaskGroup() as group:
            with path.open("rb") as file:
                for _, data in read_lines(file):
                    await asyncio.sleep(0)  # also beside many lines that are done or have expired
                    line = decode_line(data)
                    if line.custom_id in results.done:
                        continue
                    if time.time() >= record.expires_at:
                        results.add(line.custom_id, error=_EXPIRED)
                        continue
                    await self._gate.enter()
                    task = group.create_task(self._run_line(record, tenant, route, line, results))
                    task.add_done_callback(lambda _: self._gate.leave())
                    if self._service.status.phase != "ready":
                        break
        if record.completed + record.failed < record.total:
            return  # the server stops, and some lines have no result
        self._end(record, "expired" if results.expired else "completed")

    async def _run_line(
        self, record: BatchRecord, tenant: str, route: Route, line: BatchLine, results: Results
    ) -> None:
        while True:
            answer = await answer_request(self._service, route, bytes(line.body), tenant=tenant)
            if answer.status >= 429 and self._service.status.phase != "ready":
                return  # the server stops
            if answer.retry_after is None or time.time() >= record.expires_at:
                break
            await asyncio.sleep(answer.retry_after)
        results.add(line.custom_id, status=answer.status, request_id=answer.request_id, body=answer.body)

    @asynccontextmanager
    async def _results(self, record: BatchRecord) -> AsyncIterator[Results]:
        results = await self._read_results(record)
        try:
            yield results
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            results.close()

    async def _read_results(self, record: BatchRecord) -> Results:
        """The results that are there already. They may be a gigabyte, which a thread reads."""
        output, errors = self._path(record, "output"), self._path(record, "errors")
        before, record.tokens = _size(output) + _size(errors), Tokens()
        reading = asyncio.create_task(asyncio.to_thread(_ids, output, errors, record.tokens))
        try:
            await asyncio.shield(reading)
        finally:  # a batch that is cancelled meanwhile has them, too
            answered, failed = await reading
            self.store.hold(record.owner, _size(output) + _size(errors) - before)
            record.completed, record.failed = len(answered), len(failed)
        return Results(record, self.store, output, errors, answered | failed)

    def _fail(self, record: BatchRecord, *errors: LineError) -> None:
        record.errors = list(errors)
        self._end(record, "failed")

    def _end(self, record: BatchRecord, status: Status) -> None:
        """Make files of the results, and give the batch its last status. A server that is stopped in between does the
        rest at its next start: the names of the files are on disk before the first is made."""
        if record.ending is None:
            record.ending = status
            for kind, field in _FILES:
                setattr(record, field, new_file_id() if _size(self._path(record, kind)) else None)
            self._set(record, "finalizing")
        for kind, field in _FILES:
            path, file_id = self._path(record, kind), getattr(record, field)
            if file_id is None:
                path.unlink(missing_ok=True)
            elif path.exists():
                self.store.adopt(path, self._result_file(record, kind, file_id))
        self._set(record, record.ending)
        log.info(
            "%s is %s: %d of %d lines, %d failed", record.id, status, record.completed, record.total, record.failed
        )

    def _result_file(self, record: BatchRecord, kind: str, file_id: str) -> StoredFile:
        now, seconds = int(time.time()), record.output_seconds
        return StoredFile(
            id=file_id,
            owner=record.owner,
            bytes=_size(self._path(record, kind)),
            created_at=now,
            filename=f"{record.id}_{kind}.jsonl",
            purpose="batch_output",
            expires_at=None if seconds is None else now + seconds,
        )


_FILES = (("output", "output_file_id"), ("errors", "error_file_id"))
"""The kinds of results, and the fields of a record that name their files."""


def _ids(output: Path, errors: Path, tokens: Tokens) -> tuple[set[str], set[str]]:
    return finished_lines(output, tokens), finished_lines(errors)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


_EXPIRED = LineError("batch_expired", "This request could not be executed before the completion window expired.")


class Results:
    """Adds to the files of results of one batch. ``done``: custom ids with a result."""

    def __init__(self, record: BatchRecord, store: FileStore, output: Path, errors: Path, done: set[str]) -> None:
        self._record = record
        self._store = store
        self.expired = False
        self.done = done
        self._files: dict[bool, BinaryIO] = {True: output.open("ab"), False: errors.open("ab")}

    def add(
        self,
        custom_id: str,
        *,
        status: int = 0,
        request_id: str = "",
        body: bytes = b"",
        error: LineError | None = None,
    ) -> None:
        """Write a result. Raises StorageFull."""
        data = result_line(custom_id, status=status, request_id=request_id, body=body, error=error)
        self._store.reserve(self._record.owner, len(data))
        good = error is None and status < 400
        file = self._files[good]
        file.write(data)
        file.flush()
        self.done.add(custom_id)
        self.expired = self.expired or error is not None
        if good:
            self._record.completed += 1
            self._record.tokens.add(body)
        else:
            self._record.failed += 1

    def close(self) -> None:
        for file in self._files.values():
            file.close()
