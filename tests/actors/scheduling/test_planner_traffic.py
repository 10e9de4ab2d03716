"""Random traffic through planner, prefix cache and simulated runner, against what each sequence must say on its own."""

import math

import msgspec
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.caching import PrefixCache
from actors.protocol import SequenceSpec
from actors.scheduling import Planner, PlannerConfig
from actors.scheduling.testing import SimulatedRunner, drive, model_info, next_token
from kernels.contract.caches import CacheGroup, GroupPages, Paged, State, Window
from kernels.contract.step import SlotSampling

VOCAB = 7
POISON = 100  # a prompt token that makes its row fail


def pack(ids):
    return np.array(ids, dtype=np.int32).tobytes()


def unpack(data):
    return np.frombuffer(data, dtype=np.int32).tolist()


def reference(spec, context):
    """All output tokens of a sequence and the reason of its end."""
    prompt, output = unpack(spec.prompt), unpack(spec.output)
    while True:
        if output and output[-1] in spec.stop_ids and len(output) > spec.min_tokens:
            return output, "stop"
        if len(output) >= spec.max_tokens or len(prompt) + len(output) >= context:
            return output, "length"
        output.append(next_token(prompt + output, VOCAB))


def bounded(kind, page_size, step_tokens, spare):
    """A group of ``kind`` (tokens of a window, main pages between snapshots) with pages for one sequence and some."""
    name, size = kind
    window = Window(Paged(1, 1, 1), size)
    group = CacheGroup(window if name == "window" else State(((1,),)), (0,))
    sized = GroupPages(group, 0, page_size if name == "window" else page_size * size)
    return msgspec.structs.replace(
        sized, num_pages=1 + sized.sequence_pages(page_size) + sized.step_pages(step_tokens) + spare
    )


class PlannerTraffic(RuleBasedStateMachine):
    kinds = st.just(())  # of bounded cache groups

    @initialize(
        max_running=st.integers(1, 5),
        budget=st.integers(0, 8),
        page_size=st.integers(1, 4),
        pages=st.integers(4, 16),
        context=st.sampled_from([12, 24, 40]),
        spare_slots=st.integers(0, 1),
        drafts=st.sampled_from([(0, 0), (0, 0), (1, 1), (3, 3), (4, 2), (7, 2)]),
        decode_only=st.booleans(),
        acceptance=st.randoms(use_true_random=False),
        options=st.fixed_dictionaries(
            {
                "overlap": st.booleans(),
                "use_cache": st.booleans(),
                "chunked": st.booleans(),
                "policy": st.sampled_from(["fcfs", "lpm"]),
                "priority_scheduling": st.booleans(),
                "low_priority_values_first": st.booleans(),
                "preemption_threshold": st.sampled_from([0, 2]),
                "conservativeness": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
                "max_prefill_tokens": st.sampled_from([2, 5, 1000]),
                "prefill_max_requests": st.sampled_from([None, 1, 2]),
            }
        ),
        groups=st.data(),
    )
    def start(
        self,
        max_running,
        budget,
        page_size,
        pages,
        context,
        spare_slots,
        drafts,
        decode_only,
        acceptance,
        options,
        groups,
    ):
        self.config = PlannerConfig(
            max_running=max_running,
            max_slots=max_running + 1 + spare_slots,
            step_tokens=max_running + budget,
            tail_tokens=budget // 2,
            **options,
        )
        self.planner = Planner(self.config)
        step_tokens = self.config.step_tokens + self.config.tail_tokens
        groups = tuple(
            bounded(
                kind, page_size, step_tokens, groups.draw(st.sampled_from([0, 0, 0, 1, 5, 20]), label="spare pages")
            )
            for kind in groups.draw(self.kinds, label="bounded groups")
        )
        drafts = (0, 0) if groups else drafts
        self.info = model_info(
            num_pages=pages + 1,
            page_size=page_size,
            context_length=context,
            vocab_size=VOCAB,
            speculative_nodes=drafts[0] + 1,
            speculative_depth=drafts[1],
            speculative_decode_only=decode_only,
            cache_groups=groups,
        )
        self.acceptance = acceptance
        self.cache = PrefixCache(pages + 1, page_size, enabled=options["use_cache"])
        self.pages, self.page_size, self.context = pages, page_size, context
        self.now = 0.0
        self.next = 0
        self.specs = {}  # everything ever submitted
        self.outputs = {}  # sequence -> output so far
        self.scored = set()
        self.ended = {}  # sequence -> Ended
        self.dropped = set()  # by text_stopped, not to be heard of again
        self.sent = []  # batches not run yet
        self.answers = []  # results not delivered yet
        self.new_runner()

    def new_runner(self):
        self.runner = SimulatedRunner(
            self.info,
            max_slots=self.config.max_slots,
            max_step_tokens=self.config.step_tokens + self.config.tail_tokens,
            fails=lambda tokens: "poisoned" if tokens[0] == POISON else None,
            accepts=lambda most: self.acceptance.randint(0, most),
        )
        self.sent.clear()
        self.answers.clear()
        self.cache.reset(self.info.num_pages, self.info.page_size, self.info.bounded_groups)
        self.hear(self.planner.worker_ready(self.info, self.now))

    # -- what comes from outside --

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        poisoned=st.integers(0, 14),
        output=st.integers(0, 3),
        copies=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(1, 12),
        stop_ids=st.sets(st.integers(0, VOCAB - 1), max_size=2),
        min_tokens=st.integers(0, 4),
        priority=st.integers(-2, 3),
        patience=st.sampled_from([None, None, 3.0, 30.0]),
        salt=st.sampled_from([b"", b"", b"tenant"]),
        tenant=st.sampled_from(["", "", "a", "b"]),
        logprobs=st.sampled_from([-1, 0, 2]),
        drafts=st.sampled_from([-1, -1, 0, 1, 20]),
        prompt_logprobs=st.sampled_from([-1, -1, 0, 2]),
    )
    def submit(
        self,
        prompt,
        poisoned,
        output,
        copies,
        max_tokens,
        stop_ids,
        min_tokens,
        priority,
        patience,
        salt,
        tenant,
        logprobs,
        drafts,
        prompt_logprobs,
    ):
        if poisoned == 0:
            prompt[0] = POISON
        specs = []
        for _ in range(copies):
            fresh = SequenceSpec(
                sequence=self.next,
                prompt=pack(prompt),
                sampling=SlotSampling(logprobs=logprobs, prompt_logprobs=prompt_logprobs, max_drafts=drafts),
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                stop_ids=tuple(stop_ids),
                priority=priority,
                arrival=self.now,
                deadline=None if patience is None else self.now + patience,
                salt=salt,
                tenant=tenant,
            )
            early = [] if len(prompt) >= self.context else reference(fresh, self.context)[0][:output]
            specs.append(
                SequenceSpec(**{f: getattr(fresh, f) for f in fresh.__struct_fields__} | {"output": pack(early)})
            )
            self.specs[self.next] = specs[-1]
            self.outputs[self.next] = early
            self.next += 1
        self.hear(self.planner.submit(specs, self.now))
        assert self.planner.submit(specs[:1] if self.planner.is_known(specs[0].sequence) else [], self.now) == []

    @precondition(lambda self: self.specs)
    @rule(data=st.data(), text=st.booleans())
    def leave(self, data, text):
        victims = data.draw(st.lists(st.integers(0, self.next), max_size=2))
        if text:
            self.planner.text_stopped(victims)
            self.dropped |= {v for v in victims if v in self.specs and v not in self.ended}
        else:
            outputs = self.planner.abort(victims)
            assert {e.ended.reason for e in outputs} <= {"abort"}
            self.hear(outputs)
            assert self.planner.abort(victims) == []

    @rule(seconds=st.sampled_from([0.5, 2.0, 15.0]))
    def wait(self, seconds):
        self.now += seconds
        self.hear(self.planner.expire(self.now))
        for sequence, spec in self.specs.items():
            if spec.deadline is not None and spec.deadline <= self.now:
                assert not self.planner.is_known(sequence)

    @rule()
    def lose_worker(self):
        self.new_runner()

    # -- the line --

    @rule(times=st.integers(1, 12))
    def work(self, times):
        """Plan while there are credits, then let the runner answer: the engine at its usual pace."""
        for _ in range(times):
            self.plan()
            self.plan()
            self.run()
            self.deliver()

    @rule()
    def plan(self):
        if not self.planner.can_send:
            return
        idle = not self.planner.in_flight
        while True:
            plan = drive(self.planner.plan(self.now), self.cache)
            if plan is None:
                assert not (idle and self.planner.has_work), "work, nothing in flight, and no step planned"
                return
            self.hear(plan.outputs)
            if plan.batch is not None:
                self.sent.append(plan.batch)
                return

    @rule()
    def run(self):
        if self.sent:
            self.answers.append(self.runner.run(self.sent.pop(0)))

    @rule()
    def deliver(self):
        if self.answers:
            self.now += 0.01
            self.hear(self.planner.finish_step(self.answers.pop(0), self.now))

    def hear(self, outputs):
        for output in outputs:
            number = output.sequence
            spec = self.specs[number]
            tokens = self.outputs[number]
            assert number not in self.ended, f"sequence {number} speaks after its end"
            assert number not in self.dropped, f"sequence {number} speaks after it was stopped"
            assert output.start == len(tokens)
            first = not tokens
            tokens += output.tokens
            if output.tokens:
                self.check_scores(output, spec, first)
            if output.ended is None:
                assert output.tokens
                continue
            self.ended[number] = output.ended
            self.check_end(spec, output.ended, tokens)

    def check_scores(self, output, spec, first):
        prompt = unpack(spec.prompt)
        if spec.sampling.logprobs < 0:
            assert output.scores is None
        else:
            assert np.frombuffer(output.scores.logprobs, np.float32).tolist() == [-t for t in output.tokens]
            assert unpack(output.scores.top_counts) == [spec.sampling.logprobs] * len(output.tokens)
        expected = prompt[1:] if spec.sampling.prompt_logprobs >= 0 and first else []
        if expected:
            assert np.frombuffer(output.prompt_scores.logprobs, np.float32).tolist() == [-t for t in expected]
            ids = [t + i for t in expected for i in range(spec.sampling.prompt_logprobs)]
            assert unpack(output.prompt_scores.top_ids) == ids
        else:
            assert output.prompt_scores is None

    def check_end(self, spec, ended, outputs):
        length = len(unpack(spec.prompt)) + len(outputs)
        if ended.reason in ("stop", "length"):
            assert (outputs, ended.reason) == reference(spec, self.context)
            assert ended.matched == (outputs[-1] if ended.reason == "stop" else None)
        elif ended.reason == "error":
            if "pages" in ended.message:
                assert math.ceil(length / self.page_size) > self.pages
            elif "context" in ended.message:
                assert length >= self.context
            else:
                assert ended.message == "poisoned"
                assert unpack(spec.prompt)[0] == POISON
        elif ended.reason == "timeout":
            assert spec.deadline <= self.now
        else:
            assert ended.reason == "abort"

    @invariant()
    def sound(self):
        if not hasattr(self, "planner"):
            return
        self.cache.check()
        assert self.planner.in_flight <= (2 if self.config.overlap else 1)
        load = self.planner.load(self.now)
        assert load.running <= self.config.max_running
        living = {s for s in self.specs if s not in self.ended and s not in self.dropped}
        assert living == {s for s in self.specs if self.planner.is_known(s)}
        assert load.running + load.waiting == len(living)
        for sequence, outputs in self.outputs.items():
            if sequence not in self.ended and outputs:
                expected = reference(self.specs[sequence], self.context)[0]
                assert outputs == expected[: len(outputs)]

    def teardown(self):
        """Everything that was accepted ends, in bounded time, and nothing is left."""
        if not hasattr(self, "planner"):
            return
        tokens = sum(len(unpack(s.prompt)) + s.max_tokens for s in self.specs.values())
        for _ in range(20 * tokens + 20):
            if not (self.planner.has_work or self.planner.in_flight):
                break
            self.plan()
            self.plan()
            self.run()
            self.deliver()
        assert not self.planner.has_work
        assert self.planner.load(self.now).running == self.planner.load(self.now).waiting == 0
        assert self.cache.usage().used == 0
        assert self.cache.usage().sequences == 0
        assert all(group.used == 0 for group in self.cache.usage().bounded)
        assert set(self.ended) | self.dropped == set(self.specs)


class BoundedTraffic(PlannerTraffic):
    """The same for models with windows and states."""

    kinds = st.lists(
        st.tuples(st.just("window"), st.sampled_from([1, 5, 12, 20, 20]))
        | st.tuples(st.just("state"), st.integers(1, 3)),
        min_size=1,
        max_size=2,
    )


TestPlannerTraffic = PlannerTraffic.TestCase
TestPlannerTraffic.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestBoundedTraffic = BoundedTraffic.TestCase
TestBoundedTraffic.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
