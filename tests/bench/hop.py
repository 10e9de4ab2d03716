"""Measure a hop between two actors: in one process, and to a child process and back. `counted` includes an engine's
traffic counters.

Each round measures every case once, so that a noisy moment hits all of them. The child cases send the message of one
scheduler step for 256 rows; `bare socket` is the same bytes to a child that does nothing but echo them, the floor of
any such hop on this machine.
"""

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import msgspec

from actors.runtime import Actor, ActorRef, ActorSystem, Message, handles
from telemetry.metrics.actor_messages import ActorMessages
from tests.bench._options import command_line
from tests.bench._record import record

ROWS = 256


class HopProtocol: ...


class Add(Message[HopProtocol, int], frozen=True):
    value: int


class Note(Message[HopProtocol, None], frozen=True):
    value: int


class Rows(msgspec.Struct, frozen=True):
    number: int
    tokens: bytes
    generations: bytes
    accepted: bytes
    finished: bytes
    device_us: int
    host_us: int


class Step(Message[HopProtocol, Rows], frozen=True):
    number: int
    slots: bytes  # int32 [rows]
    generations: bytes  # int32 [rows]
    counts: bytes  # int32 [rows]
    pages: bytes  # int32 [rows]
    flags: int = 0


class Adder(Actor[HopProtocol]):
    def __init__(self) -> None:
        self.total = 0

    @handles
    async def add(self, message: Add) -> int:
        self.total += message.value
        return self.total

    @handles
    def note(self, message: Note) -> None:
        self.total += message.value

    @handles
    def step(self, message: Step) -> Rows:
        return Rows(message.number, message.slots, message.generations, message.counts, message.pages, 1, 1)


async def _times(count: int, call: Callable[[], Awaitable[object]]) -> list[float]:
    """Microseconds of each of `count` calls in a row."""
    clock, times = time.perf_counter, []
    for _ in range(count):
        start = clock()
        await call()
        times.append((clock() - start) * 1e6)
    return times


async def _tells(count: int, ref: ActorRef[HopProtocol]) -> list[float]:
    """Microseconds a message, sent and handled, in bursts of 100."""
    clock, times, note = time.perf_counter, [], Note(1)
    for _ in range(max(1, count // 100)):
        start = clock()
        for _ in range(100):
            await ref.tell(note)
        await ref.ask(Add(0), timeout=10.0)
        times.append((clock() - start) * 1e4)
    return times


def _step() -> Step:
    rows = bytes(4 * ROWS)
    return Step(1, rows, rows, rows, rows)


async def _in_process(count: int) -> dict[str, list[float]]:
    async with ActorSystem() as system:
        ref = await system.spawn(Adder, name="adder")
        add, note = Add(1), Note(1)
        await _times(200, lambda: ref.ask(add, timeout=10.0))
        measured = {
            "tell, per message": await _tells(count, ref),
            "ask (coroutine handler)": await _times(count, lambda: ref.ask(add, timeout=10.0)),
            "ask (plain handler)": await _times(count, lambda: ref.ask(note, timeout=10.0)),
        }
    async with ActorSystem(observer=ActorMessages()) as system:
        ref = await system.spawn(Adder, name="adder")
        await _times(200, lambda: ref.ask(note, timeout=10.0))
        measured["ask (plain handler), counted"] = await _times(count, lambda: ref.ask(note, timeout=10.0))
    return measured


async def _to_child(count: int) -> dict[str, list[float]]:
    async with ActorSystem() as system:
        ref = await system.spawn_process(HopProtocol, name="adder", target="tests.bench.hop:Adder")
        add, step = Add(1), _step()
        await _times(200, lambda: ref.ask(step, timeout=10.0))
        return {
            "child: small ask and back": await _times(count, lambda: ref.ask(add, timeout=10.0)),
            "child: 256-row step and back": await _times(count, lambda: ref.ask(step, timeout=10.0)),
        }


_ECHO = """
import socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
while data := sock.recv(65536):
    sock.sendall(data)
"""


def _bare(count: int) -> dict[str, list[float]]:
    ours, theirs = socket.socketpair()
    child = subprocess.Popen([sys.executable, "-c", _ECHO, str(theirs.fileno())], pass_fds=(theirs.fileno(),))
    theirs.close()
    data = msgspec.msgpack.encode(_step())
    times = []
    for number in range(count + 200):
        start = time.perf_counter()
        ours.sendall(data)
        left = len(data)
        while left:
            left -= len(ours.recv(65536))
        if number >= 200:
            times.append((time.perf_counter() - start) * 1e6)
    ours.close()
    child.wait()
    return {"bare socket, 256-row step": times}


def main(argv: list[str]) -> None:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--rounds", type=int, default=5, help="in each of which every case is measured")
    parser.add_argument("--count", type=int, default=2000, help="hops of each case in a round")
    arguments = parser.parse_args(argv)
    loops = {"asyncio": asyncio.new_event_loop}
    try:
        import uvloop
    except ImportError:
        sys.stderr.write("uvloop is not installed: only asyncio's own loop is measured\n")
    else:
        loops["uvloop"] = uvloop.new_event_loop
    rounds: dict[str, list[list[float]]] = {}
    for _ in range(arguments.rounds):
        for loop_name, factory in loops.items():
            for case in (_in_process, _to_child):
                with asyncio.Runner(loop_factory=factory) as runner:
                    for name, times in runner.run(case(arguments.count)).items():
                        rounds.setdefault(f"{loop_name:8} {name}", []).append(times)
        for name, times in _bare(arguments.count).items():
            rounds.setdefault(f"{'':8} {name}", []).append(times)
    sys.stdout.write(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}; ")
    sys.stdout.write(f"microseconds, {arguments.rounds} rounds of {arguments.count}\n")
    sys.stdout.write(f"{'case':42}{'median':>9}{'p99':>9}{'best round':>12}\n")
    for name, measured in sorted(rounds.items(), reverse=True):
        everything = sorted(time for times in measured for time in times)
        p99 = everything[min(len(everything) - 1, len(everything) * 99 // 100)]
        best = min(statistics.median(times) for times in measured)
        sys.stdout.write(f"{name:42}{statistics.median(everything):9.1f}{p99:9.1f}{best:12.1f}\n")
        point = " ".join(name.split())
        record(point, "median", [statistics.median(times) for times in measured], "us")
        record(point, "p99", p99, "us")
