"""Two computations of one rank that take turns: one computes while a collective of the other is in flight.

The order of turns depends only on the collectives of the two, so all ranks start these in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["PassValue", "TurnTaker", "pass_turn", "takes_turns"]

T = TypeVar("T")


class _Abandoned(Exception):
    """The other computation failed."""


class _Side:
    """One of the two. ``wake`` is held while it must wait."""

    def __init__(self) -> None:
        self.wake = threading.Lock()
        self.wake.acquire()
        self.ended = False


@dataclass
class _Pair(Generic[T]):
    """Two computations that take turns. ``function``: the second one."""

    function: Callable[[], T]
    sides: tuple[_Side, _Side] = field(default_factory=lambda: (_Side(), _Side()))
    result: list[T] = field(default_factory=list)
    error: BaseException | None = None

    def give(self, index: int) -> None:
        """Let the other side compute until its next collective. Raises _Abandoned if it failed."""
        own, other = self.sides[index], self.sides[1 - index]
        if not other.ended:
            other.wake.release()
            own.wake.acquire()
        if self.error is not None:
            raise _Abandoned

    def end(self, index: int, error: BaseException | None = None) -> None:
        """End a side's computation, and let the other continue."""
        if self.error is None:
            self.error = error
        own, other = self.sides[index], self.sides[1 - index]
        own.ended = True
        if index == 1 or not other.ended:  # the first waits for the second's end
            other.wake.release()


class _Turn(threading.local):
    pair: _Pair[Any] | None = None
    index = 0


_turn = _Turn()


def takes_turns() -> bool:
    """Whether the calling thread runs one of two computations that take turns."""
    return _turn.pair is not None


def pass_turn() -> None:
    """Let the other computation run until its next collective, or to its end. Call it after starting a collective."""
    if _turn.pair is not None:
        _turn.pair.give(_turn.index)


class PassValue(threading.local):
    """What a layer keeps for another one in the same pass. Each of two passes that take turns has a separate value."""

    value: Tensor | None = None

    @contextmanager
    def holding(self, value: Tensor) -> Iterator[None]:
        """Another ``value``, for a while."""
        own, self.value = self.value, value
        try:
            yield
        finally:
            self.value = own


class TurnTaker:
    """Runs pairs of computations, the second of each in a thread of its own.

    prepare: called in that thread before the first one.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._prepare = prepare
        self._pairs: SimpleQueue[_Pair[Any]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """The results of both; ``first`` begins. Both have ended when this returns. Raises the error of the one that
        failed first, after both have ended."""
        if self._thread is None:  # a daemon: one that hangs in a collective must not keep the process
            self._thread = threading.Thread(target=self._serve, name="second-batch", daemon=True)
            self._thread.start()
        pair = _Pair(second)
        self._pairs.put(pair)
        results = list[T]()
        try:
            results.append(_compute(pair, 0, first))
            pair.end(0)
        except BaseException as error:
            pair.end(0, error)
        if not pair.sides[1].ended:
            pair.sides[0].wake.acquire()
        if pair.error is not None:
            # Without a reference cycle, collectives in flight are freed at once, and peers do not wait for them.
            failure, pair.error = pair.error, None
            try:
                raise failure
            finally:
                del failure
        return results[0], pair.result[0]

    @torch.inference_mode()
    def _serve(self) -> None:
        prepared = False
        while True:
            pair = self._pairs.get()
            pair.sides[1].wake.acquire()
            error: BaseException | None = None
            try:
                if not prepared:
                    self._prepare()
                    prepared = True
                if pair.error is None:
                    pair.result.append(_compute(pair, 1, pair.function))
            except BaseException as failure:
                error = failure
            pair.end(1, error)
            del pair, error


def _compute(pair: _Pair[Any], index: int, function: Callable[[], T]) -> T:
    _turn.pair, _turn.index = pair, index
    try:
        return function()
    finally:
        _turn.pair = None
