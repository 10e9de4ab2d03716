"""Which sequence is condemned after deaths of the worker, at how many deaths, and what becomes of the others."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.boards.suspects import Rerun, Suspects
from actors.scheduling.testing import model_info
from tests.actors.scheduling.stage import VOCAB, Stage, says, spec

PREFILL = Rerun(8, decode=False)


class Mortal(Stage):
    """A stage whose worker dies of a step with a harmful sequence; ``when``: of any, or while it decodes, or prefills.

    ``kills``: numbers of steps, counted from the first, in which it is killed from outside.
    """

    def __init__(self, *, harmful=(), when="any", kills=(), **config):
        self.harmful, self.when, self.kills = frozenset(harmful), when, frozenset(kills)
        self.deaths = self.counted = self.steps = 0
        super().__init__(**config)

    def finish(self):
        rows = self.of_step(self.sent[0].number)
        harmful = {number for number, kind in rows.items() if self.when in ("any", kind)} & self.harmful
        self.steps += 1
        if harmful or self.steps in self.kills:
            self.die()
            return None
        return super().finish()

    def of_step(self, number):
        """What each sequence of a step does in it."""
        flight = next(flight for flight in self.planner._flights if flight.number == number)
        kinds = ["decode"] * flight.decodes + ["prefill"] * (len(flight.sequences) - flight.decodes)
        return {sequence.id: kind for sequence, kind in zip(flight.sequences, kinds, strict=True)}

    def die(self):
        verdict = self.planner.worker_died([batch.number for batch in self.sent])
        self.deaths += 1
        self.counted += verdict.counts
        self.hear(self.planner.abort(verdict.quarantined))
        self.lose_worker()


def run(stage, count, *, tokens=20, length=7):
    prompts = {number: [number * 20 + at for at in range(length)] for number in range(1, count + 1)}
    stage.submit(*[spec(number, prompt, max_tokens=tokens) for number, prompt in prompts.items()])
    stage.play(limit=20_000)
    return prompts


def ended_well(stage, prompts, tokens=20):
    return [number for number, prompt in prompts.items() if stage.tokens(number) == says(prompt, tokens)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("when", ["any", "decode", "prefill"])
@pytest.mark.parametrize("harmful", [(5,), (1, 32), (7, 8, 20)])
def test_only_harmful_sequences_are_condemned(harmful, when, overlap):
    stage = Mortal(harmful=harmful, when=when, overlap=overlap, max_running=32, max_slots=33, pages=400, step_tokens=96)
    prompts = run(stage, 32)
    assert ended_well(stage, prompts) == [number for number in prompts if number not in harmful]
    assert [stage.end(number).reason for number in harmful] == ["abort"] * len(harmful)
    assert stage.counted <= len(harmful)
    assert stage.deaths - stage.counted <= len(harmful) * (math.log2(32) + 1)


def test_one_harmful_sequence_among_256_costs_log2_deaths():
    stage = Mortal(harmful=(100,), max_running=256, max_slots=257, pages=2000, step_tokens=4096)
    prompts = run(stage, 256)
    assert len(ended_well(stage, prompts)) == 255
    assert stage.deaths <= 1 + math.log2(256) + 1
    assert stage.counted == 1


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 24),
    harmful=st.sets(st.integers(1, 24), max_size=3),
    when=st.sampled_from(["any", "decode", "prefill"]),
    pages=st.integers(30, 200),
    chunk=st.integers(24, 64),
    running=st.integers(2, 24),
)
def test_random_traffic_ends_whole_but_for_harmful_sequences(count, harmful, when, pages, chunk, running):
    stage = Mortal(
        harmful=harmful, when=when, max_running=running, max_slots=running + 1, pages=pages, step_tokens=chunk
    )
    prompts = run(stage, count)
    well = ended_well(stage, prompts)
    # One that only a decode harms gains a token by each prefill, and may get to its end in this way.
    assert [number for number in well if number not in harmful] == [n for n in prompts if n not in harmful]
    assert when == "decode" or well == [number for number in prompts if number not in harmful]


@pytest.mark.parametrize("seed", range(6))
def test_kills_from_outside_condemn_no_sequence(seed):
    """More than any restart intensity admits, also while earlier suspects run again."""
    rng = random.Random(seed)
    kills = list(itertools.accumulate(rng.randint(12, 60) for _ in range(100)))
    stage = Mortal(kills=kills, max_running=8, max_slots=9, pages=400, context_length=512)
    prompts = run(stage, 12, tokens=150)
    assert stage.deaths >= 10
    assert ended_well(stage, prompts, tokens=150) == list(prompts)


def test_sequences_that_only_wait_are_no_suspects():
    stage = Mortal(harmful=(1,), max_running=2, max_slots=3)
    prompts = run(stage, 6)
    assert ended_well(stage, prompts) == [2, 3, 4, 5, 6]
    assert stage.deaths <= 3  # the first, and those that tell 1 from 2


def test_new_sequences_run_in_turns_with_suspects():
    stage = Mortal(max_running=4, max_slots=5, pages=200)
    stage.submit(*[spec(number, range(20 * number, 20 * number + 100), max_tokens=3) for number in (1, 10)])
    for _ in range(4):
        stage.plan()
        stage.finish()
    stage.plan()
    stage.die()
    stage.submit(spec(3, range(500, 640), max_tokens=3))
    steps = []
    while (batch := stage.plan()) is not None:
        steps.append(set(stage.of_step(batch.number)))
        assert len(stage.sent) == 1
        stage.finish()
    assert all(3 not in step or step == {3} for step in steps[:4])
    assert {3} in steps[:3]
    assert [len(stage.tokens(number)) for number in (1, 10, 3)] == [3, 3, 3]


def test_suspects_keep_their_slots_when_new_sequences_come():
    stage = Mortal(max_running=3, max_slots=4, pages=200, step_tokens=16)
    stage.submit(*[spec(number, range(20 * number, 20 * number + 12), max_tokens=9) for number in (1, 2, 3)])
    for _ in range(4):
        stage.step()
    stage.plan()
    stage.die()
    stage.plan()
    stage.die()  # one half runs, the other waits
    stage.submit(*[spec(number, range(20 * number, 20 * number + 12), max_tokens=60) for number in range(4, 9)])
    for _ in range(12):
        stage.step()
    started = [number for number in range(1, 9) if stage.tokens(number)]
    assert set(started) >= {1, 2, 3}
    stage.play()


def test_a_sequence_that_fits_no_cache_alone_ends_while_suspected():
    stage = Mortal(max_running=2, max_slots=3, pages=6, page_size=4)
    stage.submit(spec(1, range(8), max_tokens=100))
    for _ in range(3):
        stage.step()
    stage.plan()
    stage.die()
    stage.play()
    assert stage.end(1).reason == "error"


def test_a_death_of_a_broken_device_counts_again():
    """Each sequence dies alone, none is ever cleared."""
    suspects = Suspects()
    assert suspects.died(dict.fromkeys(range(32), PREFILL)).counts
    counts = []
    while len(suspects):
        group, _ = suspects.cohorts(())
        verdict = suspects.died(dict.fromkeys(sorted(group.members), PREFILL))
        if verdict.quarantined:
            counts.append(verdict.counts)
    assert counts[:4] == [False] * 4
    assert all(counts[4:])
    assert len(counts) == 32


def test_a_decode_must_be_repeated_to_clear_its_sequence():
    suspects = Suspects()
    suspects.died({1: Rerun(10, decode=True)})
    suspects.ran(1, 9, decode=True)
    suspects.ran(1, 10, decode=False)
    assert 1 in suspects
    suspects.ran(1, 11, decode=True)
    assert len(suspects) == 0


def test_a_death_without_steps_proves_nothing():
    suspects = Suspects()
    suspects.died({1: PREFILL})
    verdict = suspects.died({})
    assert (verdict.quarantined, verdict.counts, list(suspects.cohorts(())[0].members)) == ((), True, [1])


class DraftingStage(Mortal):
    """The worker verifies draft tokens and accepts all of them."""

    def __init__(self, **config):
        self.speculative = model_info(
            num_pages=101, page_size=4, context_length=256, vocab_size=VOCAB, speculative_nodes=4, speculative_depth=3
        )
        super().__init__(pages=100, **config)

    def lose_worker(self):
        self.info = self.speculative
        super().lose_worker()


def test_draft_tokens_accepted_before_the_lost_step_clear_no_suspect():
    """The answer of the step before is handled after the death is known."""
    stage = DraftingStage(overlap=True)
    stage.submit(spec(1, range(8), max_tokens=60))
    for _ in range(3):
        stage.step()
    stage.plan()
    stage.plan()
    first, second = stage.sent
    stage.planner.worker_died([second.number])
    stage.hear(stage.planner.finish_step(stage.runner.run(first), stage.now))
    assert 1 in stage.planner._suspects
    stage.lose_worker()
    stage.play()
    assert len(stage.planner._suspects) == 0
    assert stage.tokens(1) == says(range(8), 60)


def test_a_suspect_that_ends_by_its_rerun_is_cleared():
    """With short answers no death would be: after some condemned sequences each one would count for ever."""
    stage = Mortal(harmful=range(10, 60, 10), max_running=2, max_slots=3)
    for number in range(1, 61):
        stage.submit(spec(number, range(20 * number, 20 * number + 7), max_tokens=1))
    stage.play(limit=2000)
    assert [number for number in range(1, 61) if not stage.tokens(number)] == list(range(10, 60, 10))
    assert stage.counted == 5


def test_suspects_that_move_to_another_replica_are_halved_there():
    first, second = Suspects(), Suspects()
    first.died(dict.fromkeys(range(1, 9), PREFILL))
    first.died(dict.fromkeys(range(1, 5), PREFILL))  # 1 to 4 ran without 5 to 8
    second.died({20: PREFILL, 21: PREFILL})
    second.adopt(first.release({1, 2, 3, 4, 5}))
    assert [number for number in range(1, 22) if number in first] == [6, 7, 8]
    assert len(second) == 7
    second.retain({1, 2, 3, 4, 5})
    suspects, others = second.cohorts({})
    assert [suspects.takes(number) for number in (1, 2, 3, 5, 30)] == [True, True, False, False, False]
    assert [others.takes(number) for number in (1, 30)] == [False, True]
    assert second.died(dict.fromkeys((1, 2), PREFILL)).counts is False
    assert second.died({1: PREFILL}).quarantined == ()
    assert second.were_alone() == {1}
    second.adopt(second.release({1}))  # alone in a lost step, wherever that was
    assert second.died({1: PREFILL}).quarantined == (1,)
