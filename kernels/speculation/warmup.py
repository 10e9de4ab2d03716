"""Warm-up of steps with draft tokens at load, so that no request waits for kernels that are compiled at first use.

The kernels of a step depend on how many rows verify, on their draft tokens and on the other rows; the observation
depends on the steps before. ``warm_up_drafts`` therefore drives the runner like a scheduler, through some steps of each
kind. ``precompile_drafts`` runs single passes that ``Capture.precompile`` compiles. In these no result depends on
values, so the draft only observes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.caches import GroupPages, PageRun
from kernels.contract.config import RunnerConfig
from kernels.contract.info import ModelInfo
from kernels.contract.runner import RunningStep
from kernels.contract.step import Admission, SlotSampling, StepBatch
from kernels.core.arrays import Longs
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.core.tree import chain
from kernels.devices.base import Device
from kernels.models.config import ModelConfig
from kernels.models.decoder import Decoder
from kernels.speculation.drafter import Drafter, Observation
from kernels.state.slots import SlotTable

__all__ = ["TargetParts", "precompile_drafts", "warm_up_drafts"]

_ROWS = (1, 2, 4, 8, 16)
_SHORT = 16  # tokens of a prompt of arbitrary length
_PROMPTS = (7, 64)  # tokens of prompts whose length matters; the longest that fits is added
_BESIDE = 4  # rows of a step with a prompt
_STEPS = 8  # the most steps of a request after its prompt
_NO_REQUEST = -1  # a generation of no request
_SALT = b"warm-up"  # keeps these tokens out of the drafts of requests
_GREEDY = SlotSampling(temperature=0.0)

Start = Callable[[StepBatch], RunningStep]


def warm_up_drafts(start: Start, info: ModelInfo, drafter: Drafter, max_slots: int, max_step_tokens: int) -> None:
    """Run warm-up steps with ``start`` (``ModelRunner.start``). They use free slots and pages and release them.
    ``info``: the runner's description."""
    stage = _Stage(start, info, drafter)
    each = max(_SHORT, drafter.max_nodes)
    max_rows = min(max_slots - 1, max_step_tokens // each, stage.room(_SHORT))
    for rows in (rows for rows in _ROWS if rows <= max_rows):
        stage.run_equal(rows)
    if max_rows > 1:
        for draft_tokens in {1, drafter.max_nodes - 1}:
            stage.run_with_prompt(min(max_rows, _BESIDE), draft_tokens)
    if max_rows > 0:
        longest = min(max_step_tokens, stage.longest)
        for prompt in (*(prompt for prompt in _PROMPTS if prompt < longest), longest):
            stage.prompt(prompt)
    stage.close()


class _Stage:
    """Drives the runner. Every request repeats the same few tokens, so that a draft that looks up n-grams finds some.
    The model's own tokens may be anything, so for such a draft (``_looks_up``) each step has new requests, with all but
    the last token known and none computed.
    """

    def __init__(self, start: Start, info: ModelInfo, drafter: Drafter) -> None:
        self._start, self._info, self._looks_up = start, info, drafter.needs_host_tokens
        self._draft_tokens, self._levels = drafter.max_nodes - 1, range(1, drafter.depth) if drafter.stepwise else ()
        # Positions that a request needs after its prompt.
        self._behind = (_STEPS + len(self._levels)) * drafter.max_nodes + max(
            drafter.early_positions(), self._draft_tokens
        )
        self._number, self._page = 0, 1
        self._running: deque[RunningStep] = deque()
        self._admitted: list[Admission] = []
        self._released: list[int] = []

    def room(self, prompt: int) -> int:
        """The most requests with prompts of ``prompt`` tokens that fit into the cache."""
        info, tokens = self._info, prompt + self._behind
        if tokens > info.context_length:
            return 0
        bounded = ((group.num_pages - 1) // -(-tokens // group.page_tokens) for group in info.bounded_groups)
        return min([(info.num_pages - 1) // self._pages(prompt), *bounded])

    @property
    def longest(self) -> int:
        """The longest prompt that fits."""
        info = self._info
        bounded = ((group.num_pages - 1) * group.page_tokens for group in info.bounded_groups)
        return min([info.context_length, (info.num_pages - 1) * info.page_size, *bounded]) - self._behind

    def run_equal(self, rows: int) -> None:
        """Run steps of ``rows`` equal requests. Fewer draft tokens and levels are run for one row only."""
        slots = self._begin(range(1, rows + 1))
        for draft_tokens in (self._draft_tokens, self._draft_tokens, *((self._draft_tokens, 1) if rows == 1 else ())):
            self._draft(slots, [draft_tokens] * rows)
        for levels in self._levels if rows == 1 else ():
            self._draft(slots, [self._draft_tokens] * rows, levels)
        self._wait()
        self._step(slots, [1] * rows)
        self._draft(slots, [self._draft_tokens] * rows)
        self._release(slots)

    def run_with_prompt(self, rows: int, draft_tokens: int) -> None:
        """Run requests with ``draft_tokens`` each together with a prompt, then with a request without draft tokens."""
        slots, last = self._begin(range(1, rows)), rows
        self._draft(slots, [draft_tokens] * len(slots))
        self._wait()
        self._anew(slots)
        self._admit([last], _SHORT, 0)
        some, both = [draft_tokens] * len(slots), [*slots, last]
        self._step(both, [1] * len(slots) + [_SHORT], [*some, 0])
        self._wait()
        self._draft(both, [*some, 0])
        self._release(both)

    def prompt(self, tokens: int) -> None:
        """Run one request with a prompt of ``tokens`` tokens."""
        self._admit([1], tokens, 0)
        self._step([1], [tokens])
        self._step([1], [1], [self._draft_tokens])
        self._release([1])

    def close(self) -> None:
        """Release all requests."""
        self._step([], [])
        self._wait()

    def _begin(self, slots: Sequence[int]) -> list[int]:
        """Start requests that may draft in the next step."""
        if not self._looks_up:
            self._admit(slots, _SHORT, 0)
            self._step(slots, [_SHORT] * len(slots))
        return list(slots)

    def _draft(self, slots: Sequence[int], draft_tokens: Sequence[int], levels: int = 0) -> None:
        self._anew(slots)
        self._step(slots, [1] * len(slots), draft_tokens, levels)

    def _anew(self, slots: Sequence[int]) -> None:
        if self._looks_up:
            self._release(slots)
            self._admit(slots, _SHORT, _SHORT - 1)

    def _pages(self, prompt: int) -> int:
        return -(-(prompt + self._behind) // self._info.page_size)

    def _admit(self, slots: Sequence[int], prompt: int, computed: int) -> None:
        tokens = np.arange(prompt, dtype=np.int32) % min(4, self._info.vocab_size)
        for slot in slots:
            pages = np.arange(self._page, self._page + self._pages(prompt), dtype=np.int32)
            self._page += len(pages)
            bounded = tuple(self._bounded(group, slot, prompt) for group in self._info.bounded_groups)
            self._admitted.append(
                Admission(
                    slot,
                    _NO_REQUEST,
                    tokens.tobytes(),
                    prompt,
                    computed,
                    pages.tobytes(),
                    _GREEDY,
                    _SALT,
                    bounded=bounded,
                )
            )

    def _bounded(self, group: GroupPages, slot: int, prompt: int) -> PageRun:
        """Pages of the group for a request."""
        each = -(-(prompt + self._behind) // group.page_tokens)
        return PageRun(0, np.arange(1 + (slot - 1) * each, 1 + slot * each, dtype=np.int32).tobytes())

    def _release(self, slots: Sequence[int]) -> None:
        self._wait()
        self._released += slots
        self._page = 1

    def _step(self, slots: Sequence[int], counts: Sequence[int], drafts: Sequence[int] = (), levels: int = 0) -> None:
        self._number += 1
        batch = StepBatch(
            self._number,
            _packed(slots),
            _packed([_NO_REQUEST] * len(slots)),
            _packed(counts),
            admitted=tuple(self._admitted),
            released=_packed(self._released),
            draft_limits=_packed(drafts),
            draft_levels=levels,
        )
        self._admitted, self._released = [], []
        running = self._start(batch)
        self._running.append(running)
        while len(self._running) > (not running.done):  # as many steps in flight as with a scheduler
            self._running.popleft().result()

    def _wait(self) -> None:
        while self._running:
            self._running.popleft().result()


def _packed(values: Sequence[int]) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


_PROMPT = 16
_OBSERVED = (1, 7, _PROMPT, 64)
_COMPILED_SIZES = (2, 4, 8, 16, 32, 64)  # tokens of a row; upper bounds of compiled sizes
_COMPILED_ROWS = (1, 2, 8, 16)
_COMPILED_LENGTHS = (64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, eq=False)
class TargetParts:
    """The target's ``model``, of ``part`` in ``dtype``, over the first page of ``caches``. ``slots``: without
    requests."""

    device: Device
    model: Decoder
    part: ModelConfig
    dtype: torch.dtype
    caches: list[Any]
    slots: SlotTable


def precompile_drafts(config: RunnerConfig, drafter: Drafter, target: TargetParts) -> None:
    """Run passes that verify and observe, with ``drafter`` over the first page of its own caches."""
    passes = _Passes(config.page_size, drafter, target)
    max_nodes, longest = drafter.max_nodes, config.max_step_tokens
    for nodes in sorted({min(max_nodes, size) for size in _COMPILED_SIZES}):
        result = passes.verify(nodes)
    # The split of sequences depends on their lengths and number, no longer on the tokens that each verifies.
    sizes = [(1, size, _COMPILED_LENGTHS[0]) for size in _COMPILED_SIZES if size <= max(max_nodes, _PROMPT)]
    sizes += [(_COMPILED_ROWS[-1], size, length) for _, size, length in sizes]
    sizes += [(rows, max_nodes, length) for rows in _COMPILED_ROWS for length in _COMPILED_LENGTHS]
    for rows, nodes, length in sizes:
        if rows < config.max_slots and length <= longest and target.part.latent is None:  # others have one kernel each
            passes.attend(rows, nodes, length)
    if drafter.features:
        for tokens in (*_OBSERVED, longest):
            passes.observe(tokens, result)


class _Passes:
    def __init__(self, page_size: int, drafter: Drafter, target: TargetParts) -> None:
        self._page_size, self._drafter, self._device, self._model = page_size, drafter, target.device, target.model
        self._config, self._dtype, self._caches, self._slots = target.part, target.dtype, target.caches, target.slots

    def verify(self, nodes: int) -> Tensor:
        """Verify a row of ``nodes`` nodes together with a prompt. Returns the pass's result."""
        device, model, drafter = self._device, self._model, self._drafter
        moves = drafter.branches and self._config.latent is None
        counts = np.array([nodes, _PROMPT])
        ids, positions, index, pages = self._tokens(counts)
        tree = chain(torch.zeros((1, nodes), dtype=torch.int64, device=device.torch_device))
        rows = AttentionRows(np.zeros(2, np.int64), counts, pages, 0, 1, tree.bits if drafter.branches else None)
        plans = {window: device.attention.plan_layers(rows, window) for window in set(self._config.windows)}
        result = model.forward(ForwardBatch(ids, positions, index, plans), self._caches)
        logits = model.logits(model.split(result)[0])
        if device.sampling.greedy is not None and device.drafting is not None:
            root_in_slot_0 = np.array([[0, 0, 1, 0]], dtype=np.int64)
            verified_rows = device.memory.put_pinned(root_in_slot_0)
            sampled = device.sampling.greedy(logits)
            accepted = device.drafting.accept(tree, verified_rows, *sampled, drafter.depth, 0, self._slots.tokens)
            if accepted is not None and moves:
                device.drafting.move_accepted(self._caches, index, accepted.rows, accepted.outcome)
        if moves:
            places = index[:1].expand(drafter.depth + 1).contiguous()
            device.cache.move_all(self._caches, places, places, len(places))
        return result

    def attend(self, rows: int, nodes: int, length: int) -> None:
        """Run only attention, for sequences of ``length`` that verify ``nodes`` nodes. Its split depends on both."""
        device, config = self._device, self._config
        counts = np.full(rows, nodes)
        pages = np.zeros((rows, -(-length // self._page_size)), dtype=np.int32)
        bits = torch.ones((rows, nodes), dtype=torch.int64, device=device.torch_device)
        heads = torch.zeros(
            (rows * nodes, config.heads + 2 * config.kv_heads, config.head_dim),
            dtype=self._dtype,
            device=device.torch_device,
        )
        for window, tree in product(set(config.windows), {self._drafter.branches, False}):
            cached = np.maximum(length - counts, 0)
            plan = device.attention.plan(AttentionRows(cached, counts, pages, 0, rows, bits if tree else None), window)
            device.attention.attend(heads[:, : config.heads], self._caches[0], plan, 1.0)

    def observe(self, tokens: int, found: Tensor) -> None:
        """Observe a prompt of ``tokens`` tokens. ``found``: the result of any pass."""
        counts, no_slot, put = np.array([tokens]), np.zeros(1, np.int64), self._device.memory.put
        ids, positions, index, pages = self._tokens(counts)
        self._drafter.observe(
            Observation(
                slots=no_slot,
                starts=no_slot,
                counts=counts,
                pages=pages,
                capacity=counts,
                reached=np.ones(1, dtype=bool),
                token_ids=ids,
                next_tokens=ids,
                positions=positions,
                cache_index=index,
                features=self._model.split(found.new_zeros(tokens, found.shape[1]))[1],
                last=put(counts - 1),
                device_slots=put(no_slot),
                table=self._slots.tokens,
            )
        )

    def _tokens(self, counts: Longs) -> tuple[Tensor, Tensor, Tensor, npt.NDArray[np.int32]]:
        """Ids int64, positions and cache indices of rows of ``counts`` tokens from position 0 on, and the rows'
        pages."""
        put, total = self._device.memory.put, int(counts.sum())
        positions = np.concatenate([np.arange(count) for count in counts])
        pages = np.zeros((len(counts), -(-int(counts.max()) // self._page_size)), dtype=np.int32)
        return put(np.zeros(total, np.int64)), put(positions), put(positions % self._page_size), pages
