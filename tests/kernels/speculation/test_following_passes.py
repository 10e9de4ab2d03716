"""Passes issued before the host knows the previous result generate the same tokens as passes issued after."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
import pytest

from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import Admission, SlotSampling, StepBatch
from kernels.devices.cpu.cache import CpuCaches
from kernels.devices.cpu.memory import CpuMemory
from kernels.speculation.early_draft import OverlappedVerify
from kernels.state.slots import SlotTable
from tests.kits.driver import ints, pack
from tests.kits.speculation.accepting import AcceptingDrafting, AcceptingPasses, accept, accepting, fetch
from tests.kits.speculation.early_drafts import captures
from tests.kits.speculation.layouts import make_layout
from tests.kits.speculation.lossless import truth
from tests.kits.speculation.runner_drafts import PROMPTS

GREEDY, SAMPLED = SlotSampling(temperature=0.0), SlotSampling(temperature=0.9, seed=3)
STEPS, ROOM = 4, 6
PAGE = 16


def vary(self, *given):
    """What is accepted, right or wrong, goes by where the first row stands: 1 to 5 tokens."""
    return take(self, 1 + int(given[1][0, 1]) * 7 // 3 % 5, *given)


def take(self, count, tree, rows, sampled, nonfinite, depth, forced, table):
    """So many tokens are accepted, right or wrong."""
    found = accept(self, tree, rows, sampled, nonfinite, depth, 0, table)
    made = accept(self, tree, rows, sampled, nonfinite, depth, count, table)
    found.outcome[:, 0], found.outcome[:, 2 : 2 + count] = made.outcome[:, 0], made.outcome[:, 2:]
    found.tokens[:, :count] = made.tokens
    return found


class Tandem:
    """Two steps are under way at any time. ``reported``: of each step what each request had accepted."""

    def __init__(self, driver, most=0):
        self.driver, self.runner, self.most = driver, driver.runner, most or driver.info.speculative_nodes - 1
        self.running, self.number, self.reported, self.tokens = deque(), 0, [], {}
        self.refused = 0, {}
        self.grants, self.leaving = [], []

    def _admission(self, slot, generation, prompt, sampling, count, target=0):
        self.tokens[slot, generation] = list(prompt)
        pages = [self.driver.free.pop() for _ in range(count)]
        return Admission(slot, generation, pack(prompt), len(prompt), 0, pack(pages), sampling, target=target)

    def admit(self, *requests, target=0):
        """Each (slot, generation, prompt, sampling, pages)."""
        admitted = [self._admission(*request, target) for request in requests]
        for slot, generation, prompt, _, _ in requests:
            self._start([(slot, generation, len(prompt))], tuple(admitted), with_drafts=False)
            admitted = []
        self.wait()

    def decode(self, *rows, count=1, levels=0, most=0):
        for _ in range(count):
            self._start([(slot, generation, 1) for slot, generation in rows], levels=levels, most=most)

    def decode_beside(self, row, request):
        """One decodes while the other runs a prompt of one token."""
        self._start([(*row, 1), (*request[:2], 1)], (self._admission(*request),))

    def _start(self, rows, admitted=(), with_drafts=True, levels=0, most=0):
        self.number += 1
        drafts = [most or self.most] * len(rows)
        batch = StepBatch(
            number=self.number,
            slots=pack(slot for slot, _, _ in rows),
            generations=pack(generation for _, generation, _ in rows),
            counts=pack(count for _, _, count in rows),
            page_slots=pack(slot for slot, _ in self.grants),
            page_ids=pack(page for _, page in self.grants),
            admitted=admitted,
            released=pack(self.leaving),
            draft_limits=pack(drafts) if with_drafts else b"",
            draft_levels=levels,
        )
        self.grants, self.leaving = [], []
        if self.refused[0] == self.number:
            with pytest.raises(ValueError, match="one entry"):
                self.runner.start(msgspec.structs.replace(batch, **self.refused[1]))
        self.running.append((rows, self.runner.start(batch)))
        while len(self.running) > 1:
            self._take()

    def wait(self):
        while self.running:
            self._take()

    def _take(self):
        rows, step = self.running.popleft()
        result = step.result()
        tokens, reported = iter(ints(result.tokens)), []
        for (slot, generation, _), accepted in zip(rows, ints(result.accepted), strict=True):
            new = [next(tokens) for _ in range(accepted)]
            self.tokens.setdefault((slot, generation), []).extend(new)
            reported.append(new)
        assert next(tokens, None) is None
        failed = sorted((error.slot, error.generation, error.message) for error in result.failed)
        self.reported.append((reported, ints(result.drafted), ints(result.depths), result.timing.graph_rows, failed))


@pytest.fixture
def layout(tmp_path, request):
    """``request.param``: other than ``STEPS`` levels."""
    _, algorithm, target, draft, _, _ = make_layout("eagle3", tmp_path)
    steps = getattr(request, "param", STEPS)
    return target, SpeculativeSettings(algorithm, str(draft), num_steps=steps, topk=3, num_draft_tokens=10)


@pytest.fixture
def tandem(drive, layout, monkeypatch):
    """Makes one whose passes may follow, or not. ``tandem.followed``: the rows of those that did."""

    def make(follows, most=0, right=False, **options):
        captures(monkeypatch)
        accepting(monkeypatch)
        if not right:
            monkeypatch.setattr(AcceptingDrafting, "accept", vary)
        with monkeypatch.context() as patch:
            if not follows:
                patch.setattr(OverlappedVerify, "is_candidate", lambda self, batch: False)
            yield Tandem(drive(layout[0], speculation=layout[1], page_size=PAGE, **options), most)

    followed, passes, issue, verify = [], [], OverlappedVerify.issue, AcceptingPasses.verify

    def spy(self, batch):
        left = self._slots.left(np.frombuffer(batch.slots, np.int32).astype(np.int64))
        found = issue(self, batch)
        if found is not None:
            assert (left - (self._speculator.drafter.depth + 1) > 1).all()
            followed.append(ints(batch.slots))
            held, pages = passes[-1]
            starts, early_positions = (
                held.rows[: len(found.slots), 1].numpy(),
                self._speculator.drafter.early_positions(),
            )
            last = starts + held.tokens - 1
            for row, end in enumerate(np.maximum(last, starts + early_positions).tolist()):
                assert (pages[row, : end // PAGE + 1] > 0).all()
        return found

    def seen(self, starts, pages, *others):
        passes.append((self, pages))
        return verify(self, starts, pages, *others)

    monkeypatch.setattr(AcceptingPasses, "verify", seen)
    monkeypatch.setattr(OverlappedVerify, "issue", spy)
    make.followed = followed
    return make


def both(tandem, play, **options):
    """What ``play`` makes of one that follows, after it has said the same as one that does not. -> which rows did."""
    (late,) = [play(made) or made for made in tandem(False, **options)]
    assert not tandem.followed
    (early,) = [play(made) or made for made in tandem(True, **options)]
    assert early.tokens == late.tokens
    assert early.reported == late.reported
    return tandem.followed, early


def requests(*slots, sampling=GREEDY, pages=ROOM):
    return [(slot, 1, PROMPTS[number], sampling, pages) for number, slot in enumerate(slots)]


def test_the_output_is_the_same(tandem, drive, layout):
    def play(made):
        made.admit(*requests(3, 1, 2))
        made.decode((3, 1), (1, 1), (2, 1), count=12)
        made.wait()

    followed, early = both(tandem, play, right=True)
    assert followed == [[3, 1, 2]] * 11
    outputs, _ = truth(drive, layout[0], PROMPTS[:3], [GREEDY] * 3, 40)
    for slot, expected in zip((3, 1, 2), outputs, strict=True):
        assert early.tokens[slot, 1][:40] == expected[: len(early.tokens[slot, 1])]


def test_nothing_is_waited_for_between_two_passes(tandem, monkeypatch):
    """But for copies of what a pass overwrites, by the device; and what it leaves is copied once."""
    happened, copied, run = [], [], AcceptingPasses.verify

    def fetched(self, tensors, lasting=False):
        wait, number = fetch(self, tensors), happened.count("pass")
        copied.append(number)

        def arrives():
            happened.append(number)
            return wait()

        return arrives if lasting else wait

    monkeypatch.setattr(AcceptingPasses, "verify", lambda *given: happened.append("pass") or run(*given))
    monkeypatch.setattr(CpuMemory, "wait_for_copies", lambda self: happened.append("copied"))
    for made in tandem(True):
        monkeypatch.setattr(CpuMemory, "fetch", fetched)
        made.admit(*requests(1, 2))
        happened.clear(), copied.clear()
        made.decode((1, 1), (2, 1), count=5)
        assert copied == [1, 2, 3, 4, 5]
        assert happened[:4] == ["pass", "copied", "pass", 1]
        issued = 0
        for before, each in zip(["copied", *happened], happened, strict=False):
            issued += each == "pass"
            assert each != "pass" or before == "copied"
            assert each in ("pass", "copied") or each < issued or issued == 5
        assert issued == 5
        made.wait()


def test_rows_change(tandem, monkeypatch):
    """They stand in another order, one rests, one leaves and another takes its slot, one samples."""

    def play(made):
        made.admit(*requests(1, 2, 3))
        one, two, three = (1, 1), (2, 1), (3, 1)
        made.decode(one, two, three, count=3)
        made.decode(two, one, three, count=2)
        made.decode(one, three, count=2)
        made.decode(one, two, three, count=2)
        made.decode(one, three)
        made.leaving = [2]
        made.decode(one, three)
        made.decode(one, three, count=2)
        made.admit((2, 2, PROMPTS[3], GREEDY, ROOM), (4, 1, PROMPTS[4], SAMPLED, ROOM))
        made.decode(one, (2, 2), three, count=3)
        made.decode(one, (2, 2), (4, 1), count=3)
        made.decode(one, (2, 2), count=3)
        made.decode(one, (2, 2), count=1, levels=STEPS - 1)
        made.decode(one, (2, 2), count=2, levels=STEPS)
        made.decode(one, (2, 7))  # a row of nobody
        made.decode(one, (2, 2), count=2)
        made.decode_beside(one, (5, 1, PROMPTS[2], GREEDY, ROOM))
        made.decode(one, (5, 1), count=2)
        made.wait()

    admitted, admit = [], SlotTable.admit
    monkeypatch.setattr(SlotTable, "admit", lambda self, given: admitted.append(given.slot) or admit(self, given))
    followed, _ = both(tandem, play)
    first = [[1, 2, 3]] * 2 + [[2, 1, 3]] + [[1, 3]] + [[1, 2, 3]] + [[1, 3]] * 2
    assert followed == [*first, *[[1, 2, 3]] * 2, *[[1, 2]] * 4, [1, 5]]
    assert admitted == [1, 2, 3, 2, 4, 5] * 2


def test_pages_are_short(tandem):
    """A pass follows only if there are pages for whatever is accepted before it."""

    def play(made):
        made.admit((1, 1, PROMPTS[0], GREEDY, 2), (2, 1, PROMPTS[2], GREEDY, 2))
        for number in range(8):
            made.decode((1, 1), (2, 1), count=2)
            if number == 5:
                made.grants = [(slot, made.driver.free.pop()) for slot in (1, 2)]
        made.wait()

    followed, _ = both(tandem, play)
    assert 0 < len(followed) < 15


@pytest.mark.parametrize(
    ("layout", "length", "more", "follows"),
    [(4, 12, 40, 1), (4, 13, 40, 0), (2, 19, 40, 1), (2, 20, 40, 0), (4, 5, 8, 1), (4, 5, 7, 0)],
    indirect=["layout"],
)
def test_every_possible_acceptance_has_room(length, more, follows, tandem):
    """The first pass: a token more than there are levels. The second takes ten places, and what is drafted behind it
    14 or 6 behind its first, of 32. A sequence that may have one token more has no use for draft tokens."""
    for made in tandem(True):
        made.admit((1, 1, PROMPTS[1][:length], GREEDY, 2), target=length + more)
        made.decode((1, 1), count=2)
        made.wait()
        drafter = made.runner._loaded.speculator.drafter
        assert drafter.early_positions() == {4: 14, 2: 6}[drafter.depth]
        assert tandem.followed == [[1]] * follows


def test_sequences_end(tandem):
    def play(made):
        for generation, length in enumerate(range(15, 30), 1):
            made.admit((1, generation, PROMPTS[0], GREEDY, ROOM), target=length)
            made.decode((1, generation), count=8)
            made.leaving = [1]
            made.wait()

    followed, _ = both(tandem, play)
    assert 15 < len(followed) < 15 * 7


def test_the_context_ends(tandem):
    def play(made):
        made.admit(*requests(1, 2, pages=5))
        made.decode((1, 1), (2, 1), count=24)
        made.wait()

    followed, early = both(tandem, play, context_length=40)
    assert len(followed) > 4
    assert [failed for *_, failed in early.reported if failed]


def test_fewer_drafts_than_a_tree_has_are_not_followed(tandem):
    def play(made):
        made.admit(*requests(1))
        for most in (9, 9, 5, 9, 9, 5, 5, 9):
            made.decode((1, 1), most=most)
        made.wait()

    followed, _ = both(tandem, play)
    assert followed == [[1]] * 2


@pytest.mark.parametrize("part", ["generations", "counts", "draft_limits"])
def test_a_step_that_is_refused_changes_nothing(part, tandem):
    """But what was wrong with its draft tokens is found once it has its pages, and the one before it is settled."""
    late = part == "draft_limits"

    def play(made):
        made.admit(*requests(1, 2))
        made.decode((1, 1), (2, 1), count=3)
        made.refused = made.number + 1, {part: pack([9, 9, 9] if late else [1])}
        made.grants = [] if late else [(slot, made.driver.free.pop()) for slot in (1, 2)]
        made.decode((1, 1), (2, 1), count=4)
        made.wait()
        assert made.runner._loaded.slots.page_count[1:3].tolist() == [ROOM + (not late)] * 2

    followed, _ = both(tandem, play)
    assert followed == [[1, 2]] * (5 if late else 6)


def test_a_row_that_is_not_finite_leaves(tandem, monkeypatch):
    def play(made):
        passes = []

        def nonfinite(self, *given):
            found = vary(self, *given)
            passes.append(found)
            if len(passes) == 4:
                found.packed[0, 0] *= -1
                found.nonfinite[0, 0] = True
            return found

        monkeypatch.setattr(AcceptingDrafting, "accept", nonfinite)
        made.admit(*requests(1, 2))
        passes.clear()
        made.decode((1, 1), (2, 1), count=7)
        made.decode((2, 1), count=2)
        made.wait()

    followed, early = both(tandem, play)
    assert followed == [[1, 2]] * 4 + [[2]] * 2
    assert [[error[:2] for error in failed] for *_, failed in early.reported].count([(1, 1)]) == 3


def test_pages_that_others_may_read_are_not_cleaned(tandem, monkeypatch):
    """A row that is not finite wrote to no page that the one before it has filled, and others may share that."""
    starts, cleaned, clean = [], [], CpuCaches.clear

    def nonfinite(self, *given):
        found = take(self, 3, *given)
        starts.append(int(given[1][0, 1]))
        if starts[-1] == 17:
            found.packed[0, 0] *= -1
            found.nonfinite[0, 0] = True
        return found

    def play(made):
        monkeypatch.setattr(AcceptingDrafting, "accept", nonfinite)
        made.admit(*requests(1, 2))
        pages = made.runner._loaded.slots.pages[1].tolist()
        starts.clear(), cleaned.clear()
        made.decode((1, 1), (2, 1), count=7)
        made.wait()
        assert starts[:6] == [5, 8, 11, 14, 17, 20]
        assert pages[1] in cleaned[0]
        assert all(pages[0] not in each for each in cleaned)

    monkeypatch.setattr(CpuCaches, "clear", lambda *given: cleaned.append(given[2]) or clean(*given))
    followed, _ = both(tandem, play)
    assert followed[:5] == [[1, 2]] * 5


def test_pages_that_cannot_be_granted_are_reported(tandem):
    def play(made):
        made.admit(*requests(1, 2))
        made.decode((1, 1), (2, 1), count=3)
        made.grants = [(2, 1 << 20)]
        made.decode((1, 1), (2, 1), count=1)
        made.decode((1, 1), count=2)
        made.wait()

    followed, early = both(tandem, play)
    assert followed == [[1, 2]] * 2 + [[1]] * 2
    assert [[error[:2] for error in failed] for *_, failed in early.reported if failed] == [[(2, 1)]]
