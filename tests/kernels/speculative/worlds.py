"""A world on a made-up clock, where every step's cost and every guess's chance are known."""

import random

import msgspec

from kernels.speculative.adaptive import AdaptiveConfig, AdaptiveSteps

PLAIN, LEVEL, NODE = 1.0, 0.12, 0.04


class World:
    """Rows that decode together; ``chances`` of each: that a guess is right, whatever its level."""

    def __init__(self, policy: AdaptiveSteps | int, chances: list[float], *, node: float = NODE) -> None:
        self.policy = policy
        self.chances = chances
        self.node = node
        self.random = random.Random(7)
        self.tracks = [] if isinstance(policy, int) else [policy.track() for _ in chances]
        self.seconds = 0.0
        self.tokens = 0
        self.levels: list[list[int]] = []
        self.stalls = 0.0  # share of the steps that seem to take ten times as long
        self.slow = 1.0  # how many times as long plain steps take
        self.seeing = 0.0  # that a step without guesses takes longer behind one with guesses

    def run(self, steps: int) -> float:
        """Tokens a second of a row, over so many steps."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(steps):
            self.step()
        return (self.tokens - tokens) / (self.seconds - seconds) / len(self.chances)

    def step(self) -> None:
        rows = len(self.chances)
        levels = [self.policy] * rows if isinstance(self.policy, int) else self.policy.choose(self.tracks)
        self.levels.append(levels)
        cost = PLAIN * (1 if any(levels) else self.slow) + LEVEL * max(levels) + self.node * sum(levels)
        right = 0
        for row, level in enumerate(levels):
            accepted = 0
            while accepted < level and self.random.random() < self.chances[row]:
                accepted += 1
            self.tokens += 1 + accepted
            right += accepted
            if not isinstance(self.policy, int):
                self.policy.judged(self.tracks[row], accepted, level)
        seen = self.seeing if not any(levels) and any(self.levels[-2:][0]) else 0.0
        if not isinstance(self.policy, int):
            slow = 10 if self.stalls and self.random.random() < self.stalls else 1
            self.policy.timed(rows, max(levels), sum(levels), slow * (cost + seen), right, seen)
        self.seconds += cost


def chain(most: int = 6, **settings: object) -> AdaptiveSteps:
    return AdaptiveSteps(range(most + 1), msgspec.convert(settings, AdaptiveConfig))
