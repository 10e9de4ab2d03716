"""Two computations that take turns at their collectives."""

from __future__ import annotations

import threading

import pytest

from kernels.distributed.turns import TurnTaker, pass_turn, takes_turns


@pytest.fixture
def turns():
    return TurnTaker(lambda: None)


def counted(log, name, collectives, fails_at=None):
    def run():
        assert takes_turns()
        for number in range(collectives):
            if number == fails_at:
                raise ValueError(name)
            log.append(f"{name}{number}")
            pass_turn()
        log.append(f"{name}.")
        return name

    return run


@pytest.mark.parametrize(
    ("first", "second", "order"),
    [
        (2, 2, "a0 b0 a1 b1 a. b."),
        (1, 3, "a0 b0 a. b1 b2 b."),
        (3, 1, "a0 b0 a1 b. a2 a."),
        (0, 1, "a. b0 b."),
    ],
)
def test_each_computes_while_the_others_collective_runs(turns, first, second, order):
    for _ in range(2):
        log: list[str] = []
        assert turns.run(counted(log, "a", first), counted(log, "b", second)) == ("a", "b")
        assert log == order.split()
    assert not takes_turns()


@pytest.mark.parametrize(("fails", "order"), [((1, None), "a0 b0"), ((None, 1), "a0 b0 a1"), ((0, None), "")])
def test_an_error_of_one_ends_both_and_the_next_pair_runs(turns, fails, order):
    log: list[str] = []
    with pytest.raises(ValueError, match="a" if fails[0] is not None else "b"):
        turns.run(counted(log, "a", 3, fails[0]), counted(log, "b", 3, fails[1]))
    assert log == order.split()
    assert turns.run(counted(log, "a", 1), counted(log, "b", 1)) == ("a", "b")


def test_a_thread_that_cannot_be_prepared_is_an_error():
    def prepare():
        raise OSError("no device")

    taker = TurnTaker(prepare)
    with pytest.raises(OSError, match="no device"):
        taker.run(counted([], "a", 2), counted([], "b", 2))


def test_the_second_computes_in_one_prepared_thread():
    prepared: list[str] = []
    taker = TurnTaker(lambda: prepared.append(threading.current_thread().name))
    names = [taker.run(lambda: 0, threading.get_ident)[1] for _ in range(2)]
    assert names[0] == names[1] != threading.get_ident()
    assert len(prepared) == 1
