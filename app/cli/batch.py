"""``troupe batch run IN OUT``: answer the requests of a JSONL file of OpenAI's Batch API."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import msgspec

from actors.options import ArgumentError
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
from app.cli.arguments import load_arguments, with_spelled_names
from app.cli.client import ApiClient, ClientError, error_message

if TYPE_CHECKING:
    from app.server.background import Answer

__all__ = ["Progress", "batch"]

_OK, _FAILED, _USAGE = 0, 1, 2
_AT_ONCE = 64
_TICK = 0.5  # seconds between two drawings of the progress
_RETRY = 5.0  # seconds, where a server names none
_REFUSED = (401, 403)  # the key is wrong or missing, or may not use the server
_TRIES = 4  # of a line whose answer is cut each time

Ask = Callable[[BatchLine], Awaitable["Answer"]]


def batch(words: Sequence[str]) -> int:
    """Run ``troupe batch`` with these words; returns the exit status: 1 if a line has failed or none could run."""
    parser = _parser()
    try:
        given, rest = parser.parse_known_args(words)
    except SystemExit as end:
        return int(end.code or 0)
    source, output = Path(given.input), Path(given.output)
    errors = Path(given.errors) if given.errors else output.with_name(f"{output.stem}.errors.jsonl")
    try:
        if given.url is not None and rest:
            raise ValueError(f"{rest[0]}: belongs to an engine of its own; leave it out beside --url")
        if len({path.resolve() for path in (source, output, errors)}) < 3:
            raise ValueError("input, output and errors must be three files")
        checked = check_lines(source, None)
        if checked.errors:
            raise ValueError("\n".join(f"{source}: line {e.line}: {e.message}" for e in checked.errors))
        tokens = Tokens()
        done = finished_lines(output, tokens)
        progress = Progress(checked.total, len(done))
        connection = _server(given) if given.url is not None else _engine(rest)
        with output.open("ab") as good, errors.open("wb") as bad:
            run = _Run(source, done, progress, tokens, good.write, bad.write)
            asyncio.run(run.all(connection, given.at_once))
    except ArgumentError as error:
        return _wrong(*map(with_spelled_names, error.problems))
    except OSError as error:
        return _wrong(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        return _wrong(str(error))
    except (ClientError, KeyboardInterrupt) as error:
        if isinstance(error, ClientError) and not progress.failed:
            errors.unlink()
        print(f"\ntroupe: {error or 'stopped'}. The same command goes on from here.", file=sys.stderr)
        return _FAILED
    if not progress.failed:
        errors.unlink()
    print(progress.summary(tokens, errors), file=sys.stderr)
    return _FAILED if progress.failed else _OK


def _wrong(*problems: str) -> int:
    for problem in problems:
        print(f"troupe: {problem}", file=sys.stderr)
    print("All arguments: troupe batch run --help", file=sys.stderr)
    return _USAGE


class _Run:
    """The lines of one run. ``good`` and ``bad`` write a result."""

    def __init__(
        self,
        source: Path,
        done: set[str],
        progress: Progress,
        tokens: Tokens,
        good: Callable[[bytes], object],
        bad: Callable[[bytes], object],
    ) -> None:
        self._source, self._done, self._progress, self._tokens = source, done, progress, tokens
        self._good, self._bad = good, bad

    async def all(self, connection: contextlib.AbstractAsyncContextManager[Ask], at_once: int) -> None:
        """Run all lines that have no result. Raises ClientError where nothing answers any more."""
        places = asyncio.Semaphore(at_once)
        async with connection as ask:
            drawing = asyncio.create_task(self._progress.draw())
            try:
                async with asyncio.TaskGroup() as group:
                    with self._source.open("rb") as file:
                        for _, data in read_lines(file):
                            line = decode_line(data)
                            if line.custom_id not in self._done:
                                await places.acquire()
                                task = group.create_task(self._one(ask, line))
                                task.add_done_callback(lambda _: places.release())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                drawing.cancel()
                self._progress.clear()

    async def _one(self, ask: Ask, line: BatchLine) -> None:
        answer = await ask(line)
        while (wait := answer.retry_after) is not None:
            await asyncio.sleep(wait)
            answer = await ask(line)
        if answer.status in _REFUSED:  # so are all other lines
            raise ClientError(error_message(answer.status, answer.body), answer.status)
        good = answer.status < 400
        try:
            body = msgspec.json.format(answer.body, indent=-1)  # one line
        except (msgspec.DecodeError, UnicodeDecodeError):
            error = LineError("no_json", f"The answer with status {answer.status} is no JSON.")
            data, good = result_line(line.custom_id, error=error), False
        else:
            data = result_line(line.custom_id, status=answer.status, request_id=answer.request_id, body=body)
        (self._good if good else self._bad)(data)
        if good:
            self._tokens.add(answer.body)
        self._progress.count(None if good else f"{line.custom_id}: {error_message(answer.status, answer.body)}")


# -- where answers come from


@contextlib.asynccontextmanager
async def _server(given: argparse.Namespace) -> AsyncIterator[Ask]:
    from app.server.background import Answer

    client = ApiClient(given.url, given.api_key)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(given.at_once) as threads:

        async def ask(line: BatchLine, tries: int = _TRIES) -> Answer:
            try:
                status, body, request_id = await loop.run_in_executor(threads, client.post, line.url, bytes(line.body))
            except ClientError as error:
                if error.cut and tries > 1:
                    await asyncio.sleep(_RETRY)
                    return await ask(line, tries - 1)
                wait = _RETRY if error.status == 429 and error.retry_after is None else error.retry_after
                if wait is None:
                    raise
                return Answer(error.status, error.body, "", wait)
            return Answer(status, body, request_id)

        yield ask


@contextlib.asynccontextmanager
async def _engine(words: Sequence[str]) -> AsyncIterator[Ask]:
    from app.application import create_app
    from app.server.background import Answer, answer_request
    from app.server.progress import ProgressReport

    application = create_app(load_arguments(words))
    await application.startup()
    try:
        service = application.service
        with ProgressReport() as report:
            while (status := service.status).phase == "starting":
                report.show(status.progress, status.stage)
                await asyncio.sleep(0.1)
        if status.phase != "ready":
            raise ArgumentError(status.error or "the engine could not start")

        async def ask(line: BatchLine) -> Answer:
            route = service.table.find("POST", line.url)
            if route is None:
                return Answer(404, b'{"error":{"message":"This version does not serve the path."}}', "")
            answer = await answer_request(service, route, bytes(line.body), tenant="")
            if answer.status >= 500 and service.status.phase != "ready":
                raise ClientError(service.status.error or "the engine has failed")
            return answer

        yield ask
    finally:
        await application.shutdown()


# -- progress


class Progress:
    """Counts lines, and draws a line at a terminal or prints one now and then elsewhere."""

    def __init__(self, total: int, done: int, stream: TextIO | None = None) -> None:
        self.failed = 0
        self._first_error = ""
        self._total, self._before, self._done = total, done, done
        self._stream = sys.stderr if stream is None else stream
        self._started = time.monotonic()
        self._printed = -1

    def count(self, error: str | None = None) -> None:
        """Count a line, and its ``error`` if it has failed."""
        self._done += 1
        if error is not None:
            self._first_error = self._first_error or error
            self.failed += 1

    def line(self) -> str:
        share = self._done / self._total
        seconds = time.monotonic() - self._started
        left = ""
        if self._done > self._before:
            rest = (self._total - self._done) * seconds / (self._done - self._before)
            left = f", {int(rest) // 60}:{int(rest) % 60:02} left"
        bar = f"[{'#' * round(30 * share)}{'.' * (30 - round(30 * share))}]"
        return f"{bar} {self._done} of {self._total} lines, {self.failed} failed{left}"

    async def draw(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            if self._stream.isatty():
                self._stream.write(f"\r\x1b[K{self.line()[: _columns() - 1]}")
                self._stream.flush()
            elif (tenth := self._done * 10 // self._total) != self._printed:
                self._printed = tenth
                print(self.line(), file=self._stream, flush=True)

    def clear(self) -> None:
        if self._stream.isatty():
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def summary(self, tokens: Tokens, errors: Path) -> str:
        """What ran. ``errors``: the file of the lines that failed."""
        new = self._done - self._before
        seconds = max(1e-9, time.monotonic() - self._started)
        reason = f"\nfirst error: {self._first_error.rstrip('.')}; all in {errors}" if self.failed else ""
        return (
            f"{new} of {self._total} lines ran in {seconds:.1f} s ({self._before} were done before), "
            f"{self.failed} failed; {tokens.input} tokens in, {tokens.output} out.{reason}"
        )


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 80


_EPILOG = """\
Without --url an engine runs in this process; it takes the arguments of troupe
serve, such as a model. Examples:

  troupe batch run in.jsonl out.jsonl --model-path path/to/model
  troupe batch run in.jsonl out.jsonl --url http://127.0.0.1:8000"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="troupe batch",
        description="Answers the requests of a JSONL file in the form of OpenAI's Batch API.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("verb", choices=["run"])
    parser.add_argument("input", metavar="IN", help="the requests, a JSON object a line")
    parser.add_argument("output", metavar="OUT", help="the answers; where it exists, only lines without one run")
    parser.add_argument("--errors", metavar="FILE", help="lines that failed (default: OUT with .errors.jsonl)")
    parser.add_argument("--url", help="a server that answers")
    parser.add_argument("--api-key", help="its key (default: TROUPE_API_KEY, for a server on this machine)")
    parser.add_argument("--at-once", type=_positive, default=_AT_ONCE, help="requests together (default: %(default)s)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 4096:
        raise ValueError(text)
    return value
