"""NGRAM: drafts from n-grams that were seen before, without a draft model or any work on the device.

The last tokens of a sequence are looked up, the longest window first; the tokens that followed become the tree. ``BFS``
takes followers level by level, the most recent first, and fewer for longer windows and deeper levels. ``PROB`` takes
the paths with the highest frequency. Names are SGLang's. Where a grammar forces the next tokens, these are the tree.

``NgramPruner`` drops nodes that do not pay for their verification. It estimates a draft token's chance from earlier
ones with the same depth, window length and rank among siblings (most recent or not), scaled for each request. It also
learns from draft tokens that were not verified, since the actual token is known a step later. It uses no clock, because
all ranks of a model must choose the same nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kernels.contract.speculation import NgramSettings
from kernels.contract.step import Admission
from kernels.core.operators import Draws
from kernels.core.tree import Drafts, DraftTree
from kernels.speculation.drafter import Drafter, DrafterContext, DraftRows, Observation
from kernels.speculation.drafters.trie import Generation, NativeSequence, NativeTrie, NgramTrie, TrieSequence, make_trie
from kernels.speculation.native_drafts import NativeDrafts, NativeObservation, NativeTrees
from kernels.state.slots import SlotTable

__all__ = ["NgramDrafter", "NgramPruner", "NgramTree", "draft_tree"]

MAX_WINDOW, MAX_DEPTH = 8, 16
"""Longer windows and deeper levels are treated like these."""
FIRST_CHANCES = (0.3, 0.5, 0.65, 0.75, 0.85, 0.9, 0.95, 0.95)
"""The prior chance of a first draft token, by window length. Each further level has ``LEVEL_FACTOR`` times the chance
of the one above."""
LEVEL_FACTOR = 0.93
SIBLING_FACTOR = 0.2
"""The factor of the prior for draft tokens with a more recent sibling."""
PRIOR_WEIGHT, MIN_LEARNING_RATE = 4, 0.01
"""The number of outcomes that the prior counts as; the least weight of a new outcome."""
REQUEST_DECAY = 0.9
"""The decay of a request's outcomes with each step."""

FREE_TOKENS = 16
"""Tokens up to which a step costs hardly more than a step of one."""
WEIGHT_READ_TOKENS, REREAD_COST = 32, 0.6
"""Tokens up to which a CPU reads each weight once; the cost of each further read as a share of the first."""
DECODE_COST, DRAFT_TOKEN_COST = 1 / 16, 0.05
"""The cost of a decode and of a draft token where weights are read once, as shares of that read, for small models."""
LOOKUP_COST, LOOKUP_ROW_COST = 0.25, 0.045
"""The cost of looking up draft tokens: for a step, and for each of its rows."""
VERIFY_COST, VERIFY_ROW_COST = 0.05, 0.01
"""The additional cost of a step that verifies draft tokens."""
TREE_COST, TREE_ROW_COST = 0.2, 0.025
"""The additional cost of a step with trees that branch."""
DEVICE_TOKEN_COST = 0.0125
"""The cost of a draft token on devices that are not bound by arithmetic."""


class NgramTree:
    """A tree of draft tokens after the last known token, which is node 0. ``windows``: the window length of each node's
    match; ``later``: whether a sibling of the node is more recent."""

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
            self.kinds.append(2 * (MAX_DEPTH * (min(window, MAX_WINDOW) - 1) + min(depth, MAX_DEPTH) - 1) + later)
        self.chances: list[float] = []  # of each node, not scaled for its request; empty if all are verified
        self.verified: set[int] = set()
        self.right: set[int] = set()
        self.at = self.known = (
            0  # (last accepted node, -1 after a rejected one; number of tokens that followed the tree)
        )

    def follow(self, tokens: Sequence[int]) -> None:
        """The sequence continued with these tokens."""
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

    def chain(self) -> NgramTree:
        """The chain of the most frequent next tokens, from the root."""
        path = [0]
        for node in range(1, len(self.tokens)):
            if self.parents[node] == path[-1]:
                path.append(node)
        return NgramTree(
            [self.tokens[node] for node in path], list(range(-1, len(path) - 1)), [self.windows[node] for node in path]
        )

    def pruned(self) -> tuple[list[int], list[int]]:
        """Tokens and parents of the nodes to verify."""
        if len(self.verified) == len(self.tokens) - 1:
            return self.tokens, self.parents
        kept = [0, *sorted(self.verified)]
        place = {node: number for number, node in enumerate(kept)}
        return [self.tokens[node] for node in kept], [place.get(self.parents[node], -1) for node in kept]


class NgramPruner:
    """Chooses the nodes of trees that are worth verifying. ``reads``: whether a step is bound by reading weights, once
    for each ``WEIGHT_READ_TOKENS`` of tokens."""

    def __init__(self, reads: bool) -> None:
        self._reads = reads
        self._chances = [
            first * LEVEL_FACTOR**depth * by
            for first in FIRST_CHANCES
            for depth in range(MAX_DEPTH)
            for by in (1, SIBLING_FACTOR)
        ]
        self._judged = [PRIOR_WEIGHT] * len(self._chances)
        # by slot: accepted draft tokens, and expected ones
        self._own: dict[int, tuple[float, float]] = {}

    def forget(self, slot: int) -> None:
        """Reset the slot for another request."""
        self._own.pop(slot, None)

    def record_outcomes(self, slot: int, tree: NgramTree) -> None:
        """Learn from the draft tokens of a tree when the tokens that followed it are known."""
        right = expected = 0.0
        for node in range(1, len(tree.tokens)):
            # A step reveals only the followers of accepted draft tokens.
            above = tree.parents[node]
            if not tree.known or not (above == 0 or above in tree.verified):
                continue
            kind = tree.kinds[node]
            self._judged[kind] += 1
            hit = node in tree.right
            self._chances[kind] += max(1 / self._judged[kind], MIN_LEARNING_RATE) * (hit - self._chances[kind])
            if tree.chances:
                right, expected = right + hit, expected + tree.chances[node]
        if not tree.chances:
            return
        before = self._own.get(slot, (0.0, 0.0))
        self._own[slot] = REQUEST_DECAY * before[0] + right, REQUEST_DECAY * before[1] + expected

    def choose(self, slots: Sequence[int], trees: Sequence[NgramTree], limits: Sequence[int]) -> None:
        """Mark the nodes to verify in one step: the most likely ones, in the number that maximizes the expected tokens
        a second. A tree has at most ``limits`` of them besides its root. Up to ``FREE_TOKENS`` tokens, all are
        verified."""
        tokens = sum(min(len(each.tokens), limit + 1) for each, limit in zip(trees, limits, strict=True))
        if tokens <= FREE_TOKENS:
            for tree, limit in zip(trees, limits, strict=True):
                tree.verified.update(range(1, min(len(tree.tokens), limit + 1)))
            return
        result: list[tuple[float, int, int]] = []
        best, kinds, chosen = len(trees) / self._cost(len(trees), 0, False), self._chances, None
        cost = -best * (DRAFT_TOKEN_COST if self._reads else DEVICE_TOKEN_COST)
        for row, (slot, tree) in enumerate(zip(slots, trees, strict=True)):
            right, expected = self._own.get(slot, (0.0, 0.0))
            own = -min((right + 1) / (expected + 1), 1.5)
            chances, parents = [1.0], tree.parents
            for node, kind in enumerate(tree.kinds[1:], 1):
                chance = min(chances[parents[node]], kinds[kind])
                chances.append(chance)
                if own * chance < cost:  # the rest costs more time than it saves
                    result.append((max(own * chance, -1.0), row, node))
            tree.chances = chances
        result.sort()  # parents before children: at equal chances they have smaller numbers
        for branched in (False, True) if any(trees[row].later[node] for _, row, node in result) else (False,):
            rate, kept = self._best_size(result, trees, limits, branched)
            if rate > best:
                best, chosen = rate, kept
        for row, node in chosen or ():
            trees[row].verified.add(node)

    def _best_size(
        self, found: list[tuple[float, int, int]], trees: Sequence[NgramTree], limits: Sequence[int], branched: bool
    ) -> tuple[float, list[tuple[int, int]]]:
        """The best ratio of a step's expected tokens to its cost, and its nodes: rows and numbers."""
        rows, left, kept = len(trees), list(limits), [{0} for _ in trees]
        nodes: list[tuple[int, int]] = []
        best, max_nodes, tokens = 0.0, 0, float(rows)
        for negative, row, node in found:
            tree = trees[row]
            if not left[row] or tree.parents[node] not in kept[row] or (tree.later[node] and not branched):
                continue
            left[row] -= 1
            kept[row].add(node)
            nodes.append((row, node))
            tokens -= negative
            rate = tokens / self._cost(rows, len(nodes), branched)
            if rate > best:
                best, max_nodes = rate, len(nodes)
        return best, nodes[:max_nodes]

    def _cost(self, rows: int, trees: int, branched: bool) -> float:
        """Time of a step in units of reading the weights once."""
        cost = LOOKUP_COST + LOOKUP_ROW_COST * rows
        if trees:
            cost += VERIFY_COST + VERIFY_ROW_COST * rows
        if branched:
            cost += TREE_COST + TREE_ROW_COST * rows
        if not self._reads:
            return cost + 1 + DEVICE_TOKEN_COST * (rows + trees)
        blocks = -(-(rows + trees) // WEIGHT_READ_TOKENS)
        return cost + 1 + REREAD_COST * (blocks - 1) + DECODE_COST * rows + DRAFT_TOKEN_COST * trees


MAX_ADDED_TOKENS = 1024
"""The most tokens of a cached prefix, and of tokens that ran unobserved, that a request adds to the trie. Most prefixes
were added when they were computed."""
Ints: TypeAlias = npt.NDArray[np.int32]
Longs: TypeAlias = npt.NDArray[np.int64]


class NgramDrafter(Drafter):
    """Looks up drafts in one trie for all slots, on the host."""

    needs_host_tokens = True

    def __init__(self, context: DrafterContext) -> None:
        settings = context.settings
        self._chains = context.chains
        one = {"min_breadth": 1, "max_breadth": 1} if self._chains else {}
        self._settings = msgspec.structs.replace(settings.ngram, **one)
        self._device = context.device
        self._trie: Any = make_trie(self._settings.capacity, self._settings.max_depth)
        self._sequences: dict[int, TrieSequence | NativeSequence] = {}  # by slot
        self._prompts: dict[int, Ints] = {}  # the slot's known tokens at its admission
        self._extended: dict[int, int] = {}  # number of tokens of the slot in the trie, from position 0 on
        self._last: dict[int, int] = {}  # the last of these
        self._pruner = NgramPruner(reads=context.device.traits.verify_budget > 0)
        self._trees: dict[int, NgramTree] = {}  # by slot: trees drafted after the last of these
        self.forced: Callable[[int, int], list[int]] = lambda slot, length: []
        """Tokens that a slot's grammar forces after so many tokens: see ``GrammarSlots.forced``."""
        self.max_nodes = settings.num_draft_tokens
        self.depth = min(self.max_nodes, self._settings.max_depth) - 1
        if self._chains:
            self.max_nodes = self.depth + 1

    def admit(self, admission: Admission, tokens: Ints) -> None:
        slot, known = admission.slot, admission.computed + 1
        self.release(slot)
        self._sequences[slot] = self._trie.open(admission.salt)
        if admission.sampling.prediction:  # as if another request had generated it
            predicted = self._trie.open(admission.salt)
            self._trie.extend(predicted, np.frombuffer(admission.sampling.prediction, dtype=np.int32).tolist())
            self._trie.close(predicted)
        self._prompts[slot] = tokens
        self._extended[slot] = max(0, known - MAX_ADDED_TOKENS)
        self.extend(slot, self._extended[slot], tokens[self._extended[slot] : known])

    def release(self, slot: int) -> None:
        sequence = self._sequences.pop(slot, None)
        self._prompts.pop(slot, None)
        self._trees.pop(slot, None)
        self._pruner.forget(slot)
        if sequence is not None:
            self._trie.close(sequence)

    def observe(self, observation: Observation) -> None:
        if observation.sampled is None:
            raise ValueError("n-gram drafts need tokens on the host, but the observation has none")
        ends = (observation.starts + observation.counts + 1).tolist()
        for slot, start, end, sampled in zip(
            observation.slots.tolist(), observation.starts.tolist(), ends, observation.sampled, strict=True
        ):
            # Prompt tokens that ran unobserved are added here.
            begin = max(self.extended(slot, start), start - MAX_ADDED_TOKENS)
            self.extend(slot, begin, self._prompts[slot][begin:end])
            self.extend(slot, end - len(sampled), sampled)

    def draft(self, rows: DraftRows) -> Drafts:
        result = self.draft_trees(rows.slots, rows.roots, rows.limits)
        nodes = result.tokens.shape[1]
        chain = np.arange(nodes) - 1
        put = self._device.memory.put
        if result.parents is None or result.depths is None or result.bits is None:
            depths, shape = chain + 1, result.tokens.shape
            bits = (np.int64(2) << depths) - 1
            parents, below, seen = (put(np.broadcast_to(values, shape).copy()) for values in (chain, depths, bits))
            return Drafts(DraftTree(put(result.tokens), parents, below, seen, True), result.counts)
        tree = DraftTree(put(result.tokens), put(result.parents), put(result.depths), put(result.bits), False)
        return Drafts(tree, result.counts)

    def draft_trees(self, slots: Longs, roots: Longs, limits: Longs) -> NativeTrees:
        """A tree of each slot's next tokens, with at most ``limits`` nodes besides the root."""
        result = []
        names = slots.tolist()
        for slot, root in zip(names, roots.tolist(), strict=True):
            before = self._trees.pop(slot, None)
            if before is not None:
                self._pruner.record_outcomes(slot, before)
            # A row with NaN logits is not observed, but runs until the host knows: do not draft for it.
            nodes = self.max_nodes if self._extended[slot] == root + 1 else 1
            forced = self.forced(slot, root + 1)[: min(nodes, self.depth + 1) - 1]
            if forced:  # nothing is learned from them
                nodes = len(forced) + 1
                result.append(
                    NgramTree([self._last[slot], *forced], list(range(-1, nodes - 1)), [0] + [MAX_WINDOW] * len(forced))
                )
                continue
            tree = draft_tree(self._trie, self._sequences[slot], self._last[slot], nodes, self._settings)
            if self._chains:
                tree = tree.chain()
            result.append(tree)
            self._trees[slot] = tree
        self._pruner.choose(names, result, limits.tolist())
        trees = [tree.pruned() for tree in result]
        counts = np.array([len(tokens) for tokens, _ in trees], dtype=np.int64)
        width = int(counts.max(initial=1))
        chain = list(range(-1, width - 1))
        tokens = np.array([part + [0] * (width - len(part)) for part, _ in trees], dtype=np.int64).reshape(-1, width)
        if all(parents == chain[: len(parents)] for _, parents in trees):
            return NativeTrees(tokens, counts)
        above = [parents + chain[len(parents) :] for _, parents in trees]  # nodes that do not run: as in a chain
        depths, bits = [], []
        for parents in above:
            deep, seen = [0], [1]
            for node, parent in enumerate(parents[1:], 1):
                deep.append(deep[parent] + 1)
                seen.append(seen[parent] | 1 << node)
            depths.append(deep)
            bits.append([mask - (mask >> 63 << 64) for mask in seen])  # 64 bits, the highest the sign
        both = (np.array(values, dtype=np.int64) for values in (above, depths, bits))
        return NativeTrees(tokens, counts, *both)

    @property
    def branches(self) -> bool:
        """As ``Drafter``'s. A chain may be as deep as a tree."""
        return not self._chains

    def native_drafts(self, state: SlotTable, rows: int) -> NativeDrafts | None:
        return NativeNgrams(self, state)

    def extended(self, slot: int, max_nodes: int) -> int:
        """Number of the slot's tokens in the trie from position 0 on, at most ``max_nodes``."""
        return min(self._extended[slot], max_nodes)

    def extend(self, slot: int, start: int, tokens: Ints) -> None:
        """Add the slot's ``tokens`` from position ``start`` on. Known tokens are skipped, and so is a gap before
        them."""
        new = tokens[max(0, self._extended[slot] - start) :].tolist()
        if new:
            if start > self._extended[slot]:
                self._sequences[slot].interrupt()
                self._trees.pop(slot, None)  # its followers are unknown
                self._extended[slot] = start
            self._trie.extend(self._sequences[slot], new)
            if slot in self._trees:
                self._trees[slot].follow(new)
            self._extended[slot] += len(new)
            self._last[slot] = new[-1]


class NativeNgrams(NativeDrafts):
    """N-gram drafts on the CPU, where all tokens are on the host anyway."""

    def __init__(self, drafter: NgramDrafter, state: SlotTable) -> None:
        self._drafter, self._state = drafter, state

    def observe(self, observation: NativeObservation) -> bool:
        here = self._state.here
        assert here is not None
        for slot, start, count in zip(
            observation.slots.tolist(), observation.starts.tolist(), observation.counts.tolist(), strict=True
        ):
            begin = max(
                self._drafter.extended(slot, start), start - MAX_ADDED_TOKENS
            )  # tokens that ran unobserved are added here
            self._drafter.extend(slot, begin, here[slot, begin : start + count + 1])
        return True

    def draft(
        self, slots: Longs, roots: Longs, capacity: Longs, limits: Longs, steps: int, draws: Draws | None
    ) -> NativeTrees | None:
        here, result = self._state.here, self._drafter.draft_trees(slots, roots, limits)
        assert here is not None
        result.tokens[:, 0] = here[slots, roots]  # rows that did not observe their last token lack it there
        return result


def draft_tree(
    trie: NgramTrie | NativeTrie,
    sequence: TrieSequence | NativeSequence,
    last: int,
    nodes: int,
    settings: NgramSettings,
) -> NgramTree:
    """A tree of at most ``nodes`` nodes below ``last``, the sequence's last token. Only the root when nothing is known.

    Nodes of longer windows come first, so that the first n nodes are the best tree of n nodes.
    """
    if isinstance(trie, NativeTrie):
        assert isinstance(sequence, NativeSequence)
        return NgramTree(*trie.draft_tree(sequence, last, nodes, settings))
    assert isinstance(sequence, TrieSequence)
    tree = _Tree(last, nodes)
    longest = min(settings.max_window, trie.depth - 1)
    for length, generation, node in trie.matches(sequence, settings.min_window, longest):
        tree.window = length
        if settings.match_type == "PROB":
            _add_most_frequent(tree, generation, node, settings.max_breadth)
        else:
            _breadth_first(tree, generation, node, _breadth(settings, longest, length), settings.min_breadth)
        if tree.full:
            break
    return NgramTree(tree.tokens, tree.parents, tree.windows)


class _Tree:
    """A tree under construction. ``place`` finds the node of a token below a parent, or adds it."""

    def __init__(self, root: int, max_nodes: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.windows = [0]
        self.window = 0  # of nodes to add
        self._max_nodes = max_nodes
        self._places: dict[tuple[int, int], int] = {}

    @property
    def full(self) -> bool:
        return len(self.tokens) >= self._max_nodes

    def place(self, parent: int, token: int) -> int:
        """The node's number; -1 when it is new and the tree is full."""
        key = (parent, token)
        place = self._places.get(key)
        if place is None:
            place = len(self.tokens)
            if place >= self._max_nodes:
                return -1
            self._places[key] = place
            self.tokens.append(token)
            self.parents.append(parent)
            self.windows.append(self.window)
        return place


def _breadth(settings: NgramSettings, longest: int, length: int) -> int:
    """The number of followers of a window's last token: the longest window is the most certain and takes the fewest."""
    span = longest - settings.min_window + 1
    return settings.min_breadth + (settings.max_breadth - settings.min_breadth) * (longest - length) // span


def _breadth_first(tree: _Tree, generation: Generation, node: int, breadth: int, min_breadth: int) -> None:
    level = [(0, node)]
    token = generation.token
    while level:
        below = []
        for parent, seen in level:
            for child in generation.children(seen, breadth):
                place = tree.place(parent, token[child])
                if place < 0:
                    return
                below.append((place, child))
        level = below
        breadth = max(min_breadth, breadth // 2)


def _add_most_frequent(tree: _Tree, generation: Generation, node: int, widest: int) -> None:
    token, count = generation.token, generation.count
    waiting: list[tuple[float, int, int, int]] = []  # minus the path's probability, order, parent's place, node
    order = 0

    def expand(place: int, seen: int, probability: float) -> None:
        nonlocal order
        children = generation.children(seen, widest)
        total = sum(count[child] for child in children)
        for child in children:
            order += 1
            heappush(waiting, (-probability * count[child] / total, order, place, child))

    expand(0, node, 1.0)
    while waiting:
        negative, _, parent, child = heappop(waiting)
        place = tree.place(parent, token[child])
        if place < 0:
            return
        expand(place, child, -negative)
