"""A runner without a model, for tests and benchmarks. It executes steps by the contract of ``kernels.contract.step``.

It simulates the cache cell by cell: each token slot of a page stores a digest of the prefix written there. A wrong page
table, a stale slot, a page with two writers or a page read before it was computed raises :class:`ContractBroken`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator

import numpy as np

from actors.caching import PrefixCache
from actors.protocol import CacheUpdate, OpenSequence
from actors.scheduling.planner import CacheMessage, CacheReply, StepPlan
from kernels.contract.caches import GroupPages, State
from kernels.contract.info import ModelInfo
from kernels.contract.step import Admission, RowError, StepBatch, StepResult, StepTiming
from kernels.contract.tasks import Embed

__all__ = ["ContractBroken", "SimulatedRunner", "drive", "model_info", "next_token", "pooled_vector"]


class ContractBroken(AssertionError):
    """A step breaks the contract of ``kernels.contract.step``."""


def model_info(
    *,
    num_pages: int,
    page_size: int,
    context_length: int = 4096,
    vocab_size: int = 32000,
    speculative_nodes: int = 1,
    speculative_depth: int = 0,
    speculative_tokens: int = 0,
    speculative_decode_only: bool = False,
    cache_groups: tuple[GroupPages, ...] = (),
) -> ModelInfo:
    """The ``ModelInfo`` of a runner with these sizes and defaults for the rest."""
    return ModelInfo(
        architecture="simulated",
        dtype="float32",
        device="none",
        vocab_size=vocab_size,
        context_length=context_length,
        layers=0,
        parameters=0,
        weight_bytes=0,
        num_pages=num_pages,
        page_size=page_size,
        cache_bytes=0,
        load_seconds={},
        speculative_nodes=speculative_nodes,
        speculative_depth=speculative_depth,
        speculative_tokens=speculative_tokens,
        speculative_decode_only=speculative_decode_only,
        cache_groups=cache_groups,
        speculative_levels=tuple(
            [-(-(speculative_nodes - 1) * level // max(1, speculative_depth)) for level in range(speculative_depth + 1)]
        ),
    )


def next_token(tokens: list[int], vocab_size: int) -> int:
    """The model: a pure function of the whole sequence."""
    return int.from_bytes(_digest(tokens)[:4], "little") % vocab_size


def pooled_vector(tokens: list[int]) -> bytes:
    """The pooled vector of a text: float32 [2]."""
    return np.array([len(tokens), tokens[-1]], dtype=np.float32).tobytes()


def _digest(tokens: list[int]) -> bytes:
    return hashlib.blake2b(np.array(tokens, dtype=np.int32).tobytes(), digest_size=12).digest()


class _Slot:
    def __init__(self, admission: Admission) -> None:
        self.generation = admission.generation
        self.tokens = _ints(admission.tokens)
        self.prompt_length = admission.prompt_length
        self.computed = admission.computed
        self.pages = _ints(admission.pages)
        self.bounded = [dict(enumerate(_ints(run.pages), run.first)) for run in admission.bounded]  # by column
        self.sampling = admission.sampling
        self.task = admission.task
        self.sampled = False


class SimulatedRunner:
    """Runs steps. ``fails(tokens)`` returns an error message to fail a row, or None. In those that begin
    with "invalid" the request is at fault.

    ``accepts(limit)`` returns how many of at most ``limit`` draft tokens a row accepts. ``seconds(nodes, levels)`` is
    the time of a step that verified ``nodes`` draft tokens, at most ``levels`` deep.
    """

    def __init__(
        self,
        info: ModelInfo,
        *,
        max_slots: int,
        max_step_tokens: int,
        fails: Callable[[list[int]], str | None] = lambda tokens: None,
        accepts: Callable[[int], int] = lambda limit: limit,
        seconds: Callable[[int, int], float] | None = None,
    ) -> None:
        self.info = info
        self.accepted = 0  # draft tokens
        self.computed_tokens = 0
        self.rows: list[int] = []  # rows of each step
        self._max_slots = max_slots
        self._max_step_tokens = max_step_tokens
        self._fails = fails
        self._accepts = accepts
        self._seconds = seconds
        self._slots: dict[int, _Slot] = {}
        self._generations: dict[int, int] = {}
        self._cells: dict[tuple[int, int], bytes] = {}  # (page, offset) -> digest of the prefix ending there
        self._bounded = [_BoundedCells(group) for group in info.bounded_groups]
        self._number = 0

    def run(self, batch: StepBatch) -> StepResult:
        """Run one step. Raises ContractBroken if the step breaks the contract."""
        _expect(batch.number > self._number, f"step {batch.number} after step {self._number}")
        self._number = batch.number
        self._change_slots(batch)
        slots, generations, counts = _ints(batch.slots), _ints(batch.generations), _ints(batch.counts)
        _expect(
            len(slots) == len(generations) == len(counts) > 0,
            "slots, generations and counts differ in length or are empty",
        )
        _expect(len(set(slots)) == len(slots), f"a slot has two rows: {slots}")
        drafts = _ints(batch.draft_limits) or [0] * len(slots)
        _expect(len(drafts) == len(slots), "drafts and slots differ in length")
        _expect(not (batch.unobserved and any(drafts)), "a step with draft tokens must be observed by the draft")
        tokens = sum(counts) + sum(drafts)
        _expect(tokens <= self._max_step_tokens, f"{tokens} tokens in a step of {self._max_step_tokens}")
        self.rows.append(len(slots))
        result = _Result()
        prefills = False
        for row, (number, generation, count, draft_tokens) in enumerate(
            zip(slots, generations, counts, drafts, strict=True)
        ):
            slot = self._slots.get(number)
            _expect(slot is not None, f"a row for the empty slot {number}")
            assert slot is not None
            _expect(slot.generation == generation, f"generation {generation} of slot {number} is {slot.generation}")
            message = self._fails(slot.tokens)  # a failed slot fails again in the step already in flight
            if message is not None:
                result.failed.append(RowError(number, generation, message, message.startswith("invalid")))
                result.accepted.append(0)
                continue
            last = count == 1 and slot.computed + 1 == len(slot.tokens)
            decode = slot.sampled and last
            _expect(not (prefills and decode), "a decode row stands after a prefill row")
            prefills = prefills or not (decode or last)
            _expect(last or not draft_tokens, f"slot {number} draft tokens before its last known token")
            _expect(0 <= draft_tokens < self.info.speculative_nodes, f"slot {number} has {draft_tokens} draft tokens")
            start = slot.computed
            if draft_tokens:
                self._verify(number, slot, draft_tokens)
                slot.sampled = True
                result.accept(slot, start + 1)
                continue
            self._compute(number, slot, count)
            if slot.sampling.prompt_logprobs >= 0:
                result.score_prompt(row, slot, start)
            if slot.computed == len(slot.tokens):
                if isinstance(slot.task, Embed) and not slot.sampled:
                    result.pool(row, slot)
                token = next_token(slot.tokens, self.info.vocab_size)
                # A step sent before the result of its draft tokens may be superfluous.
                longest = self.info.context_length + self.info.speculative_depth
                _expect(len(slot.tokens) < longest, f"slot {number} grows out of the context")
                slot.tokens.append(token)
                slot.sampled = True
                result.sample(token, slot)
            else:
                result.accepted.append(0)
        deepest = min(max(drafts), self.info.speculative_depth)
        timing = StepTiming(total=self._seconds(sum(drafts), deepest)) if self._seconds is not None else StepTiming()
        depths = [min(drafted, self.info.speculative_depth) for drafted in drafts] if batch.draft_limits else []
        return result.done(batch.number, timing, drafts if batch.draft_limits else [], depths)

    def _change_slots(self, batch: StepBatch) -> None:
        for number in _ints(batch.released):
            _expect(number in self._slots, f"slot {number} is released but empty")
            del self._slots[number]
        for admission in batch.admitted:
            number = admission.slot
            _expect(0 < number < self._max_slots, f"slot {number} does not exist")
            _expect(number not in self._slots, f"slot {number} is given to two sequences")
            _expect(admission.generation > self._generations.get(number, 0), f"slot {number} repeats a generation")
            self._generations[number] = admission.generation
            slot = self._slots[number] = _Slot(admission)
            _expect(slot.computed < len(slot.tokens), f"slot {number} has nothing to compute")
            _expect(slot.computed <= len(slot.pages) * self.info.page_size, f"slot {number} has too few pages")
        for number, page in zip(_ints(batch.page_slots), _ints(batch.page_ids), strict=True):
            _expect(number in self._slots, f"page {page} for the empty slot {number}")
            self._slots[number].pages.append(page)
        for group, grants in enumerate(batch.bounded):
            for number, page in zip(_ints(grants.slots), _ints(grants.pages), strict=True):
                _expect(number in self._slots, f"page {page} of group {group} for the empty slot {number}")
                columns = self._slots[number].bounded[group]
                columns[max(columns, default=-1) + 1] = page
        for number, slot in self._slots.items():
            _expect(all(0 < page < self.info.num_pages for page in slot.pages), f"slot {number}: pages {slot.pages}")
            _expect(len(set(slot.pages)) == len(slot.pages), f"slot {number} has a page twice: {slot.pages}")

    def _verify(self, number: int, slot: _Slot, draft_tokens: int) -> None:
        """Write draft tokens after the last known token. Accepted ones stay; the others leave garbage."""
        size = self.info.page_size
        accepted = self._accepts(min(draft_tokens, self.info.speculative_depth))
        self.accepted += accepted
        first = slot.computed
        for _ in range(accepted + 1):
            self._compute(number, slot, 1)
            slot.tokens.append(next_token(slot.tokens, self.info.vocab_size))
        _expect(first + draft_tokens < len(slot.pages) * size, f"draft tokens of slot {number} run out of its pages")
        for position in range(slot.computed, first + draft_tokens + 1):
            self._own(number, slot, slot.pages[position // size])
            self._cells.pop((slot.pages[position // size], position % size), None)

    def _compute(self, number: int, slot: _Slot, count: int) -> None:
        size = self.info.page_size
        end = slot.computed + count
        _expect(count > 0 and end <= len(slot.tokens), f"slot {number} runs {count} tokens but has fewer left")
        _expect(end <= len(slot.pages) * size, f"slot {number} runs out of its {len(slot.pages)} pages")
        for position in range(slot.computed):
            cell = self._cells.get((slot.pages[position // size], position % size))
            _expect(
                cell == _digest(slot.tokens[: position + 1]),
                f"slot {number} reads position {position} in page {slot.pages[position // size]}: not its own prefix",
            )
        for position in range(slot.computed, end):
            page = slot.pages[position // size]
            self._own(number, slot, page)
            self._cells[page, position % size] = _digest(slot.tokens[: position + 1])
        for group, cells in enumerate(self._bounded):
            others = [other for key, other in self._slots.items() if key != number]
            cells.compute(f"slot {number}", group, slot, end, others)
        slot.computed = end
        self.computed_tokens += count

    def _own(self, number: int, slot: _Slot, page: int) -> None:
        sharers = [other for other, held in self._slots.items() if other != number and page in held.pages]
        _expect(not sharers, f"slot {number} writes page {page}, which slots {sharers} hold too")


class _BoundedCells:
    """The pages of one bounded group. A state page has one cell: the digest of the prefix that the state is of."""

    def __init__(self, group: GroupPages) -> None:
        self._tokens, self._lookback, self._num_pages = group.page_tokens, group.lookback, group.num_pages
        self._is_state = isinstance(group.group.spec, State)
        self._cells: dict[tuple[int, int], bytes] = {}

    def compute(self, name: str, group: int, slot: _Slot, end: int, others: list[_Slot]) -> None:
        """Compute positions ``slot.computed .. end - 1``: check the cells they read, write their own."""
        columns = slot.bounded[group]
        for position in range(max(slot.computed - self._lookback, 0), slot.computed):
            page = columns.get(position // self._tokens)
            _expect(page is not None, f"{name} reads position {position} of group {group}, which has no page")
            assert page is not None
            cell = self._cells.get(self._cell(page, position))
            right = cell == _digest(slot.tokens[: position + 1])
            _expect(right, f"{name} reads position {position} of group {group} in page {page}: not its own prefix")
        for position in range(slot.computed, end):
            page = columns.get(position // self._tokens)
            _expect(page is not None, f"{name} runs out of its pages of group {group}")
            assert page is not None
            _expect(0 < page < self._num_pages, f"{name}: page {page} of group {group}")
            sharers = [other for other in others if page in self._in_use(other, group)]
            _expect(not sharers, f"{name} writes page {page} of group {group}, which another slot reads")
            self._cells[self._cell(page, position)] = _digest(slot.tokens[: position + 1])

    def _cell(self, page: int, position: int) -> tuple[int, int]:
        return page, 0 if self._is_state else position % self._tokens

    def _in_use(self, slot: _Slot, group: int) -> list[int]:
        """Pages that the slot's next tokens read or write; earlier ones may have been released."""
        first = max(slot.computed - self._lookback, 0) // self._tokens
        return [page for column, page in slot.bounded[group].items() if column >= first]


class _Result:
    """A StepResult under construction. The log-probability of a token is minus its id; alternatives are invented."""

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.failed: list[RowError] = []
        self._tokens: list[int] = []
        self._tops: list[list[int]] = []
        self._has_logprobs = False
        self._prompt_rows: list[int] = []
        self._prompt_counts: list[int] = []
        self._prompt_tokens: list[int] = []
        self._prompt_tops: list[list[int]] = []
        self._pooled: dict[int, bytes] = {}

    def sample(self, token: int, slot: _Slot) -> None:
        self.accepted.append(1)
        self._tokens.append(token)
        self._has_logprobs = self._has_logprobs or slot.sampling.logprobs >= 0
        self._tops.append([token + i for i in range(max(slot.sampling.logprobs, 0))])

    def accept(self, slot: _Slot, start: int) -> None:
        """Add the tokens from ``start`` on."""
        tokens = slot.tokens[start:]
        self.accepted.append(len(tokens))
        self._tokens += tokens
        self._has_logprobs = self._has_logprobs or slot.sampling.logprobs >= 0
        self._tops += [[token + i for i in range(max(slot.sampling.logprobs, 0))] for token in tokens]

    def score_prompt(self, row: int, slot: _Slot, start: int) -> None:
        tokens = slot.tokens[start + 1 : min(slot.computed, slot.prompt_length - 1) + 1]
        if tokens:
            self._prompt_rows.append(row)
            self._prompt_counts.append(len(tokens))
            self._prompt_tokens += tokens
            self._prompt_tops += [[token + i for i in range(slot.sampling.prompt_logprobs)] for token in tokens]

    def pool(self, row: int, slot: _Slot) -> None:
        self._pooled[row] = pooled_vector(slot.tokens)

    def done(self, number: int, timing: StepTiming, drafted: list[int], depths: list[int]) -> StepResult:
        logprobs, top_counts, top_ids, top_logprobs = _scores(self._tokens, self._tops)
        prompts = _scores(self._prompt_tokens, self._prompt_tops)
        return StepResult(
            number=number,
            accepted=_int32(self.accepted),
            tokens=_int32(self._tokens),
            logprobs=logprobs if self._has_logprobs else b"",
            top_counts=top_counts if self._has_logprobs else b"",
            top_ids=top_ids if self._has_logprobs else b"",
            top_logprobs=top_logprobs if self._has_logprobs else b"",
            prompt_rows=_int32(self._prompt_rows),
            prompt_counts=_int32(self._prompt_counts),
            prompt_logprobs=prompts[0],
            prompt_top_counts=prompts[1],
            prompt_top_ids=prompts[2],
            prompt_top_logprobs=prompts[3],
            failed=tuple(self.failed),
            timing=timing,
            drafted=_int32(drafted),
            depths=_int32(depths),
            pooled_rows=_int32(list(self._pooled)),
            pooled_sizes=_int32([len(vector) // 4 for vector in self._pooled.values()]),
            pooled=b"".join(self._pooled.values()),
        )


def _scores(tokens: list[int], tops: list[list[int]]) -> tuple[bytes, bytes, bytes, bytes]:
    flat = [token for top in tops for token in top]
    return _float32(tokens), _int32([len(top) for top in tops]), _int32(flat), _float32(flat)


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ContractBroken(message)


def _ints(data: bytes) -> list[int]:
    values: list[int] = np.frombuffer(data, dtype=np.int32).tolist()
    return values


def _int32(values: list[int]) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


def _float32(tokens: list[int]) -> bytes:
    return (-np.array(tokens, dtype=np.float32)).tobytes()


def drive(planning: Generator[CacheMessage, CacheReply, StepPlan | None], cache: PrefixCache) -> StepPlan | None:
    """Exhaust ``Planner.plan`` with a prefix cache that replies at once."""
    reply: CacheReply | None = None
    while True:
        try:
            message = next(planning) if reply is None else planning.send(reply)
        except StopIteration as stop:
            plan: StepPlan | None = stop.value
            return plan
        if isinstance(message, CacheUpdate):
            reply = cache.update(message)
        elif isinstance(message, OpenSequence):
            reply = cache.open(message)
        else:
            reply = cache.peek(message)
