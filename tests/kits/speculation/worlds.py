"""A simulation with a virtual clock and known costs of steps and chances of draft tokens."""

import random

import msgspec

from actors.scheduling.speculation.policy import AdaptiveConfig, AdaptivePolicy

PLAIN, LEVEL, NODE = 1.0, 0.12, 0.04


class World:
    """Rows that decode together. ``chances``: for each row, the chance that a draft token of any level is accepted."""

    def __init__(self, policy: AdaptivePolicy | int, chances: list[float], *, node: float = NODE) -> None:
        self.policy = policy
        self.chances = chances
        self.node = node
        self.random = random.Random(7)
        self.estimates = [] if isinstance(policy, int) else [policy.new_estimate() for _ in chances]
        self.seconds = 0.0
        self.tokens = 0
        self.levels: list[list[int]] = []
        self.stalls = 0.0  # share of the steps that take ten times as long
        self.slow = 1.0  # factor of the time of plain steps
        self.seeing = 0.0  # additional time of a step without draft tokens after one with draft tokens

    def run(self, steps: int) -> float:
        """Tokens a second of a row, over ``steps`` steps."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(steps):
            self.step()
        return (self.tokens - tokens) / (self.seconds - seconds) / len(self.chances)

    def step(self) -> None:
        rows = len(self.chances)
        levels = [self.policy] * rows if isinstance(self.policy, int) else self.policy.choose(self.estimates)
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
                self.policy.add_accepted(self.estimates[row], accepted, level)
        seen = self.seeing if not any(levels) and any(self.levels[-2:][0]) else 0.0
        if not isinstance(self.policy, int):
            slow = 10 if self.stalls and self.random.random() < self.stalls else 1
            if any(levels):
                self.policy.add_timed(rows, max(levels), sum(levels), slow * cost, right)
            else:
                self.policy.add_plain(rows, slow * (cost + seen), seen)
        self.seconds += cost


def chain(levels: int = 6, **settings: object) -> AdaptivePolicy:
    return AdaptivePolicy(range(levels + 1), msgspec.convert(settings, AdaptiveConfig))
