"""Scheduler traffic with two steps in flight on passes issued before the previous result: each request generates the
same tokens as alone."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch

from actors.caching import PrefixCache
from actors.protocol import SequenceSpec
from actors.scheduling.config import PlannerConfig
from actors.scheduling.planner import Planner
from actors.scheduling.testing import drive as plan_with
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from kernels.speculation.early_draft import EarlyDraftPasses, OverlappedVerify
from tests.kits.driver import pack
from tests.kits.speculation.accepting import AcceptingDrafting, accept, accepting, move_accepted
from tests.kits.speculation.drafting import DIM, KV_HEADS, VOCAB
from tests.kits.speculation.early_drafts import captures
from tests.kits.speculation.layouts import make_layout

GREEDY = SlotSampling(temperature=0.0)
PAGE, CONTEXT, STEPS = 16, 160, 4
OPTIONS = {"page_size": PAGE, "context_length": CONTEXT, "max_slots": 4, "max_step_tokens": 128}


def make_requests(alone, generator, count):
    """-> for each request: prompt (may begin as another), max tokens, stop ids, and the sequence that it generates."""
    sequences, found = [], []
    for _ in range(count):
        prompt = [generator.randrange(VOCAB) for _ in range(generator.choice((1, 5, 15, 16, 17, 33)))]
        if sequences and generator.random() < 0.5:
            prompt = generator.choice(sequences)[: generator.randrange(1, 90)] + prompt[:3]
        alone.admit(1, prompt)
        sequences.append(list(alone.generate(1, min(len(prompt) + 60, CONTEXT))))
        alone.release(1)
        stops = tuple(generator.sample(sequences[-1][len(prompt) :], 1)) if generator.random() < 0.3 else ()
        found.append((prompt, generator.choice((3, 20, 60)), stops, sequences[-1]))
    return found


class RandomDrafts:
    """Right ones, mostly, on the way to a tree's first deepest node."""

    def __init__(self, generator, requests):
        self.generator, self.runner = generator, None
        self.sequences = {tuple(tokens[:end]): tokens for *_, tokens in requests for end in range(1, len(tokens))}

    def better(self, tree):
        if self.runner is None:
            return tree
        ahead, table = self.runner._loaded.speculator.drafter._early, self.runner._loaded.slots.tokens
        for row, bits in enumerate(tree.bits):
            root = int(ahead._host[row, 0]) + max(1, abs(int(ahead._outcome[row, 0])))
            rest = self.sequences.get(tuple(table[int(ahead._host[row, 1]), : root + 1].tolist()), [])[root:]
            seen = int(bits[tree.depths[row].argmax()])
            path = [node for node in range(tree.bits.shape[1]) if seen >> node & 1][: len(rest)]
            for level, node in enumerate(path[: self.generator.randrange(1, STEPS + 2)]):
                tree.tokens[row, node] = rest[level]
        return tree


class Faults:
    """Rows that leave numbers that are not finite: half of those whose root is two places behind the one before, or
    more, and the first of these is on a page that the step before has filled."""

    def __init__(self, generator):
        self.generator, self.roots, self.places, self.count = generator, {}, [], 0

    def accept(self, platform, tree, rows, sampled, nonfinite, *others):
        found = accept(platform, tree, rows, sampled, nonfinite, *others)
        found.nonfinite.copy_(nonfinite[(rows[:, 3:] + found.outcome[:, 2:]).clamp(max=len(nonfinite) - 1)])
        for row, (slot, root, nodes, first) in enumerate(rows.tolist()):
            before, self.roots[slot] = self.roots.get(slot, root), root
            if before + 1 < root // PAGE * PAGE and root - before < STEPS + 2 and self.generator.random() < 0.5:
                self.places.append(slice(first, first + nodes))
                found.nonfinite[row], self.count = True, self.count + 1
            if found.nonfinite[row, : int(found.outcome[row, 0])].any():
                found.packed[row, 0] *= -1
        return found

    def move(self, platform, caches, index, rows, outcome):
        move_accepted(platform, caches, index, rows, outcome)
        for place in self.places:
            for cache in caches:
                nothing = torch.full((len(index[place]), 2 * KV_HEADS, DIM), torch.nan)
                platform.cache.write(cache, index[place], nothing)
        self.places = []
        return True


class Traffic:
    """The scheduler's part, and the cache manager's. Requests come now and then; a few are aborted."""

    def __init__(self, driver, requests, generator):
        self.runner, self.requests, self.generator = driver.runner, requests, generator
        self.planner = Planner(PlannerConfig(max_running=2, max_slots=4, step_tokens=128, conservativeness=0.3))
        self.cache = PrefixCache(driver.info.num_pages, PAGE)
        self.planner.worker_ready(driver.info, 0.0)
        self.outputs, self.ends, self.running = {}, {}, deque()

    def play(self):
        waiting, chance = deque(enumerate(self.requests)), self.generator.random
        while waiting or self.planner.has_work:
            if waiting and chance() < 0.1:
                number, (prompt, most, stops, _) = waiting.popleft()
                spec = SequenceSpec(
                    sequence=number, prompt=pack(prompt), sampling=GREEDY, max_tokens=most, stop_ids=stops
                )
                self.hear(self.planner.submit([spec], 0.0))
            if self.planner.running() and chance() < 0.01:
                self.hear(self.planner.abort([self.generator.choice(self.planner.running())]))
            if self.planner.has_work and self.planner.can_send:
                self.send(plan_with(self.planner.plan(0.0), self.cache))
            if len(self.running) == 2 or (self.running and chance() < 0.5):
                self.hear(self.planner.finish_step(self.running.popleft().result(), 0.0))

    def send(self, plan):
        if plan is not None:
            self.hear(plan.outputs)
            if plan.batch is not None:
                self.running.append(self.runner.start(plan.batch))

    def hear(self, outputs):
        for output in outputs:
            self.outputs.setdefault(output.sequence, []).extend(output.tokens)
            if output.ended is not None:
                self.ends[output.sequence] = output.ended.reason


@pytest.mark.parametrize("faulty", [False, True])
def test_each_learns_what_it_learns_alone(faulty, drive, tmp_path, monkeypatch):
    _, algorithm, target, draft, _, _ = make_layout("eagle3", tmp_path)
    generator = random.Random(31)
    requests = make_requests(drive(target, **OPTIONS), generator, 30)
    captures(monkeypatch)
    accepting(monkeypatch)
    draft_tokens, faults = RandomDrafts(generator, requests), Faults(generator)
    replay, issue = EarlyDraftPasses._replay, OverlappedVerify.issue
    followed = []
    monkeypatch.setattr(EarlyDraftPasses, "_replay", staticmethod(lambda *given: draft_tokens.better(replay(*given))))
    monkeypatch.setattr(OverlappedVerify, "issue", lambda *given: followed.append(issue(*given)) or followed[-1])
    if faulty:
        monkeypatch.setattr(AcceptingDrafting, "accept", lambda *given: faults.accept(*given))
        monkeypatch.setattr(AcceptingDrafting, "move_accepted", lambda *given: faults.move(*given))
    settings = SpeculativeSettings(algorithm, str(draft), num_steps=STEPS, topk=1, num_draft_tokens=STEPS + 1)
    driver = drive(target, speculation=settings, max_total_tokens=60 * PAGE, **OPTIONS)
    draft_tokens.runner = driver.runner
    traffic = Traffic(driver, requests, generator)
    traffic.play()
    assert len([found for found in followed if found is not None]) > 50
    assert (faults.count > 2) == faulty
    for number, (prompt, most, stops, tokens) in enumerate(requests):
        end, reported = traffic.ends[number], traffic.outputs.get(number, [])
        expected = tokens[len(prompt) :][:most]
        if end == "stop":
            expected = expected[: expected.index(stops[0]) + 1]
        assert reported == (expected if end in ("stop", "length") else expected[: len(reported)])
        assert end in (("stop", "length", "abort", "error") if faulty else ("stop", "length", "abort"))
