"""The rounds of data-parallel attention."""

from __future__ import annotations

from actors.scheduling.lockstep import Lockstep, Turn
from tests.kits.waiting import until

EPOCH = 3


class Replicas:
    """Two replicas; ``sent``: what each sent, in order: a name, or "" for an empty step, and the round's tokens."""

    def __init__(self, depth: int = 2, grace: float = 60.0) -> None:
        self.replaced: list[str] = []
        self.dead: set[int] = set()
        self.lockstep = Lockstep(2, depth, self.replaced.append, grace)
        self.sent: list[list[tuple[str, tuple[int, ...]]]] = [[], []]
        for replica in (0, 1):
            self.join(replica)

    def join(self, replica: int) -> None:
        self.dead.discard(replica)
        self.lockstep.join(
            replica,
            lambda epoch, tokens: self.sent[replica].append(("", tokens)),
            lambda: replica not in self.dead,
        )

    def submit(self, replica: int, name: str, tokens: int = 1, *, apart: bool = False, epoch: int = EPOCH) -> None:
        turn = Turn(tokens, lambda found: self.sent[replica].append((name, found)), apart=apart)
        self.lockstep.submit(replica, epoch, turn)

    def answer(self, *replicas: int, settled: bool = True, epoch: int = EPOCH) -> None:
        for replica in replicas:
            self.lockstep.answered(replica, epoch)
        for replica in replicas:
            if settled:
                self.lockstep.settled(replica, 1)

    def names(self) -> list[list[str]]:
        return [[name for name, _ in each] for each in self.sent]


async def test_an_idle_replica_runs_an_empty_step_in_each_round():
    all_ = Replicas()
    all_.submit(0, "a", 5)
    all_.submit(0, "b", 1)
    assert all_.sent == [[("a", (5, 0)), ("b", (1, 0))], [("", (5, 0)), ("", (1, 0))]]


async def test_busy_replicas_run_in_the_same_rounds():
    """A step waits while as many rounds as may be are in flight, then all begin together."""
    all_ = Replicas()
    all_.submit(0, "a")
    all_.submit(0, "b")
    all_.submit(1, "x", 7)
    assert all_.names() == [["a", "b"], ["", ""]]
    all_.answer(1)
    assert all_.names()[1] == ["", ""]  # the other has not ended its round
    all_.answer(0, settled=False)
    assert all_.names()[1] == ["", ""]  # nor planned behind it
    all_.submit(0, "c", 2)
    assert [each[2:] for each in all_.sent] == [[("c", (2, 7))], [("x", (2, 7))]]


async def test_a_replica_that_plans_nothing_is_not_waited_for():
    all_ = Replicas(depth=1)
    all_.submit(0, "a")
    all_.submit(1, "x")
    all_.answer(1)
    all_.answer(0, settled=False)
    assert all_.names() == [["a"], [""]]
    all_.lockstep.settled(0, 1)
    assert all_.names() == [["a", ""], ["", "x"]]


async def test_a_replica_that_plans_for_long_is_not_waited_for():
    all_ = Replicas(depth=1, grace=0.01)
    all_.submit(0, "a")
    all_.submit(1, "x")
    all_.answer(0, 1, settled=False)
    assert all_.names() == [["a"], [""]]
    await until(lambda: all_.names() == [["a", ""], ["", "x"]], "the round does not begin")


async def test_a_step_that_may_kill_the_workers_runs_alone():
    all_ = Replicas()
    all_.submit(0, "a")
    all_.submit(1, "x", apart=True)
    all_.submit(0, "b", apart=True)
    assert all_.names() == [["a"], [""]]  # a round is in flight
    all_.answer(0, 1)
    assert all_.names() == [["a", "b"], ["", ""]]
    all_.submit(0, "c", apart=True)
    all_.answer(0, 1)
    assert all_.names() == [["a", "b", ""], ["", "", "x"]]  # in turn
    all_.answer(0, 1)
    assert all_.names() == [["a", "b", "", "c"], ["", "", "x", ""]]


async def test_no_step_begins_beside_one_that_runs_apart():
    all_ = Replicas()
    all_.submit(0, "suspect", apart=True)
    all_.submit(1, "x")
    assert all_.names() == [["suspect"], [""]]
    all_.answer(0, 1)
    assert all_.names() == [["suspect", ""], ["", "x"]]


async def test_steps_of_an_epoch_that_has_ended_are_left_to_the_workers():
    all_ = Replicas(depth=1)
    all_.submit(0, "a")
    all_.submit(0, "waits")
    all_.lockstep.broke(EPOCH)
    all_.answer(0, 1)
    all_.submit(1, "late", 4)
    assert all_.names() == [["a"], ["", "late"]]
    assert all_.sent[1][1] == ("late", (0, 0))
    all_.submit(0, "b", epoch=EPOCH + 1)
    all_.lockstep.broke(EPOCH)  # known again: the new epoch goes on
    all_.answer(0, 1)  # of the epoch before
    all_.submit(1, "y", epoch=EPOCH + 1)
    assert all_.names() == [["a", "b"], ["", "late", ""]]
    all_.answer(0, 1, epoch=EPOCH + 1)
    assert all_.names() == [["a", "b", ""], ["", "late", "", "y"]]


async def test_a_scheduler_that_starts_again_owes_no_answers():
    all_ = Replicas(depth=1)
    all_.submit(0, "a")
    all_.submit(1, "x")
    all_.answer(0)
    all_.join(1)
    all_.submit(0, "b")
    assert all_.names() == [["a", "b"], ["", ""]]


async def test_no_round_begins_while_a_scheduler_is_dead():
    """What a dead actor asks is not sent, so its workers would miss the round."""
    all_ = Replicas()
    all_.dead.add(1)
    all_.submit(0, "a")
    assert all_.names() == [[], []]
    all_.join(1)
    assert all_.names() == [["a"], [""]]


async def test_workers_that_get_only_a_part_of_a_round_are_replaced():
    def fail(tokens: tuple[int, ...]) -> None:
        raise ValueError("too large")

    all_ = Replicas()
    all_.submit(0, "a")
    all_.lockstep.submit(1, EPOCH, Turn(1, fail))
    all_.submit(1, "x")
    all_.answer(0, 1)
    assert all_.replaced == ["a step could not be sent to all workers: too large"]
    all_.submit(0, "b", epoch=EPOCH + 1)
    assert all_.names() == [["a", "", "b"], ["", "x", ""]]


async def test_no_round_begins_before_all_schedulers_have_started():
    lockstep, sent = Lockstep(2, 2, lambda reason: None), list[str]()
    lockstep.join(0, lambda epoch, tokens: sent.append("0"), lambda: True)
    lockstep.submit(0, 0, Turn(1, lambda tokens: sent.append("a")))
    assert not sent
    lockstep.join(1, lambda epoch, tokens: sent.append("1"), lambda: True)
    assert sent == ["a", "1"]
