"""The handler: it never makes a caller wait, and says what it left out."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from telemetry.logs.lines import Event, JsonLines, LogContext, TextLines
from telemetry.logs.output import LogOutput, install
from telemetry.logs.repeats import Repeats

SHORT = logging.Formatter("%(levelname)s %(name)s %(message)s")


class Clogged(io.StringIO):
    """A pipe that nobody reads, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.full = threading.Event()

    def write(self, text: str) -> int:
        self.full.set()
        self.go.wait(60)
        return super().write(text)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    made = logging.Logger("troupe.test")
    yield made
    for handler in made.handlers:
        handler.close()


def test_records_are_written_in_order_and_all_of_them_at_the_end(logger: logging.Logger) -> None:
    stream = io.StringIO()
    output = LogOutput(stream, SHORT)
    logger.addHandler(output)
    for number in range(100):
        logger.info("record %d", number)
    output.flush()
    assert stream.getvalue().splitlines() == [f"INFO troupe.test record {number}" for number in range(100)]
    for _ in range(7):
        logger.warning("again")
    output.close()
    assert stream.getvalue().splitlines()[100:] == [
        "WARNING troupe.test again",
        "WARNING troupe.test again (seen 7 times within 30 s)",
    ]


def test_events_that_differ_in_a_field_are_no_repetition(logger: logging.Logger) -> None:
    stream = io.StringIO()
    output = LogOutput(stream, SHORT)
    logger.addHandler(output)
    for batch in ("a", "b", "b"):
        logger.error(Event("Actor worker-0 died", {"batch": batch}))
    output.close()
    assert stream.getvalue().splitlines() == [
        "ERROR troupe.test Actor worker-0 died batch=a",
        "ERROR troupe.test Actor worker-0 died batch=b",
        "ERROR troupe.test Actor worker-0 died batch=b (seen 2 times within 30 s)",
    ]


def test_logging_does_not_wait_for_a_slow_reader(logger: logging.Logger) -> None:
    stream = Clogged()
    output = LogOutput(stream, SHORT, max_waiting=1000)
    logger.addHandler(output)
    logger.info("first")
    assert stream.full.wait(60)
    for _ in range(1000):
        logger.info("x" * 100)
    assert 900 < output.dropped < 1000
    logger.critical("the end")
    stream.go.set()
    output.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "INFO troupe.test first"
    assert "CRITICAL troupe.test the end" in lines
    assert lines[-1] == (
        f"WARNING troupe.logs {output.dropped} log records were dropped: the log's reader is slower than the log"
    )
    assert len(lines) == 1000 - output.dropped + 3


def test_counts_are_reported_when_their_window_is_over(logger: logging.Logger) -> None:
    reported = threading.Event()

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            if "seen 2 times" in text:
                reported.set()
            return super().write(text)

    logger.addHandler(LogOutput(Stream(), SHORT, repeats=Repeats(window=0.05)))
    logger.warning("slow")
    logger.warning("slow")
    assert reported.wait(60)


def test_the_work_in_hand_is_read_where_the_record_is_made(logger: logging.Logger) -> None:
    stream = io.StringIO()
    context = LogContext(traceparent=f"00-{'a' * 32}-{'b' * 16}-01", request_id="req-1", actor="scheduler")
    output = LogOutput(stream, TextLines(), context=lambda: context)
    logger.addHandler(output)
    logger.info("here")
    logger.info("there", extra={"actor": "worker-0"})
    output.flush()
    here, there = stream.getvalue().splitlines()
    assert here.endswith(f"here request_id=req-1 actor=scheduler trace_id={'a' * 32} span_id={'b' * 16}")
    assert " actor=worker-0 " in there


def test_a_logger_may_have_a_format_of_its_own() -> None:
    stream = io.StringIO()
    output = LogOutput(stream, SHORT, formatters={"troupe.requests": logging.Formatter("<%(message)s>")})
    for name in ("troupe.requests", "troupe.http"):
        output.handle(logging.LogRecord(name, logging.INFO, "", 0, "text", None, None))
    output.close()
    assert stream.getvalue() == "<text>\nINFO troupe.http text\n"


def test_secrets_are_taken_out_of_whatever_is_written(logger: logging.Logger) -> None:
    stream = io.StringIO()
    output = LogOutput(stream, TextLines(), secrets=["sk-very-secret", 'quo"ted-secret', "a"])
    logger.addHandler(output)
    try:
        raise ValueError("key sk-very-secret")
    except ValueError:
        logger.exception("with %s and %s", "sk-very-secret", 'quo"ted-secret')
    output.close()
    assert "very" not in stream.getvalue()
    assert "quo" not in stream.getvalue()
    assert stream.getvalue().count("***") == 4
    assert "Traceback" in stream.getvalue()


def test_a_secret_that_begins_as_another_is_taken_out_whole(logger: logging.Logger) -> None:
    stream = io.StringIO()
    output = LogOutput(stream, SHORT, secrets=["sk-very", "sk-very-secret"])
    logger.addHandler(output)
    logger.info("sk-very sk-very-secret")
    output.close()
    assert stream.getvalue() == "INFO troupe.test *** ***\n"


def test_a_secret_where_a_repeated_text_is_cut_is_taken_out(logger: logging.Logger) -> None:
    stream = io.StringIO()
    output = LogOutput(stream, SHORT, secrets=["sk-very-secret"])
    logger.addHandler(output)
    for _ in range(2):
        logger.warning("%ssk-very-secret%s", "x" * 248, "x" * 1000)
    output.close()
    assert "seen 2 times" in stream.getvalue()
    assert "sk" not in stream.getvalue()


@pytest.mark.parametrize("lines", [TextLines(), JsonLines()])
@pytest.mark.parametrize("end", ["first", "last"])
def test_a_secret_where_a_long_record_is_cut_is_taken_out(
    logger: logging.Logger, lines: logging.Formatter, end: str
) -> None:
    def around(kept: int, before: int = 0) -> str:
        """A text that is cut within its secret, where each end keeps so many characters; ``before``: of them not its
        own."""
        sides = [kept - before - 7, kept] if end == "first" else [kept, kept - 7]
        return f"{'x' * sides[0]}sk-very-secret{'x' * sides[1]}"

    stream = io.StringIO()
    output = LogOutput(stream, lines, secrets=["sk-very-secret"])
    logger.addHandler(output)
    logger.info("%s", around(8 << 10))
    event = Event(around(8 << 10), {"place": "here"})
    logger.info(event)
    error = ValueError(around(16 << 10, len("ValueError: ")))
    logger.info("failed", exc_info=(ValueError, error, None))
    output.close()
    reported = stream.getvalue()
    assert reported.count("here") == 1
    assert reported.count("ValueError: ") == 1
    assert "sk-" not in reported
    assert "secret" not in reported
    assert event.text == around(8 << 10)  # it may have other handlers


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file")])
def test_a_stream_that_is_gone_ends_nothing(logger: logging.Logger, error: Exception) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    output = LogOutput(Gone(), SHORT)
    logger.addHandler(output)
    logger.info("one")
    output.flush()
    logger.info("two")
    output.close()
    assert output.dropped == 2


def test_a_character_that_the_stream_lacks_is_escaped(logger: logging.Logger) -> None:
    raw = io.BytesIO()
    output = LogOutput(io.TextIOWrapper(raw, "ascii"), SHORT)
    logger.addHandler(output)
    logger.info("café")
    output.flush()
    assert raw.getvalue() == b"INFO troupe.test caf\\xe9\n"


def test_install_touches_the_named_loggers_only(restore_loggers: Callable[..., None]) -> None:
    restore_loggers(
        "troupe", "troupe.http", "troupe.server", "hypercorn.error", "other.server", "opentelemetry.exporter"
    )
    root = (list(logging.getLogger().handlers), logging.getLogger().level)
    output = LogOutput(io.StringIO(), SHORT)
    install(output, level="warning", http_level="debug", others=("other.server",))
    assert logging.getLogger("troupe.scheduler").getEffectiveLevel() == logging.WARNING
    assert logging.getLogger("troupe.http").getEffectiveLevel() == logging.DEBUG
    exporter = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
    assert (exporter.isEnabledFor(logging.WARNING), exporter.isEnabledFor(logging.ERROR)) == (False, True)
    assert output in logging.getLogger("troupe").handlers
    assert output in logging.getLogger("other.server").handlers
    assert output not in logging.getLogger("hypercorn.error").handlers
    assert (list(logging.getLogger().handlers), logging.getLogger().level) == root
    install(output, level="debug", others=())
    assert exporter.isEnabledFor(logging.DEBUG)
    output.close()
