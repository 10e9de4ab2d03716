"""Lockstep: the rounds of data-parallel attention, in which every worker runs exactly one step.

Replicas of attention share layers of experts, so their workers meet in each of these layers: one that ran a pass more
than the others would wait for ever. All schedulers are in one process, so they agree here, and no device is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

__all__ = ["Lockstep", "Turn"]

_log = logging.getLogger("troupe.scheduler")

GRACE_SECONDS = 0.02
"""Until a round begins without a replica that has not yet planned after its last result."""

Tokens = tuple[int, ...]
"""The most tokens of a round's pass in each replica: with as many draft tokens as may be."""


class Turn(msgspec.Struct, frozen=True, eq=False):
    """A step that waits for its round. ``launch`` sends it to the workers of its replica. ``apart``: no other replica
    may run a token in the round, and no other round is in flight, as the step may kill the workers."""

    tokens: int
    launch: Callable[[Tokens], None]
    apart: bool = False


class _Member:
    """A replica: its steps that wait, and what it must send without one."""

    def __init__(self) -> None:
        self.turns: deque[Turn] = deque()
        self.launch_empty: Callable[[int, Tokens], None] | None = None
        self.is_alive: Callable[[], bool] = lambda: False
        self.settling = 0  # results after which it has not planned yet


class Lockstep:
    """Starts rounds: of each of ``replicas`` the step that has waited longest, or else an empty one.

    At most ``depth`` rounds are in flight. When one has ended, every replica plans before the next begins, so that busy
    replicas run in the same rounds. An epoch of the workers begins without rounds. ``replace_workers``: ends an epoch
    in which some workers have a step that others did not get; called with the reason.
    """

    def __init__(
        self, replicas: int, depth: int, replace_workers: Callable[[str], None], grace: float = GRACE_SECONDS
    ) -> None:
        self._members = [_Member() for _ in range(replicas)]
        self._depth, self._grace = depth, grace
        self._replace_workers = replace_workers
        self._rounds: deque[dict[int, bool]] = deque()  # the members without an answer, and whether theirs has rows
        self._epoch = -1
        self._broken = -1  # no rounds up to this epoch
        self._is_apart = False  # the last round
        self._first = 0  # whose turn it is to run apart
        self._timer: asyncio.TimerHandle | None = None

    def join(self, replica: int, launch_empty: Callable[[int, Tokens], None], is_alive: Callable[[], bool]) -> None:
        """A scheduler has started, or started again: what it sent before has no answer. ``launch_empty``: sends an
        empty step of this epoch to its workers. ``is_alive``: whether it can send; what a dead actor asks is not sent,
        so no round begins until it has joined again."""
        member = self._members[replica]
        member.turns.clear()
        member.launch_empty, member.is_alive, member.settling = launch_empty, is_alive, 0
        for waiting in self._rounds:
            waiting.pop(replica, None)
        self._end_rounds()

    def submit(self, replica: int, epoch: int, turn: Turn) -> None:
        """The next step of a replica. In an epoch that has ended it goes to the workers at once, which refuse it."""
        if epoch < self._epoch or epoch <= self._broken:
            turn.launch((0,) * len(self._members))
            return
        if epoch > self._epoch:
            self._reset(epoch)
        self._members[replica].turns.append(turn)
        self._advance()

    def answered(self, replica: int, epoch: int) -> None:
        """The workers of a replica have ended the oldest of its steps."""
        if epoch != self._epoch:
            return
        waiting = next((each for each in self._rounds if replica in each), None)
        if waiting is not None:
            self._members[replica].settling += waiting.pop(replica)
            self._end_rounds()

    def settled(self, replica: int, results: int) -> None:
        """A replica has planned after so many of its results."""
        member = self._members[replica]
        member.settling = max(0, member.settling - results)
        self._advance()

    def broke(self, epoch: int) -> None:
        """The workers of an epoch have died or hang: there are no more rounds."""
        if epoch > self._broken:
            self._broken = epoch
            if epoch >= self._epoch:
                self._reset(self._epoch)

    def _reset(self, epoch: int) -> None:
        self._epoch = epoch
        self._rounds.clear()
        self._stop_timer()
        for member in self._members:
            member.turns.clear()
            member.settling = 0

    def _end_rounds(self) -> None:
        while self._rounds and not self._rounds[0]:
            self._rounds.popleft()
        self._advance()

    def _advance(self, *, late: bool = False) -> None:
        """Begin as many rounds as may be in flight."""
        members = self._members
        while any(member.turns for member in members):
            apart = self._apart()
            if not all(member.is_alive() for member in members):
                return
            if len(self._rounds) >= (self._depth if apart is None and not self._is_apart else 1):
                return
            if not late and any(member.settling and not member.turns for member in members):
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(self._grace, self._is_late)
                return
            self._stop_timer()
            self._begin(range(len(members)) if apart is None else (apart,))

    def _apart(self) -> int | None:
        """The replica whose next step must run apart, in turn."""
        count = len(self._members)
        order: list[int] = [*range(self._first, count), *range(self._first)]
        for replica in order:
            turns = self._members[replica].turns
            if turns and turns[0].apart:
                return replica
        return None

    def _begin(self, replicas: Sequence[int]) -> None:
        turns: list[Turn | None] = [
            member.turns.popleft() if replica in replicas and member.turns else None
            for replica, member in enumerate(self._members)
        ]
        self._is_apart = len(replicas) == 1
        if self._is_apart:
            self._first = replicas[0] + 1
        tokens = tuple(0 if turn is None else turn.tokens for turn in turns)
        self._rounds.append({replica: turn is not None for replica, turn in enumerate(turns)})
        epoch = self._epoch
        try:
            for member, turn in zip(self._members, turns, strict=True):
                if turn is not None:
                    turn.launch(tokens)
                elif member.launch_empty is not None:
                    member.launch_empty(epoch, tokens)
        except Exception as error:  # the others' workers have the step, and wait in it for those without
            _log.exception("a round could not be sent to all workers; they are replaced")
            self.broke(epoch)
            self._replace_workers(f"a step could not be sent to all workers: {error}")

    def _is_late(self) -> None:
        self._timer = None
        self._advance(late=True)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
