"""Which of the guesses that n-grams make are worth verifying: what each promises, and what a step of them costs.

A guess is as likely right as others were that stood as deep behind as long a window of tokens, the last seen of their
kind or not; a request's own may be more or less so. This is learnt of guesses that were not verified, too: what came
instead is known a step later. Nothing here depends on a clock, for all ranks of a model must choose the same.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Guessed", "Promises"]

WIDEST, DEEPEST = 8, 16
"""Windows and depths from which on all are taken to be alike."""
FIRST = (0.3, 0.5, 0.65, 0.75, 0.85, 0.9, 0.95, 0.95)
"""A first guess's chance by its window, before any was judged; each further level has ``LEVEL`` of that above it."""
LEVEL = 0.93
RARER = 0.2
"""What guesses have of that beside which others were seen later."""
SURE, LEAST_WEIGHT = 4, 0.01
"""Outcomes that this counts as; the weight of a new one, at least."""
OWN = 0.9
"""What a request's outcomes weigh after each further step."""

FREE = 16
"""Tokens of a step that cost hardly more than one."""
BLOCK, AGAIN = 32, 0.6
"""Tokens up to which a CPU reads each weight once; what it takes to read them all again, of what that takes."""
DECODE, GUESS = 1 / 16, 0.05
"""What a decode and a guess cost where weights are read once: shares of what reading them does, of small models."""
LOOKED, LOOKED_ROW = 0.25, 0.045
"""The same of a step in which guesses are looked for, and of each of its rows, whatever is found."""
START, START_ROW = 0.05, 0.01
"""The same where some are verified."""
BRANCHED, BRANCHED_ROW = 0.2, 0.025
"""The same where not all of them are chains."""
ELSEWHERE = 0.0125
"""The same of a guess on devices that are not short of arithmetic."""


class Guessed:
    """A tree of guesses behind the last known token: node 0. ``windows``: of the match that each was found by;
    ``later``: whether another child of its parent came first."""

    __slots__ = ("at", "chances", "kinds", "known", "later", "parents", "right", "tokens", "verified", "windows")

    def __init__(self, tokens: list[int], parents: list[int], windows: list[int]) -> None:
        self.tokens, self.parents, self.windows = tokens, parents, windows
        depths, self.later, self.kinds = [0], [False], [0]
        seen: set[int] = set()
        for parent, window in zip(parents[1:], windows[1:], strict=True):
            depth, later = depths[parent] + 1, parent in seen
            depths.append(depth)
            seen.add(parent)
            self.later.append(later)
            self.kinds.append(2 * (DEEPEST * (min(window, WIDEST) - 1) + min(depth, DEEPEST) - 1) + later)
        self.chances: list[float] = []  # of each node, were its request like others; empty where all are verified
        self.verified: set[int] = set()
        self.right: set[int] = set()
        self.at = self.known = 0  # the last node that was right, -1 after one that was not; tokens that came since

    def follow(self, tokens: Sequence[int]) -> None:
        """These came behind what was told before."""
        self.known += len(tokens)
        for token in tokens:
            if self.at < 0:
                return
            above, self.at = self.at, -1
            for node in range(above + 1, len(self.tokens)):
                if self.parents[node] == above and self.tokens[node] == token:
                    self.right.add(node)
                    self.at = node
                    break

    def pruned(self) -> tuple[list[int], list[int]]:
        """Tokens and parents of the nodes that are verified."""
        if len(self.verified) == len(self.tokens) - 1:
            return self.tokens, self.parents
        kept = [0, *sorted(self.verified)]
        place = {node: number for number, node in enumerate(kept)}
        return [self.tokens[node] for node in kept], [place.get(self.parents[node], -1) for node in kept]


class Promises:
    """``reads``: whether a step costs what its weights take to be read, and more for each ``BLOCK`` of tokens."""

    def __init__(self, reads: bool) -> None:
        self._reads = reads
        self._chances = [first * LEVEL**depth * by for first in FIRST for depth in range(DEEPEST) for by in (1, RARER)]
        self._judged = [SURE] * len(self._chances)
        self._own: dict[int, tuple[float, float]] = {}  # by slot: guesses that were right, and that were expected to be

    def forget(self, slot: int) -> None:
        """Another request takes the slot."""
        self._own.pop(slot, None)

    def judge(self, slot: int, guessed: Guessed) -> None:
        """Learn of guesses, behind which all is known that will be."""
        right = expected = 0.0
        for node in range(1, len(guessed.tokens)):
            # A step tells what follows each guess that it verified and found right, and no more.
            above = guessed.parents[node]
            if not guessed.known or not (above == 0 or above in guessed.verified):
                continue
            kind = guessed.kinds[node]
            self._judged[kind] += 1
            hit = node in guessed.right
            self._chances[kind] += max(1 / self._judged[kind], LEAST_WEIGHT) * (hit - self._chances[kind])
            if guessed.chances:
                right, expected = right + hit, expected + guessed.chances[node]
        if not guessed.chances:
            return
        before = self._own.get(slot, (0.0, 0.0))
        self._own[slot] = OWN * before[0] + right, OWN * before[1] + expected

    def choose(self, slots: Sequence[int], guesses: Sequence[Guessed], limits: Sequence[int]) -> None:
        """Mark the nodes to verify in one step: the most likely ones, as many as promise the most tokens a second, and
        of each tree ``limits`` at most, beside the root. ``FREE`` tokens are all verified."""
        tokens = sum(min(len(each.tokens), most + 1) for each, most in zip(guesses, limits, strict=True))
        if tokens <= FREE:
            for guessed, most in zip(guesses, limits, strict=True):
                guessed.verified.update(range(1, min(len(guessed.tokens), most + 1)))
            return
        found: list[tuple[float, int, int]] = []
        best, kinds, chosen = len(guesses) / self._cost(len(guesses), 0, False), self._chances, None
        least = -best * (GUESS if self._reads else ELSEWHERE)
        for row, (slot, guessed) in enumerate(zip(slots, guesses, strict=True)):
            right, expected = self._own.get(slot, (0.0, 0.0))
            own = -min((right + 1) / (expected + 1), 1.5)
            chances, parents = [1.0], guessed.parents
            for node, kind in enumerate(guessed.kinds[1:], 1):
                chance = min(chances[parents[node]], kinds[kind])
                chances.append(chance)
                if own * chance < least:  # others take more time than they give
                    found.append((max(own * chance, -1.0), row, node))
            guessed.chances = chances
        found.sort()  # parents before children: of equal chances they have the smaller number
        for branched in (False, True) if any(guesses[row].later[node] for _, row, node in found) else (False,):
            rate, kept = self._most(found, guesses, limits, branched)
            if rate > best:
                best, chosen = rate, kept
        for row, node in chosen or ():
            guesses[row].verified.add(node)

    def _most(
        self, found: list[tuple[float, int, int]], guesses: Sequence[Guessed], limits: Sequence[int], branched: bool
    ) -> tuple[float, list[tuple[int, int]]]:
        """The most tokens of a step by what it costs, and its nodes: rows and numbers."""
        rows, left, kept = len(guesses), list(limits), [{0} for _ in guesses]
        nodes: list[tuple[int, int]] = []
        best, most, tokens = 0.0, 0, float(rows)
        for negative, row, node in found:
            guessed = guesses[row]
            if not left[row] or guessed.parents[node] not in kept[row] or (guessed.later[node] and not branched):
                continue
            left[row] -= 1
            kept[row].add(node)
            nodes.append((row, node))
            tokens -= negative
            rate = tokens / self._cost(rows, len(nodes), branched)
            if rate > best:
                best, most = rate, len(nodes)
        return best, nodes[:most]

    def _cost(self, rows: int, guesses: int, branched: bool) -> float:
        """What a step takes of what reading the weights does."""
        cost = LOOKED + LOOKED_ROW * rows
        if guesses:
            cost += START + START_ROW * rows
        if branched:
            cost += BRANCHED + BRANCHED_ROW * rows
        if not self._reads:
            return cost + 1 + ELSEWHERE * (rows + guesses)
        blocks = -(-(rows + guesses) // BLOCK)
        return cost + 1 + AGAIN * (blocks - 1) + DECODE * rows + GUESS * guesses
