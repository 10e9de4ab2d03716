"""The state of each slot's grammar, and the masks of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.contract.grammar import GrammarError, GrammarSettings
from kernels.contract.step import Admission, SlotSampling
from kernels.core.arrays import Longs
from kernels.devices.cpu.host import usable_cores
from kernels.devices.memory import DeviceMemory, PendingCopies
from kernels.grammar.backend import Bits, Compiled, Matcher
from kernels.grammar.compiler import GrammarCompiler
from kernels.sampling.masks import RowMasks

__all__ = ["NO_MASKS", "GrammarSlots", "StepMasks", "TextTree", "bit"]

KeptBits = Callable[[Longs], npt.NDArray[np.bool_]]

_BITS: Bits = (1 << np.arange(32, dtype=np.int64)).astype(np.uint32).view(np.int32)
_ALL = -1  # a word of bits: every token is allowed

_COMPILE_SECONDS = 10.0
"""A step waits only for a grammar that this compiler has forgotten since it was compiled; others are held."""

_TEXT_SECONDS, _TOKEN_SECONDS = 1.0, 0.005
"""Processor time that one text may take, while others wait, and how much more for each of its tokens. Not every library
has a limit of its own."""

_FREE_SECONDS = 0.001
"""Seconds that a text may take in a step without being charged for them."""


_THREADS = 8
_FEW = 4
"""Texts that one thread follows and masks in less time than it takes to start another."""


class TextTree(NamedTuple):
    """A draft tree of one row: its nodes' ``tokens`` and ``parents``, the root first, whose parent is -1."""

    tokens: list[int]
    parents: list[int]


@dataclass(frozen=True)
class StepMasks:
    """``masks``: of the rows with a grammar; None where there are none. ``errors``: by slot, why its grammar cannot go
    on."""

    masks: RowMasks | None = None
    errors: dict[int, str] = field(default_factory=dict)


NO_MASKS = StepMasks()


class GrammarSlots:
    """The texts with a grammar that one runner generates, by slot.

    A text follows the tokens of its slot: the scheduler plans a step before it knows what the step before samples, so
    only the runner can. Tokens that came with the admission, from before a restart, count too.

    ``table``: the tokens by slot, int32 [slots, tokens], where the device is the host. Elsewhere sampled tokens arrive
    with a copy (``sampled``), for which ``masks`` of the next step waits, while the device runs that step's pass. Then
    several threads share the texts of a step: the processors have nothing else to do, and libraries release the
    interpreter's lock.
    """

    def __init__(
        self,
        settings: GrammarSettings,
        vocab_size: int,
        memory: DeviceMemory,
        table: npt.NDArray[np.int32] | None,
    ) -> None:
        self.compiler = GrammarCompiler(settings, vocab_size)
        self._eos = frozenset(settings.eos_ids)
        self._memory, self._table = memory, table
        self._texts: dict[int, _Text] = {}
        self._errors: dict[int, str] = {}
        self._arriving: list[tuple[PendingCopies, KeptBits | None, list[tuple[int, _Text]]]] = []
        threads = 1 if table is not None else min(_THREADS, usable_cores())
        self._pool = ThreadPoolExecutor(threads - 1, "grammar-masks") if threads > 1 else None
        self._threads = threads
        self.words = -(-vocab_size // 32)
        self._thought: Bits = np.full(self.words, _ALL, dtype=np.int32)
        for token in self._eos:
            self._thought[token // 32] &= ~bit(token)

    def close(self) -> None:
        """End the threads."""
        self.compiler.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def __bool__(self) -> bool:
        """Whether a slot has a text with a grammar."""
        return bool(self._texts)

    def admit(self, admission: Admission) -> None:
        """A request has taken a slot. Raises GrammarError for a grammar that is known to be wrong."""
        sampling = admission.sampling
        if sampling.grammar is None:
            return
        compiled = self.compiler.compile(sampling.grammar)
        if compiled.done():
            compiled.result()
        output = np.frombuffer(admission.tokens, dtype=np.int32)[admission.prompt_length :].tolist()
        text = _Text(compiled, sampling, self._eos, admission.prompt_length, len(self._thought))
        if self._table is None:
            text.arrived = output
        self._errors.pop(admission.slot, None)
        self._texts[admission.slot] = text

    def release(self, slot: int) -> None:
        """Forget the slot's text."""
        self._texts.pop(slot, None)
        self._errors.pop(slot, None)

    def masks(
        self, slots: Sequence[int], lengths: Sequence[int], trees: Mapping[int, TextTree] | None = None
    ) -> StepMasks:
        """What each row may sample after the first ``lengths`` tokens of its slot. Call it when the pass runs.

        ``trees``: by row, a draft tree whose root is the last of these tokens. As many rows of the same slot follow as
        the tree has other nodes: what they may sample after them. Their ``lengths`` are not read.
        """
        if not self._texts:
            self._arriving.clear()
            return NO_MASKS
        rows = [row for row, slot in enumerate(slots) if slot in self._texts]
        if not rows:
            return NO_MASKS
        self._take_arrived()
        bits = np.empty((len(rows), len(self._thought)), dtype=np.int32)
        texts = [self._texts[slots[row]] for row in rows]
        work: list[_Work] = []
        end = 0
        for place, (text, row) in enumerate(zip(texts, rows, strict=True)):
            if place < end:
                continue  # a node of the tree before it
            tree = None if trees is None else trees.get(row)
            end = place + (1 if tree is None else len(tree.tokens))
            work.append((text, slots[row], lengths[row], bits[place:end], tree))
        self._fill_all(work)
        if not bits.any(axis=1).all():
            for _, slot, _, own, _ in work:
                if not own[0].any():
                    self.fail(slot, "no token may follow")
                    own[:] = _ALL
        return StepMasks(RowMasks(np.array(rows, dtype=np.int64), bits, self._memory.put), self.errors(slots))

    def accept(self, slots: Sequence[int], lengths: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Advance by a token of each slot, sampled without a mask after its first ``lengths`` tokens; slots without a
        text accept everything. Returns the indices whose grammar does not allow the token: their state is unchanged.
        Only where the device is the host. ``errors`` says which grammars cannot go on."""
        refused: list[int] = []
        begun, started = time.thread_time(), time.perf_counter()
        for row, slot in enumerate(slots):
            text = self._texts.get(slot)
            if text is None or text.error:
                continue
            try:
                if text.position < lengths[row]:
                    text.follow(self._tokens(text, slot, lengths[row]))
                if not text.accept(tokens[row]):
                    refused.append(row)
                started = text.charge(started, begun)
            except Exception as error:  # of one text: others go on
                self.fail(slot, error)
                started = time.perf_counter()
        return refused

    def certain(self, slots: Sequence[int], lengths: Sequence[int]) -> dict[int, int]:
        """By index, the only token that a slot's grammar allows after its first ``lengths`` tokens, where that is known
        already."""
        result = {}
        for at, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            text = self._texts.get(slot)
            if text is not None and not text.error and (token := text.certain(length)) >= 0:
                result[at] = token
        return result

    def fail(self, slot: int, reason: object) -> None:
        """The text of this slot cannot go on."""
        text = self._texts[slot]
        self._errors[slot] = text.error = f"the grammar cannot go on: {reason}"

    def forced(self, slot: int, length: int) -> list[int]:
        """``Matcher.forced`` after the first ``length`` tokens of a slot; empty where it has no grammar, or where these
        tokens are not all known."""
        text = self._texts.get(slot)
        if text is None or text.error:
            return []
        self._take_arrived()
        begun, started = time.thread_time(), time.perf_counter()
        try:
            if text.position < length:
                text.follow(self._tokens(text, slot, length))
            result = text.forced() if text.position == length else []
            text.charge(started, begun)
        except Exception as error:  # of one text: others go on
            self.fail(slot, error)
            return []
        return result

    def errors(self, slots: Sequence[int]) -> dict[int, str]:
        """By slot, why its grammar cannot go on."""
        return {slot: self._errors[slot] for slot in slots if slot in self._errors} if self._errors else {}

    def sampled(
        self, slots: Sequence[int], tokens: Tensor, outcome: Tensor | None = None, kept: KeptBits | None = None
    ) -> None:
        """``tokens`` int64 [rows] follow in these slots. ``kept``: of draft tokens, which of them, by the ``outcome``
        of the verification."""
        if self._table is not None or not self._texts:
            return
        texts = [(row, self._texts[slot]) for row, slot in enumerate(slots) if slot in self._texts]
        if texts:
            result = [tokens] if outcome is None else [tokens, outcome]
            self._arriving.append((self._memory.fetch(result), kept, texts))

    def _fill_all(self, work: list[_Work]) -> None:
        parts = min(self._threads, len(work) // _FEW)
        if self._pool is None or parts < 2:
            self._fill(work)
            return
        others = [self._pool.submit(self._fill, work[part::parts]) for part in range(1, parts)]
        self._fill(work[::parts])
        for other in others:
            other.result()

    def _fill(self, work: list[_Work]) -> None:
        """Follow texts and fill their masks. An error is the text's own; others go on."""
        begun = time.thread_time()  # before the first text: to read it takes a call of the system
        started = time.perf_counter()
        for text, slot, length, rows, tree in work:
            if not text.error:
                try:
                    text.follow(self._tokens(text, slot, length))
                    text.fill(rows[0], self._thought)
                    if tree is not None:
                        text.fill_tree(tree, rows, self._thought)
                    started = text.charge(started, begun)
                except Exception as error:
                    self.fail(slot, error)
                    started = time.perf_counter()
            if text.error:
                rows[:] = _ALL

    def _take_arrived(self) -> None:
        for fetched, kept, texts in self._arriving:
            result = fetched()
            tokens, some = result[0].tolist(), None if kept is None else kept(result[1].numpy())
            for row, text in texts:
                if some is None or some[row]:
                    text.arrived.append(tokens[row])
        self._arriving.clear()

    def _tokens(self, text: _Text, slot: int, length: int) -> list[int]:
        if self._table is not None:
            result: list[int] = self._table[slot, text.position : length].tolist() if text.position < length else []
            return result
        arrived, text.arrived = text.arrived, []
        return arrived


_Work = tuple["_Text", int, int, Bits, TextTree | None]
"""A text, its slot, the tokens before its mask, and the masks of the text and of its tree's other nodes."""


def bit(token: int) -> Any:
    """Of a mask's word."""
    return _BITS[token % 32]


class _Text:
    """One text. ``position``: in the slot's tokens, of the next one to follow. ``words``: of a mask."""

    def __init__(
        self, compiled: Future[Compiled], sampling: SlotSampling, eos: frozenset[int], position: int, words: int
    ) -> None:
        self._compiled, self._after, self._eos = compiled, sampling.reasoning_end_ids, eos
        self._opens, self._words = sampling.reasoning_start_id, words
        self._matcher: Matcher | None = None
        self._tail: tuple[int, ...] = ()
        self._ended = False
        self._consumed = 0  # tokens that the matcher has taken
        self.error = ""  # why it cannot go on
        self._spent = 0.0  # processor time
        self._begin = self.position = position
        self.arrived: list[int] = []

    def charge(self, started: float, begun: float) -> float:
        """Count the time since ``started``, at most the thread's own since ``begun``. Returns the time now. Raises
        GrammarError where the text has taken too much."""
        now = time.perf_counter()
        if now - started > _FREE_SECONDS:
            self._spent += min(now - started, time.thread_time() - begun)
            if self._spent > _TEXT_SECONDS + _TOKEN_SECONDS * (self.position - self._begin):
                raise GrammarError("it takes too long to follow; simplify it")
        return now

    def follow(self, tokens: list[int]) -> None:
        """Raises GrammarError for a token that the grammar does not allow."""
        for token in tokens:
            if not self._step(token, True):
                raise GrammarError(f"token {token} does not match it")

    def accept(self, token: int) -> bool:
        """Advance by a token. False: the grammar does not allow it; the state is unchanged."""
        return self._step(token, False)

    def certain(self, length: int) -> int:
        """The only token that the grammar allows after ``length`` tokens, where that is known; else -1."""
        matcher = self._matcher
        if matcher is None or self.position != length or self._after or self._ended or self._opens >= 0:
            return -1
        tokens = matcher.certain()
        return tokens[0] if tokens and tokens[0] not in self._eos else -1

    def _step(self, token: int, sure: bool) -> bool:
        """``sure``: the token was sampled with a mask. If it is wrong all the same, the state is of no further use."""
        opens, after = self._opens, self._after
        if not after and not self._ended and token not in self._eos:  # nearly always
            matcher = self._matcher or self._started()
            allowed = matcher.follow(token) if sure else matcher.accept(token)
            self.position += allowed
            self._consumed += allowed
            return allowed
        if self._ended or token == opens:  # ended: of steps that were sent before the end was known
            allowed = True
        elif after and opens < 0:
            allowed = sure or token not in self._eos
        elif token in self._eos:
            self._ended = allowed = sure or self._may_end(token)
        else:  # no thought
            allowed = self._started().follow(token) if sure else self._started().accept(token)
            self._consumed += allowed
            self._after = () if allowed else after
        if not allowed:
            return False
        self._opens, self.position = -1, self.position + 1
        if self._after:
            self._tail = (*self._tail, token)[-len(after) :]
            if self._tail == after:
                self._after = ()
        return True

    def _may_end(self, token: int) -> bool:
        row = np.zeros(self._words, dtype=np.int32)
        self._started().fill(row)
        return bool(row[token // 32] & bit(token))

    def fill(self, row: Bits, thought: Bits) -> None:
        """Write the allowed tokens. ``thought``: those of a text before its grammar."""
        if self._ended:
            row[:] = _ALL
        elif self._opens >= 0:
            self._started().fill(row)
            row[self._opens // 32] |= bit(self._opens)
        elif self._after:
            row[:] = thought
        else:
            self._started().fill(row)

    def forced(self) -> list[int]:
        free = self._ended or self._opens >= 0 or self._after
        return [] if free else [token for token in self._started().forced() if token not in self._eos]

    def fill_tree(self, tree: TextTree, rows: Bits, thought: Bits) -> None:
        """Write the tokens that are allowed after each node but the root, whose text this is, into its row. Everything
        is allowed after nodes that are not: they cannot be accepted."""
        path: list[tuple[int, tuple[Any, ...]]] = []  # nodes that the text has taken, and its state before each
        taken = {0}
        try:
            for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
                if not node:
                    continue
                possible = parent in taken and bool(rows[parent][token // 32] & bit(token))
                if possible and self._take(tree, node, path):
                    taken.add(node)
                    self.fill(rows[node], thought)
                else:
                    rows[node] = _ALL
        finally:
            if path:
                self._return(path[0][1])

    def _take(self, tree: TextTree, node: int, path: list[tuple[int, tuple[Any, ...]]]) -> bool:
        """Go to a node whose ancestors can be taken. Returns whether it can be, too."""
        way, known = [node], {each for each, _ in path}
        while (parent := tree.parents[way[-1]]) > 0 and parent not in known:
            way.append(parent)
        while path and path[-1][0] != parent:
            self._return(path.pop()[1])
        for each in reversed(way):
            state = self._opens, self._after, self._tail, self._ended, self.position, self._consumed
            if not self.accept(tree.tokens[each]):
                return False
            path.append((each, state))
        return True

    def _return(self, state: tuple[Any, ...]) -> None:
        """Take tokens back, to an earlier ``state``."""
        taken = self._consumed
        self._opens, self._after, self._tail, self._ended, self.position, self._consumed = state
        if taken > self._consumed:
            self._started().rollback(taken - self._consumed)

    def _started(self) -> Matcher:
        if self._matcher is None:
            try:
                self._matcher = self._compiled.result(_COMPILE_SECONDS)()
            except TimeoutError:
                raise GrammarError(f"it takes more than {_COMPILE_SECONDS:g} s to compile") from None
        return self._matcher
