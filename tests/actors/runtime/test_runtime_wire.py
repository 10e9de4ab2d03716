"""What goes over the socket pair: frames, however they come in, and what is inside them."""

from __future__ import annotations

import io
import logging
import socket
import sys

import msgspec
import pytest

from actors.runtime.core.errors import AskTimeout, RequestError
from actors.runtime.process.frames import BrokenLink, Frames, frame
from actors.runtime.process.wire import (
    import_name,
    log_line,
    name_of,
    pack_error,
    pack_header,
    unpack_error,
    unpack_header,
    write_record,
)
from telemetry.logs.lines import JsonLines
from telemetry.logs.output import LogOutput

LIMIT = 1 << 20
BUFFER = 256 << 10  # of Frames
HALF = 24 << 10  # of a log record


class Outer(RequestError):
    class Inner(Exception):
        pass


class Derived(Outer):
    """Two below RequestError."""


class Parts:
    """A socket that gives what is sent in the sizes that are asked for."""

    def __init__(self) -> None:
        self.data = b""
        self.max_bytes = LIMIT

    def recv_into(self, view: memoryview) -> int:
        count = min(len(view), len(self.data), self.max_bytes)
        view[:count] = self.data[:count]
        self.data = self.data[count:]
        return count


def read(frames: Frames, source: Parts) -> list[tuple[int, int, bytes]]:
    """All frames until nothing is left to read."""
    found: list[tuple[int, int, bytes]] = []
    while frames.receive(source):  # type: ignore[arg-type]
        frames.take(lambda kind, correlation, body: found.append((kind, correlation, bytes(body))) or True)
    return found


# -- frames ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [1, 7, 13, 1000, LIMIT])
def test_frames_are_whole_however_they_come(max_bytes: int) -> None:
    source, sent = Parts(), [(kind, 1 << 40 | kind, bytes([kind]) * length) for kind, length in enumerate((0, 5, 300))]
    source.max_bytes = max_bytes
    frames = Frames(LIMIT)
    for _ in range(3):
        source.data = b"".join(frame(kind, correlation, body[:2], body[2:]) for kind, correlation, body in sent)
        assert read(frames, source) == sent


def test_frames_larger_than_the_buffer_come_whole_and_leave_it_small() -> None:
    source, frames = Parts(), Frames(LIMIT)
    bodies = [b"a" * (BUFFER - 20), b"b" * 100, b"c" * (3 * BUFFER), b"d" * 40, b"e" * (LIMIT - 9), b"f"]
    source.data = b"".join(frame(1, number, body) for number, body in enumerate(bodies))
    source.max_bytes = 100_000
    assert [body for _, _, body in read(frames, source)] == bodies
    assert len(frames._view) == BUFFER


def test_a_small_frame_at_the_end_of_the_buffer_leaves_it_as_large() -> None:
    source, frames = Parts(), Frames(LIMIT)
    bodies = [b"a" * (BUFFER - 33), b"b" * 100]
    source.data = b"".join(frame(1, number, body) for number, body in enumerate(bodies))
    assert [body for _, _, body in read(frames, source)] == bodies
    assert len(frames._view) == BUFFER


def test_nothing_is_sent_after_a_refusal_and_the_rest_is_not_read_twice() -> None:
    source, frames, reported = Parts(), Frames(LIMIT), []
    source.data = b"".join(frame(1, number) for number in range(3))
    assert frames.receive(source)  # type: ignore[arg-type]
    frames.take(lambda kind, correlation, body: reported.append(correlation) or False)
    assert reported == [0]


@pytest.mark.parametrize("length", [0, 8, LIMIT + 1])
def test_a_length_that_makes_no_sense_breaks_the_link(length: int) -> None:
    source, frames = Parts(), Frames(LIMIT)
    source.data = length.to_bytes(4, "little") + bytes(9)
    assert frames.receive(source)  # type: ignore[arg-type]
    with pytest.raises(BrokenLink, match=f"a frame of {length} bytes exceeds the limit of {LIMIT}"):
        frames.take(lambda *_: True)


def test_the_end_of_the_stream_is_reported() -> None:
    here, there = socket.socketpair()
    with here:
        there.close()
        assert not Frames(LIMIT).receive(here)


# -- what is in them ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("time", "trace", "arrives"),
    [
        (None, None, None),
        (0.0, "", None),
        (-1.5, "00-ab-cd-01", "00-ab-cd-01"),
        (2.5, "é-1", "?-1"),
        (1.0, "x" * 300, "x" * 255),
    ],
)
def test_headers_go_there_and_back(time: float | None, trace: str | None, arrives: str | None) -> None:
    assert unpack_header(memoryview(pack_header(time, trace) + b"rest")) == (time, arrives, b"rest")


def test_a_header_that_is_cut_off_is_reported() -> None:
    with pytest.raises(ValueError, match="too short"):
        unpack_header(memoryview(pack_header(None, None)[:-1]))


def test_classes_are_named_as_they_are_imported() -> None:
    assert import_name(name_of(Outer.Inner)) is Outer.Inner
    inside = type("Inside", (), {})
    inside.__module__ = "__main__"
    with pytest.raises(ValueError, match="cannot import Inside: put it at the top level"):
        name_of(inside)

    class Local: ...

    with pytest.raises(ValueError, match="cannot import"):
        name_of(Local)


def test_an_error_comes_out_as_it_went_in() -> None:
    error = Derived("one", 2, {"three": [4]})
    error.advice = "less"  # type: ignore[attr-defined]
    error.add_note("not for others")
    found = unpack_error(memoryview(pack_error(error)))
    assert type(found) is Derived
    assert found.args == ("one", 2, {"three": [4]})
    assert vars(found) == {"advice": "less"}
    late = unpack_error(memoryview(pack_error(AskTimeout("desk", "Work", 1.5))))
    assert isinstance(late, AskTimeout)
    assert (late.name, late.message, late.timeout) == ("desk", "Work", 1.5)


def test_what_msgpack_cannot_carry_of_an_error_becomes_text() -> None:
    error = Derived(1 << 70, print, [1 << 70], "half \ud800")
    error.kept = b"bytes"  # type: ignore[attr-defined]
    error.lost = object  # type: ignore[attr-defined]
    found = unpack_error(memoryview(pack_error(error)))
    assert found.args == (str(1 << 70), str(print), f"[{1 << 70}]", "half \\ud800")
    assert vars(found) == {"kept": b"bytes", "lost": str(object)}
    assert str(unpack_error(memoryview(pack_error(ValueError("half \ud800"))))) == "ValueError: half \\ud800"


def test_errors_that_hold_themselves_or_have_no_text_are_reported() -> None:
    class Speechless:
        def __str__(self) -> str:
            raise LookupError

    endless: list[object] = []
    endless.append(endless)
    found = unpack_error(memoryview(pack_error(Derived(endless, Speechless()))))
    assert found.args == ("[[...]]", "Speechless (its text fails: LookupError)")


def test_an_error_that_is_not_known_here_is_described_in_words() -> None:
    found = unpack_error(memoryview(pack_error(Outer.Inner("why"))))
    assert (type(found), str(found)) == (RequestError, "Inner: why")


def test_log_records_arrive_as_they_were_made(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("y" * 100_000)
    except ValueError:
        info = sys.exc_info()
    made = logging.LogRecord("troupe.far", logging.WARNING, "far.py", 7, "%s", ("x" * 100_000,), info, "work")
    made.created, made.process, made.threadName = 12.25, 4242, "far-thread"
    line = log_line(made, "00-ab-cd-01")
    assert line.text == f"{'x' * HALF}\n...\n{'x' * HALF}"
    assert line.error is not None
    assert len(line.error) == 2 * HALF + 5
    assert line.error.startswith("Traceback")
    write_record(line, "worker-0")
    (found,) = caplog.records
    same = ("name", "levelno", "pathname", "lineno", "funcName", "created", "process", "threadName")
    assert [getattr(found, name) for name in same] == [getattr(made, name) for name in same]
    assert (found.msecs, found.getMessage(), found.exc_text) == (250.0, line.text, line.error)
    assert (found.actor, found.traceparent) == ("worker-0", "00-ab-cd-01")  # type: ignore[attr-defined]


def test_log_records_of_texts_that_msgpack_does_not_carry_are_sent() -> None:
    info = (OSError, OSError("half \ud800"), None)
    made = logging.LogRecord("troupe.far", logging.WARNING, "far.py", 7, "no file %s", ("caf\udce9",), info)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(log_line(made, None)))
    assert (sent["text"], sent["error"]) == (r"no file caf\udce9", r"OSError: half \ud800")


@pytest.mark.parametrize("place", [16 << 10, HALF])
def test_a_secret_where_a_long_record_is_cut_on_its_way_is_taken_out(
    place: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="troupe.far")
    stream, secret = io.StringIO(), "sk-very-secret"
    text = f"{'x' * (place - 7)}{secret}{'x' * 100_000}{secret}{'x' * (place - 7)}"
    line = log_line(logging.LogRecord("troupe.far", logging.WARNING, "far.py", 7, text, (), None), None)
    line = msgspec.structs.replace(line, error=line.text)
    logger, output = logging.getLogger("troupe.far"), LogOutput(stream, JsonLines(), secrets=[secret])
    logger.addHandler(output)
    write_record(line, "worker-0")
    logger.removeHandler(output)
    output.close()
    reported = stream.getvalue()
    assert "exception" in reported
    assert "sk-" not in reported
    assert "secret" not in reported


def test_log_records_below_the_level_here_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="troupe.far")
    caplog.handler.setLevel(logging.NOTSET)
    made = logging.LogRecord("troupe.far", logging.WARNING, "far.py", 7, "text", (), None)
    write_record(log_line(made, None), "worker-0")
    assert not caplog.records
