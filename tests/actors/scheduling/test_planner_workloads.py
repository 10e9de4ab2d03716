"""Whole workloads over a cache that is too small for them: everybody gets what they would get alone."""

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.actors.scheduling.stage import Stage, says, spec

LIMITS = settings(deadline=None, max_examples=40)


class Lives:
    """Checks that a preempted sequence is preempted again only after a step of its new run was confirmed."""

    def __init__(self, stage):
        self.stage = stage
        self.now = {}  # sequence -> its serial
        self.count = {}
        self.confirmed = set()

    def after_plan(self):
        for number, sequence in self.stage.planner._table.sequences.items():
            before = self.now.get(number, 0)
            if before and sequence.serial != before and self.count[number] > 1:
                assert before in self.confirmed, f"sequence {number} was preempted twice without progress"
            if sequence.serial and sequence.serial != before:
                self.count[number] = self.count.get(number, 0) + 1
            self.now[number] = sequence.serial

    def before_finish(self):
        flight = self.stage.planner._flights[0]
        rows = zip(flight.sequences, flight.serials, strict=True)
        self.confirmed |= {serial for sequence, serial in rows if sequence.serial == serial}


def play(stage, draw, arrivals):
    """Submit ``arrivals`` while steps run, in a random interleaving, until all have ended."""
    arrivals = list(arrivals)
    lives = Lives(stage)
    steps = 0
    while arrivals or stage.planner.has_work:
        stage.now += draw.random()
        while arrivals and draw.random() < 0.3:
            stage.submit(arrivals.pop(0))
        planned = stage.planner.can_send and stage.plan() is not None
        lives.after_plan()
        if stage.sent and (not planned or draw.random() < 0.7):
            lives.before_finish()
            stage.finish()
        steps += 1
        assert steps < 20_000
    assert stage.cache.usage().used == 0


@LIMITS
@given(
    seed=st.integers(0, 2**32),
    pages=st.integers(6, 20),
    max_running=st.integers(2, 8),
    overlap=st.booleans(),
    use_cache=st.booleans(),
    policy=st.sampled_from(["fcfs", "lpm"]),
    conservativeness=st.sampled_from([0.0, 0.0, 0.5]),
)
@example(seed=0, pages=8, max_running=8, overlap=True, use_cache=True, policy="fcfs", conservativeness=0.0)
def test_many_sequences_in_a_small_cache(seed, pages, max_running, overlap, use_cache, policy, conservativeness):
    draw = random.Random(seed)
    stage = Stage(
        pages=pages,
        page_size=2,
        max_running=max_running,
        max_slots=max_running + 1,
        step_tokens=max_running + draw.randrange(6),
        overlap=overlap,
        use_cache=use_cache,
        policy=policy,
        conservativeness=conservativeness,
    )
    prompts = [[draw.randrange(2) for _ in range(draw.randint(1, 2 * pages - 4))] for _ in range(20)]
    lengths = [draw.randint(1, 2 * pages + 1 - len(prompt)) for prompt in prompts]  # each fits the cache alone
    play(
        stage,
        draw,
        [
            spec(i, prompt, max_tokens=length, arrival=float(i))
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ],
    )
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        assert stage.tokens(i) == says(prompt, length)
        assert stage.end(i).reason == "length"


@LIMITS
@given(seed=st.integers(0, 2**32), overlap=st.booleans(), low_first=st.booleans())
def test_many_sequences_with_priorities(seed, overlap, low_first):
    draw = random.Random(seed)
    stage = Stage(
        pages=10,
        page_size=2,
        max_running=3,
        max_slots=4,
        step_tokens=6,
        overlap=overlap,
        priority_scheduling=True,
        low_priority_values_first=low_first,
        preemption_threshold=2,
        ageing_seconds=5.0,
    )
    prompts = [[draw.randrange(50) for _ in range(draw.randint(1, 12))] for _ in range(20)]
    play(
        stage,
        draw,
        [spec(i, p, max_tokens=8, arrival=float(i), priority=draw.randrange(10)) for i, p in enumerate(prompts)],
    )
    assert all(stage.tokens(i) == says(prompt, 8) for i, prompt in enumerate(prompts))


def test_the_workload_exceeds_the_cache():
    """The workloads above are worth something only if sequences do get preempted in them."""
    stage = Stage(pages=8, page_size=2, max_running=8, step_tokens=12)
    play(stage, random.Random(1), [spec(i, [i] * 3, max_tokens=12, arrival=float(i)) for i in range(20)])
    assert stage.planner.load(0.0).preemptions >= 5


def test_the_low_are_served_though_the_high_keep_coming():
    stage = Stage(pages=32, max_running=1, max_slots=2, overlap=False, priority_scheduling=True, ageing_seconds=1.0)
    stage.submit(spec(0, range(4), max_tokens=6, priority=0))
    for i in range(1, 60):
        stage.now += 0.5
        stage.submit(spec(i, [i], max_tokens=2, priority=8, arrival=stage.now))
        stage.step()
        stage.step()
    assert stage.end(0) is not None
    assert stage.tokens(0) == says(range(4), 6)
