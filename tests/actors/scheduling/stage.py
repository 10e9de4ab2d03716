"""Planner, prefix cache and simulated runner, wired for tests that run in one thread and no loop."""

import numpy as np

from actors.caching import PrefixCache
from actors.protocol import SequenceSpec
from actors.scheduling import Planner, PlannerConfig
from actors.scheduling.testing import SimulatedRunner, drive, model_info, next_token
from kernels.contract.step import SlotSampling

VOCAB = 1000


def pack(ids):
    return np.array(list(ids), dtype=np.int32).tobytes()


def unpack(data):
    return np.frombuffer(data, dtype=np.int32).tolist()


def spec(number, prompt, *, max_tokens=4, output=(), sampling=None, **kwargs):
    return SequenceSpec(
        sequence=number,
        prompt=pack(prompt),
        output=pack(output),
        sampling=sampling or SlotSampling(),
        max_tokens=max_tokens,
        **kwargs,
    )


def says(prompt, count):
    """The first ``count`` output tokens of a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(tokens) - count :]


class Stage:
    """Planner, cache and runner; ``reported`` collects every output by sequence."""

    def __init__(self, *, pages=64, page_size=4, context_length=256, fails=lambda tokens: None, **config):
        config = {"max_running": 8, "max_slots": 9, "step_tokens": 64, "conservativeness": 0.0} | config
        self.config = PlannerConfig(**config)
        self.info = model_info(
            num_pages=pages + 1, page_size=page_size, context_length=context_length, vocab_size=VOCAB
        )
        self.cache = PrefixCache(pages + 1, page_size, enabled=self.config.use_cache)
        self.planner = Planner(self.config)
        self.fails = fails
        self.now = 0.0
        self.reported = {}
        self.sent = []
        self.lose_worker()

    def lose_worker(self):
        self.sent.clear()
        self.cache.reset(self.info.num_pages, self.info.page_size)
        self.runner = SimulatedRunner(
            self.info,
            max_slots=self.config.max_slots,
            max_step_tokens=self.config.step_tokens + self.config.tail_tokens,
            fails=self.fails,
        )
        self.hear(self.planner.worker_ready(self.info, self.now))

    def submit(self, *specs):
        self.hear(self.planner.submit(specs, self.now))

    def plan(self):
        """The next step's batch, which then is in flight."""
        plan = drive(self.planner.plan(self.now), self.cache)
        self.cache.check()
        if plan is None:
            return None
        self.hear(plan.outputs)
        if plan.batch is not None:
            self.sent.append(plan.batch)
        return plan.batch

    def finish(self):
        """The oldest step in flight is run and answered."""
        result = self.runner.run(self.sent.pop(0))
        self.hear(self.planner.finish_step(result, self.now))
        return result

    def step(self):
        """One step from plan to answer; None when nothing was left to run."""
        batch = self.plan()
        if batch is not None:
            self.finish()
        return batch

    def play(self, limit=500):
        """Until nothing is left."""
        for _ in range(limit):
            while self.planner.can_send and self.plan() is not None:
                pass
            if not self.sent:
                break
            self.finish()
        assert not self.planner.has_work
        assert self.cache.usage().used == 0

    def hear(self, outputs):
        for output in outputs:
            self.reported.setdefault(output.sequence, []).append(output)

    def tokens(self, number):
        return [token for output in self.reported.get(number, ()) for token in output.tokens]

    def end(self, number):
        ended = [output.ended for output in self.reported.get(number, ()) if output.ended is not None]
        assert len(ended) <= 1
        return ended[0] if ended else None


class DraftingStage(Stage):
    """A stage whose worker accepts ``accepts`` of the draft tokens that it may."""

    def __init__(
        self, *, nodes=4, depth=3, accepts=lambda most: most, seconds=None, together=0, decode_only=False, **config
    ):
        self.nodes, self.depth, self.accepts, self.seconds, self.together = nodes, depth, accepts, seconds, together
        self.decode_only = decode_only
        super().__init__(**config)

    def lose_worker(self):
        self.info = model_info(
            num_pages=self.info.num_pages,
            page_size=self.info.page_size,
            context_length=self.info.context_length,
            vocab_size=VOCAB,
            speculative_nodes=self.nodes,
            speculative_depth=self.depth,
            speculative_tokens=self.together,
            speculative_decode_only=self.decode_only,
        )
        super().lose_worker()
        self.runner = SimulatedRunner(
            self.info,
            max_slots=self.config.max_slots,
            max_step_tokens=self.config.step_tokens,
            accepts=lambda most: self.accepts(most),
            seconds=self.seconds,
        )
