"""Drafters that know the target's tokens and propose right or wrong ones."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch

import kernels.execution.load
import kernels.execution.opening
from kernels.core.tree import Drafts, tree_of
from kernels.speculation.drafter import Drafter, DraftRows, Observation


class Oracle(Drafter):
    """``truths``: all possible complete sequences. ``right``: returns whether the draft token at a position is right.
    ``branches``: children of each node on the proposed path; 1: chains.

    Every observation is checked against the rules of ``kernels.speculation.drafter``.
    """

    features = True

    def __init__(
        self, depth: int, branches: int, right: Callable[[int], bool], vocab: int, ragged: bool = False
    ) -> None:
        self.depth, self.fan, self.right, self.vocab, self.ragged = depth, branches, right, vocab, ragged
        self.max_nodes = 1 + depth * branches
        self.truths: list[list[int]] = []
        self.says: dict[int, list[int]] = {}
        self.seen: dict[int, int] = {}  # positions observed by slot
        self.accepted: list[int] = []
        self.drafted = 0

    def admit(self, admission, tokens) -> None:
        known = tokens.tolist()
        self.says[admission.slot] = next(truth for truth in self.truths if truth[: len(known)] == known)
        self.seen[admission.slot] = admission.computed

    def release(self, slot) -> None:
        self.seen.pop(slot, None)

    def observe(self, seen: Observation) -> None:
        ends = np.cumsum(seen.counts)
        assert seen.features is not None
        assert len(seen.features) == len(seen.token_ids) == len(seen.next_tokens) == ends[-1]
        assert seen.last.tolist() == (ends - 1).tolist()
        for slot, start, count, end in zip(seen.slots.tolist(), seen.starts.tolist(), seen.counts, ends, strict=True):
            part = slice(end - count, end)
            assert self.seen[slot] == start
            self.seen[slot] = start + int(count)
            positions = list(range(start, start + int(count)))
            assert seen.positions[part].tolist() == positions
            truth = self.says[slot]
            assert seen.token_ids[part].tolist() == truth[start : start + int(count)]
            assert seen.next_tokens[part].tolist() == truth[start + 1 : start + int(count) + 1]

    def draft(self, rows: DraftRows) -> Drafts:
        trees = []
        nodes = np.empty(len(rows.slots), dtype=np.int64)
        for row, (slot, root) in enumerate(zip(rows.slots.tolist(), rows.roots.tolist(), strict=True)):
            assert self.seen[slot] == root
            truth = self.says[slot]
            assert int(rows.root_tokens[row]) == truth[root]
            tokens, parents, parent = [truth[root]], [-1], 0
            for position in range(root + 1, root + 1 + self.depth):
                good = truth[position] if position < len(truth) else 1
                bad = [(good + 1 + i) % self.vocab for i in range(self.fan)]
                place = (position * 7) % self.fan
                if self.right(position):
                    bad[place] = good
                first = len(tokens)
                tokens += bad
                parents += [parent] * self.fan
                parent = first + place
            trees.append((tokens, parents))
            max_drafts = min(int(rows.limits[row]), self.max_nodes - 1)
            nodes[row] = 1 + (root * 5 + slot) % (max_drafts + 1) if self.ragged else 1 + max_drafts
        self.drafted += int((nodes - 1).sum())
        both = torch.tensor(trees, device=rows.root_tokens.device)
        tree = tree_of(both[:, 0], both[:, 1])
        if self.fan == 1:
            from kernels.core.tree import chain

            tree = chain(both[:, 0])
        return Drafts(tree, nodes)

    def record_acceptance(self, slots, accepted, drafted) -> None:
        self.accepted += accepted


def draft_with(monkeypatch, drafter: Drafter) -> None:
    """Let runners that are loaded from now on draft with it, whatever their settings say."""
    monkeypatch.setattr(kernels.execution.opening, "captured_layers", lambda settings, model: ())
    monkeypatch.setattr(kernels.execution.load, "make_drafter", lambda context: drafter)


def run_mixed(driver, prompts, samplings, outputs, length, seed=0, reported=None):
    """Run all requests in one runner: chunks, plain decodes and decodes with any number of draft tokens share its
    steps. ``outputs``: the output of each; a request may start with its first tokens. ``reported``: called for each row
    that verified draft tokens with the accepted and the possible number.
    """
    chance = random.Random(seed)
    waiting = list(range(len(prompts)))
    running: dict[int, int] = {}
    finished: dict[int, list[int]] = {}
    scores: dict[int, list[np.ndarray]] = {n: [] for n in waiting}
    while waiting or running:
        if waiting and len(running) < 4 and (not running or chance.random() < 0.5):
            number = waiting.pop(0)
            slot = next(s for s in range(1, 9) if s not in running)
            running[slot] = number
            resumed = chance.randrange(3) if chance.random() < 0.5 else 0  # output tokens of an earlier incarnation
            prompt = prompts[number]
            early = outputs[number][len(prompt) : len(prompt) + resumed]
            scores[number].append(np.full(resumed, np.nan, np.float32))
            driver.admit(slot, prompt, early, sampling=samplings[number])
        rows, drafts = [], {}
        for slot in running:
            pending = driver.pending(slot)
            rows.append((slot, pending if pending == 1 else chance.randint(1, pending)))
            if pending == 1 and chance.random() < 0.8:
                drafts[slot] = chance.randint(1, driver.info.speculative_nodes - 1)
        result = driver.step(rows, drafts)
        assert not result.failed
        counts = np.frombuffer(result.accepted, np.int32)
        if reported is not None and result.drafted:
            verified = np.frombuffer(result.drafted, np.int32) > 0
            reported += zip(counts[verified] - 1, np.frombuffer(result.depths, np.int32)[verified], strict=True)
        if result.logprobs:
            ends = np.cumsum(counts)
            values = np.frombuffer(result.logprobs, np.float32)
            for (slot, _), count, end in zip(sorted(rows, key=lambda row: row[1] != 1), counts, ends, strict=True):
                scores[running[slot]].append(values[end - count : end])
        else:
            for (slot, _), count in zip(sorted(rows, key=lambda row: row[1] != 1), counts, strict=True):
                scores[running[slot]].append(np.full(count, np.nan, np.float32))
        for slot, number in list(running.items()):
            if len(driver.tokens[slot]) >= length:
                finished[number] = driver.tokens[slot][:length]
                del running[slot]
                driver.release(slot)
    return [finished[number] for number in range(len(prompts))], scores
