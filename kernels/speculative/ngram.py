"""Drafts looked up among the n-grams that were seen (NGRAM): no draft model, no computation on the device.

The last tokens of a sequence are looked up from the longest window down; what followed each becomes the tree.
``BFS`` takes the followers level by level, the most recent first, fewer the longer the window and the deeper the level;
``PROB`` takes the paths that were seen most often for what stands above them. Names are SGLang's.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kernels.platforms.operators import Draws
from kernels.slots import SlotTable
from kernels.speculative.drafter import Drafter, DrafterContext, DraftRows, Drafts, Observation
from kernels.speculative.host_drafts import GuessesHere, HostDrafts, SeenHere
from kernels.speculative.native_trie import NativeSequence, NativeTrie, make_trie
from kernels.speculative.promises import Guessed, Promises
from kernels.speculative.settings import NgramSettings
from kernels.speculative.tree import DraftTree
from kernels.speculative.trie import Generation, NgramTrie, Sequence
from kernels.step import Admission

__all__ = ["NgramDrafter", "guess"]

CACHED = 1024
"""Tokens of a cached prefix that a new request tells the trie again: most were seen when they were computed; and of a
request's own that were run unseen."""
Ints: TypeAlias = npt.NDArray[np.int32]
Longs: TypeAlias = npt.NDArray[np.int64]


class NgramDrafter(Drafter):
    """Looks drafts up in one trie for all slots; nothing of it is on the device."""

    needs_host_tokens = True
    branches = True

    def __init__(self, context: DrafterContext) -> None:
        settings = context.settings
        self._settings = settings.ngram
        self._platform = context.platform
        self._trie: Any = make_trie(self._settings.capacity, self._settings.max_depth)
        self._sequences: dict[int, Sequence | NativeSequence] = {}  # by slot
        self._prompts: dict[int, Ints] = {}  # what was known of the slot when it was taken
        self._told: dict[int, int] = {}  # tokens of the slot that the trie knows, from position 0 on
        self._last: dict[int, int] = {}  # the last of these
        self._promises = Promises(reads=context.platform.verified_tokens > 0)
        self._guessed: dict[int, Guessed] = {}  # of the slot, behind the last of these when they were made
        self.most_nodes = settings.num_draft_tokens
        self.depth = min(self.most_nodes, self._settings.max_depth) - 1

    def admit(self, admission: Admission, tokens: Ints) -> None:
        slot, known = admission.slot, admission.computed + 1
        self.release(slot)
        self._sequences[slot] = self._trie.open(admission.salt)
        self._prompts[slot] = tokens
        self._told[slot] = max(0, known - CACHED)
        self.tell(slot, self._told[slot], tokens[self._told[slot] : known])

    def release(self, slot: int) -> None:
        sequence = self._sequences.pop(slot, None)
        self._prompts.pop(slot, None)
        self._guessed.pop(slot, None)
        self._promises.forget(slot)
        if sequence is not None:
            self._trie.close(sequence)

    def observe(self, seen: Observation) -> None:
        if seen.sampled is None:
            raise ValueError("n-grams are of tokens on the host, and an observation brought none")
        ends = (seen.starts + seen.counts + 1).tolist()
        for slot, start, end, sampled in zip(
            seen.slots.tolist(), seen.starts.tolist(), ends, seen.sampled, strict=True
        ):
            begin = max(self.told(slot, start), start - CACHED)  # what was run unseen of a prompt is here all the same
            self.tell(slot, begin, self._prompts[slot][begin:end])
            self.tell(slot, end - len(sampled), sampled)

    def draft(self, rows: DraftRows) -> Drafts:
        found = self.guesses(rows.slots, rows.roots, rows.limits)
        nodes = found.tokens.shape[1]
        chain = np.arange(nodes) - 1
        put = self._platform.put
        if found.parents is None or found.depths is None or found.bits is None:
            depths, shape = chain + 1, found.tokens.shape
            bits = (np.int64(2) << depths) - 1
            both = [put(np.broadcast_to(values, shape).copy()) for values in (chain, depths, bits)]
            return Drafts(DraftTree(put(found.tokens), *both, True), found.counts)
        tree = DraftTree(put(found.tokens), put(found.parents), put(found.depths), put(found.bits), False)
        return Drafts(tree, found.counts)

    def guesses(self, slots: Longs, roots: Longs, limits: Longs) -> GuessesHere:
        """Trees of each slot's next tokens, of at most ``limits`` nodes beside the root."""
        found = []
        names = slots.tolist()
        for slot, root in zip(names, roots.tolist(), strict=True):
            before = self._guessed.pop(slot, None)
            if before is not None:
                self._promises.judge(slot, before)
            # A row that is not finite is not observed, and runs on until that is known: there is nothing to guess.
            nodes = self.most_nodes if self._told[slot] == root + 1 else 1
            guessed = guess(self._trie, self._sequences[slot], self._last[slot], nodes, self._settings)
            found.append(guessed)
            self._guessed[slot] = guessed
        self._promises.choose(names, found, limits.tolist())
        trees = [guessed.pruned() for guessed in found]
        counts = np.array([len(tokens) for tokens, _ in trees], dtype=np.int64)
        width = int(counts.max(initial=1))
        chain = list(range(-1, width - 1))
        tokens = np.array([part + [0] * (width - len(part)) for part, _ in trees], dtype=np.int64).reshape(-1, width)
        if all(parents == chain[: len(parents)] for _, parents in trees):
            return GuessesHere(tokens, counts)
        above = [parents + chain[len(parents) :] for _, parents in trees]  # nodes that are not run: as in a chain
        depths, bits = [], []
        for parents in above:
            deep, seen = [0], [1]
            for node, parent in enumerate(parents[1:], 1):
                deep.append(deep[parent] + 1)
                seen.append(seen[parent] | 1 << node)
            depths.append(deep)
            bits.append([mask - (mask >> 63 << 64) for mask in seen])  # 64 bits, the highest the sign
        both = (np.array(values, dtype=np.int64) for values in (above, depths, bits))
        return GuessesHere(tokens, counts, *both)

    def host_drafts(self, state: SlotTable, rows: int) -> HostDrafts | None:
        return HostNgrams(self, state)

    def told(self, slot: int, most: int) -> int:
        """Tokens of the slot that the trie knows from position 0 on, ``most`` at most."""
        return min(self._told[slot], most)

    def tell(self, slot: int, start: int, tokens: Ints) -> None:
        """The slot's ``tokens`` from position ``start`` on; those known are passed over, and so is what lies before
        them and was not kept for this."""
        new = tokens[max(0, self._told[slot] - start) :].tolist()
        if new:
            if start > self._told[slot]:
                self._sequences[slot].interrupt()
                self._guessed.pop(slot, None)  # what came behind it is not known
                self._told[slot] = start
            self._trie.extend(self._sequences[slot], new)
            if slot in self._guessed:
                self._guessed[slot].follow(new)
            self._told[slot] += len(new)
            self._last[slot] = new[-1]


class HostNgrams(HostDrafts):
    """The same where all tokens are the host's anyway."""

    def __init__(self, drafter: NgramDrafter, state: SlotTable) -> None:
        self._drafter, self._state = drafter, state

    def observe(self, seen: SeenHere) -> bool:
        here = self._state.here
        assert here is not None
        for slot, start, count in zip(seen.slots.tolist(), seen.starts.tolist(), seen.counts.tolist(), strict=True):
            begin = max(self._drafter.told(slot, start), start - CACHED)  # what was run unseen is here all the same
            self._drafter.tell(slot, begin, here[slot, begin : start + count + 1])
        return True

    def draft(
        self, slots: Longs, roots: Longs, capacity: Longs, limits: Longs, steps: int, draws: Draws | None
    ) -> GuessesHere | None:
        here, found = self._state.here, self._drafter.guesses(slots, roots, limits)
        assert here is not None
        found.tokens[:, 0] = here[slots, roots]  # of a row that was not shown the last token is not known there
        return found


def guess(
    trie: NgramTrie | NativeTrie, sequence: Sequence | NativeSequence, last: int, nodes: int, settings: NgramSettings
) -> Guessed:
    """A tree of at most ``nodes`` nodes below ``last``, the sequence's last token. Only the root when nothing is known.

    Nodes of longer windows come first, so that the first n nodes are the best tree of n nodes.
    """
    if isinstance(trie, NativeTrie):
        assert isinstance(sequence, NativeSequence)
        return Guessed(*trie.guess(sequence, last, nodes, settings))
    assert isinstance(sequence, Sequence)
    tree = _Tree(last, nodes)
    longest = min(settings.max_window, trie.depth - 1)
    for length, generation, node in trie.matches(sequence, settings.min_window, longest):
        tree.window = length
        if settings.match_type == "PROB":
            _likeliest(tree, generation, node, settings.max_breadth)
        else:
            _breadth_first(tree, generation, node, _breadth(settings, longest, length), settings.min_breadth)
        if tree.full:
            break
    return Guessed(tree.tokens, tree.parents, tree.windows)


class _Tree:
    """``place`` finds the node of a token below a parent and adds it where there is none."""

    def __init__(self, root: int, most: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.windows = [0]
        self.window = 0  # of nodes that are added
        self._most = most
        self._places: dict[tuple[int, int], int] = {}

    @property
    def full(self) -> bool:
        return len(self.tokens) >= self._most

    def place(self, parent: int, token: int) -> int:
        """The node's number; -1 when it is new and the tree is full."""
        key = (parent, token)
        place = self._places.get(key)
        if place is None:
            place = len(self.tokens)
            if place >= self._most:
                return -1
            self._places[key] = place
            self.tokens.append(token)
            self.parents.append(parent)
            self.windows.append(self.window)
        return place


def _breadth(settings: NgramSettings, longest: int, length: int) -> int:
    """Followers of a window's last token: the longest window takes the fewest, being the surest."""
    span = longest - settings.min_window + 1
    return settings.min_breadth + (settings.max_breadth - settings.min_breadth) * (longest - length) // span


def _breadth_first(tree: _Tree, generation: Generation, node: int, breadth: int, least: int) -> None:
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
        breadth = max(least, breadth // 2)


def _likeliest(tree: _Tree, generation: Generation, node: int, widest: int) -> None:
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
