"""Frames: the protocol between an actor in a child process and its system.

A frame is a header of 13 bytes, little endian (u32 number of bytes after this field, u8 kind, u64 correlation id), and
the body. There is no listening port and the other end is a process that this one started; still, an invalid frame ends
the link.
"""

import enum
import socket
import struct
from collections.abc import Callable

__all__ = ["FRAME_LIMIT", "BrokenLink", "Frames", "Kind", "frame"]

FRAME_LIMIT = 64 * 1024 * 1024
"""Largest frame in bytes, by default."""

_HEADER = struct.Struct("<IBQ")
_OVERHEAD = _HEADER.size - 4  # bytes of the header that the length counts
_BUFFER = 256 * 1024


class Kind(enum.IntEnum):
    """The kind of a frame. STACKS, MESSAGE and STOP go to the child, the others come from it."""

    MESSAGE = 1
    STOP = 2
    STACKS = 11
    READY = 3
    REPLY = 4
    ERROR = 5
    EVENT = 6
    LOG = 7
    HEARTBEAT = 8
    DIED = 9
    STOPPED = 10


class BrokenLink(Exception):
    """The other end sent something that is not a frame of this protocol."""


def frame(kind: int, correlation: int, *parts: bytes) -> bytes:
    """A frame whose body is ``parts``. The caller has checked the limit."""
    length = _OVERHEAD
    for part in parts:
        length += len(part)
    return b"".join((_HEADER.pack(length, kind, correlation), *parts))


class Frames:
    """Splits a byte stream into frames of at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._view = memoryview(bytearray(_BUFFER))
        self._start = 0
        self._end = 0

    def receive(self, sock: socket.socket) -> bool:
        """Read once. Returns False at the end of the stream. Raises OSError."""
        count = sock.recv_into(self._view[self._end :])
        self._end += count
        return count > 0

    def take(self, on_frame: Callable[[int, int, memoryview], bool]) -> None:
        """Call ``on_frame(kind, correlation, body)`` for each complete frame, until it returns False; it must not keep
        ``body``. Raises BrokenLink and the exceptions of ``on_frame``."""
        view, start, end = self._view, self._start, self._end
        needed = _HEADER.size
        while end - start >= _HEADER.size:
            length, kind, correlation = _HEADER.unpack_from(view, start)
            if not _OVERHEAD <= length <= self._limit:
                raise BrokenLink(f"a frame of {length} bytes exceeds the limit of {self._limit}")
            needed = 4 + length
            if end - start < needed:
                break
            body = view[start + _HEADER.size : start + needed]
            start += needed
            needed = _HEADER.size
            if not on_frame(kind, correlation, body):
                return
        self._make_room(start, end, needed)

    def _make_room(self, start: int, end: int, needed: int) -> None:
        """Move the beginning of a frame of ``needed`` bytes into a buffer that holds all of it."""
        view, held = self._view, end - start
        if held == 0 and len(view) > _BUFFER:
            self._view = memoryview(bytearray(_BUFFER))
        elif held and start + needed > len(view):
            self._view = memoryview(bytearray(max(_BUFFER, needed)))
            self._view[:held] = view[start:end]
        elif held:
            self._start, self._end = start, end
            return
        self._start, self._end = 0, held
