"""Messages between the hub and the agent of a node, as msgpack in frames."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = [
    "BEAT_SECONDS",
    "CONTROL_LIMIT",
    "SILENT_BEATS",
    "Beat",
    "End",
    "Exited",
    "FromAgent",
    "FromHub",
    "Hello",
    "Kill",
    "Launch",
    "Launched",
    "NotLaunched",
    "Refused",
    "pack",
    "unpack_agent",
    "unpack_hub",
]

CONTROL_LIMIT = 64 * 1024
"""Largest frame in bytes."""

BEAT_SECONDS = 1.0
SILENT_BEATS = 20
"""Beats of the receiver's own clock without a frame after which the other end counts as lost. A receiver that was
stalled itself has missed its own beats, too."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First from the agent. ``layout``: of the ranks on all nodes. ``device``: what they run on. ``first_bytes``: what
    a worker process of its host reads before its spec; the hub sends them, since it has the other end of the worker's
    link. ``model``: its fingerprint."""

    version: str
    nnodes: int
    layout: str
    device: str
    first_bytes: bytes
    model: dict[str, str]


class Launched(msgspec.Struct, frozen=True, tag=True):
    """The process of a launch runs; its links are connections of their own."""

    launch: int
    pid: int


class NotLaunched(msgspec.Struct, frozen=True, tag=True):
    launch: int
    reason: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """``returncode``: as in ``subprocess.Popen``."""

    launch: int
    returncode: int


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Shows that the sender's loop runs."""


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Start a process for this worker. ``launch``: a number of the hub's that is used once."""

    launch: int
    worker: int


class Kill(msgspec.Struct, frozen=True, tag=True):
    launch: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The node cannot join. ``permanent``: the same command will never be able to."""

    reason: str
    permanent: bool


class End(msgspec.Struct, frozen=True, tag=True):
    """Node 0 ends; ``failed``: not in order."""

    failed: bool


FromAgent: TypeAlias = Hello | Launched | NotLaunched | Exited | Beat
FromHub: TypeAlias = Launch | Kill | Refused | End | Beat

pack = msgspec.msgpack.Encoder().encode
unpack_agent = msgspec.msgpack.Decoder(FromAgent).decode
unpack_hub = msgspec.msgpack.Decoder(FromHub).decode
