"""Simulates replicas behind the router in virtual time: cache hits, first-token latency and imbalance of each method.

Assumptions. A replica computes prompts one after the other at 40,000 tokens/s, without the part that its cache holds,
and 5 ms of overhead each; a decode takes 8 ms a token and 0.05 ms more for each sequence beside it. Its cache holds
400,000 tokens in blocks of 64, the most recently used ones. Requests begin with one of 40 shared prefixes for each
ten replicas (500 to 4,000 tokens, chosen by Zipf's law with exponent 1), then have 20 to 2,000 tokens of their own
and 20 to 1,000 output tokens (log-uniform). Half of the answers lead to a further turn of the conversation after a
mean of 5 s, up to eight turns. Conversations arrive as a Poisson process; in bursts its rate is 2.5 times the other
rate, for 2 of every 10 s.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from actors.requests.prefix_index import PrefixIndex
from actors.requests.router import Route, Router
from actors.runtime.testing import VirtualClock

__all__ = ["Outcome", "Traffic", "simulate"]

_PREFILL_RATE = 40_000.0
_OVERHEAD_SECONDS = 0.005
_DECODE_SECONDS = 0.008
_BESIDE_SECONDS = 0.00005
_CACHE_BLOCKS = 400_000 // 64
_BLOCK_TOKENS = 64
_MAX_TURNS = 8
_VOCABULARY = 32_000


class Traffic(msgspec.Struct, frozen=True):
    """``rate``: conversations a second and replica. ``seconds`` of arrivals; the first fifth is not measured."""

    rate: float = 5.0
    seconds: float = 60.0
    bursts: bool = True
    seed: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """``hit_rate``: part of the prompt tokens that were cached. ``imbalance``: the largest number of live tokens of a
    replica over the mean, at the median of the measured seconds."""

    requests: int
    hit_rate: float
    first_token_p50: float
    first_token_p99: float
    imbalance: float


class _Replica:
    """One replica, with what a router reads of it: a journal and a board."""

    def __init__(self, number: int) -> None:
        self.tokens = 0
        self.running = 0
        self.free_at = 0.0
        self.cache: OrderedDict[int, None] = OrderedDict()
        journal: Any = self
        board: Any = SimpleNamespace(worker=(None, 0))
        scheduler: Any = None
        self.route = Route(scheduler, journal, board, number=number)

    def __len__(self) -> int:
        return self.running

    def use(self, blocks: list[int]) -> int:
        """The cached tokens of a prompt, which is cached afterwards."""
        cached = next((at for at, block in enumerate(blocks) if block not in self.cache), len(blocks))
        for block in reversed(blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > _CACHE_BLOCKS:
            self.cache.popitem(last=False)
        return cached * _BLOCK_TOKENS


class _Simulation:
    def __init__(self, method: str, replicas: int, traffic: Traffic) -> None:
        self.clock = VirtualClock(0.0)
        self.traffic = traffic
        self.random = random.Random(traffic.seed)
        self.numbers = np.random.default_rng(traffic.seed)
        self.replicas = [_Replica(number) for number in range(replicas)]
        self.router = Router([replica.route for replica in self.replicas], method)
        self.names: PrefixIndex[int] = PrefixIndex(1)
        shared = max(40, 4 * replicas)
        self.prefixes = [self.tokens(self.random.randint(500, 4000)) for _ in range(shared)]
        self.weights = np.cumsum(1.0 / np.arange(1, shared + 1))
        self.prompt_tokens = self.cached_tokens = 0
        self.first_tokens: list[float] = []
        self.imbalances: list[float] = []

    def tokens(self, count: int) -> bytes:
        return self.numbers.integers(0, _VOCABULARY, count, dtype=np.int32).tobytes()

    def between(self, low: float, high: float) -> int:
        """Log-uniform."""
        return round(low * (high / low) ** self.random.random())

    def run(self) -> Outcome:
        self.clock.call_later(0.0, self.arrive)
        self.clock.call_later(0.2 * self.traffic.seconds, self.look)
        while (due := self.clock.next_timer()) is not None and due <= self.traffic.seconds:
            self.clock.advance_to(due)
        waits = np.asarray(self.first_tokens)
        return Outcome(
            len(waits),
            self.cached_tokens / max(self.prompt_tokens, 1),
            float(np.percentile(waits, 50)),
            float(np.percentile(waits, 99)),
            float(np.median(self.imbalances)),
        )

    def look(self) -> None:
        loads = [replica.tokens for replica in self.replicas]
        self.imbalances.append(max(loads) / max(sum(loads) / len(loads), 1.0))
        self.clock.call_later(1.0, self.look)

    def arrive(self) -> None:
        """A conversation begins, and the next one is on its way."""
        now = self.clock.monotonic()
        place = float(self.random.random() * self.weights[-1])
        self.request(self.prefixes[int(np.searchsorted(self.weights, place))], 1)
        rate = self.traffic.rate * len(self.replicas)
        if self.traffic.bursts:
            rate *= (2.5 if now % 10.0 < 2.0 else 1.0) / 1.3
        self.clock.call_later(self.random.expovariate(rate), self.arrive)

    def request(self, context: bytes, turn: int) -> None:
        now = self.clock.monotonic()
        prompt, output = context + self.tokens(self.between(20, 2000)), self.between(20, 1000)
        replica = self.replicas[self.router.choose(prompt).number]
        length = len(prompt) // 4
        cached = replica.use(self.names.blocks(prompt, b""))
        replica.running += 1
        replica.tokens += length + output
        replica.free_at = max(now, replica.free_at) + _OVERHEAD_SECONDS + max(length - cached, 1) / _PREFILL_RATE
        if now >= 0.2 * self.traffic.seconds:
            self.prompt_tokens += length
            self.cached_tokens += min(cached, length)
            self.first_tokens.append(replica.free_at - now)
        decode = output * (_DECODE_SECONDS + _BESIDE_SECONDS * replica.running)
        self.clock.call_later(replica.free_at - now + decode, self.end, replica, prompt, output, turn)

    def end(self, replica: _Replica, prompt: bytes, output: int, turn: int) -> None:
        replica.running -= 1
        replica.tokens -= len(prompt) // 4 + output
        if turn < _MAX_TURNS and self.random.random() < 0.5:
            context = prompt + self.tokens(output)
            self.clock.call_later(self.random.expovariate(0.2), self.request, context, turn + 1)


def simulate(method: str, replicas: int, traffic: Traffic) -> Outcome:
    """Play the traffic against this many replicas behind a router with this method."""
    return _Simulation(method, replicas, traffic).run()
