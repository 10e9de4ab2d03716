"""The state of every running request, by slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.caches import GroupPages
from kernels.contract.step import Admission
from kernels.contract.tasks import Classify, Embed, NextToken
from kernels.core.arrays import Ints, Longs
from kernels.core.attention_rows import TokenTable
from kernels.devices.base import Device
from kernels.state.bounded_tables import BoundedTable
from kernels.state.slot_error import SlotError

__all__ = ["SlotError", "SlotTable"]

_NO_TARGET = 1 << 62
_STOPS = 8

SLACK = 2
"""Positions by which a sequence may exceed its context, in steps sent before its end was known."""


class SlotTable:
    """Token ids on the device; lengths, page tables and generations on the host.

    The host knows these without synchronizing: a row that samples extends its sequence by one token, whatever the token
    is. max_slots: slots are ``1 .. max_slots - 1``. context: most tokens of a sequence. num_pages: pages are ``1 ..
    num_pages - 1``. vocab_size: token ids are below it. max_drafts: most draft tokens of a row in a step.
    """

    def __init__(
        self,
        device: Device,
        *,
        max_slots: int,
        context: int,
        page_size: int,
        num_pages: int,
        vocab_size: int,
        max_drafts: int = 0,
        bounded: Sequence[GroupPages] = (),
    ) -> None:
        self._device = device
        self.context = context
        self.page_size = page_size
        self.num_pages = num_pages
        self.vocab_size = vocab_size
        max_length = context + SLACK * (1 + max_drafts)
        self.tokens = device.memory.zeros_by_slot(max_slots, max_length + max_drafts)  # int32, on the device
        # If the device is the host, numpy indexes a few of them several times as fast as torch.
        self.here: npt.NDArray[Any] | None = self.tokens.numpy() if self.tokens.device.type == "cpu" else None
        self.known: Longs = np.zeros(max_slots, dtype=np.int64)  # tokens in `tokens`
        self.computed: Longs = np.zeros(max_slots, dtype=np.int64)  # of these, with keys and values in the cache
        self.prompt_length: Longs = np.zeros(max_slots, dtype=np.int64)
        self.prompt_logprobs: Ints = np.full(max_slots, -1, dtype=np.int32)
        self.returns_states = np.zeros(max_slots, dtype=bool)  # final hidden states of all tokens
        self.returns_experts: set[int] = set()  # slots whose requests return the experts of all tokens
        self.pooled: dict[int, Embed | Classify | NextToken] = {}  # by slot: tasks whose results are vectors
        self.generation: Ints = np.zeros(max_slots, dtype=np.int32)
        self.active = np.zeros(max_slots, dtype=bool)
        self.max_length = max_length
        self._targets: Longs = np.full(max_slots, _NO_TARGET, dtype=np.int64)
        self._stops: dict[int, tuple[frozenset[int], int]] = {}  # (stop tokens, position from which they count)
        # Some of them, for drafting: draft tokens after a stop token are useless.
        self._stop_ids: Ints = np.full((max_slots, _STOPS), -1, dtype=np.int32)
        self._stops_from: Longs = np.zeros(max_slots, dtype=np.int64)
        self._searched: Longs = np.zeros(max_slots, dtype=np.int64)  # positions already searched for stop tokens
        self._stopped = np.zeros(max_slots, dtype=bool)
        self.pages: Ints = np.zeros((max_slots, -(-(max_length + max_drafts) // page_size)), dtype=np.int32)
        self.page_count: Longs = np.zeros(max_slots, dtype=np.int64)
        self.bounded = [BoundedTable(group, max_slots, max_length) for group in bounded]

    @property
    def table(self) -> TokenTable:
        """The parts that native decodes need, if the device is the host."""
        assert self.here is not None
        return TokenTable(
            self.here,
            self.known,
            self.computed,
            self._targets,
            self.pages,
            self.page_count,
            self.page_size,
            self._stop_ids,
            self._stops_from,
        )

    @property
    def stops(self) -> bool:
        """Whether sequences may end at a stop token, which ``left`` searches for."""
        return bool(self._stops)

    def check_slot(self, slot: int) -> None:
        """Raises SlotError for a number that is no slot."""
        if not 0 < slot < len(self.known):
            raise SlotError(f"slot {slot} is not one of 1 .. {len(self.known) - 1}; raise the runner's max_slots")

    def release(self, slot: int) -> None:
        """Drop the slot's state. Its generation stays, so that late rows are detected."""
        self.active[slot] = False
        self.known[slot] = self.computed[slot] = self.page_count[slot] = 0
        self._targets[slot], self._stopped[slot] = _NO_TARGET, False
        self._stops.pop(slot, None)
        self.pooled.pop(slot, None)
        self.returns_experts.discard(slot)
        self._stop_ids[slot] = -1

    def admit(self, admission: Admission) -> None:
        """Admit a request to a slot. Raises SlotError; the slot is then free."""
        slot = admission.slot
        self.check_slot(slot)
        self.release(slot)
        self.generation[slot] = admission.generation
        tokens = np.frombuffer(admission.tokens, dtype=np.int32)
        pages = np.frombuffer(admission.pages, dtype=np.int32)
        if not 0 < len(tokens) <= self.context:
            raise SlotError(f"a sequence has 1 to {self.context} tokens, this one {len(tokens)}; see --context-length")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise SlotError(f"token ids must be 0 to {self.vocab_size - 1}; the prompt was made with another tokenizer")
        if not 0 < admission.prompt_length <= len(tokens):
            raise SlotError(f"prompt length {admission.prompt_length} does not fit {len(tokens)} tokens")
        if not 0 <= admission.computed < len(tokens):
            raise SlotError(f"{admission.computed} computed of {len(tokens)} tokens: at least one must be left to run")
        vector = isinstance(admission.task, Embed | Classify | NextToken)
        if (vector or admission.sampling.hidden_states) and admission.sampling.logprobs < 0:
            raise SlotError("a request for vectors must ask for log-probabilities, or its step may keep no states")
        if admission.computed > len(pages) * self.page_size:
            raise SlotError(f"{admission.computed} computed tokens do not fit {len(pages)} pages")
        if self.here is not None:
            self.here[slot, : len(tokens)] = tokens
        else:
            self.tokens[slot, : len(tokens)] = self._device.memory.put(tokens.copy())
        self.known[slot] = len(tokens)
        self.computed[slot] = admission.computed
        self.prompt_length[slot] = admission.prompt_length
        self.prompt_logprobs[slot] = admission.sampling.prompt_logprobs
        self.returns_states[slot] = admission.sampling.hidden_states
        if admission.sampling.routed_experts:
            self.returns_experts.add(slot)
        self.active[slot] = True
        if isinstance(admission.task, Embed | Classify | NextToken):
            self.pooled[slot] = admission.task
        self._targets[slot] = admission.target or _NO_TARGET
        self._searched[slot] = len(tokens)
        if admission.stop_ids:
            first = admission.prompt_length + admission.sampling.min_tokens
            self._stops[slot], self._stops_from[slot] = (frozenset(admission.stop_ids), first), first
            some = admission.stop_ids[:_STOPS]
            self._stop_ids[slot, : len(some)] = some
        try:
            self.grant(slot, pages)
            if len(admission.bounded) != len(self.bounded):
                raise SlotError(f"pages of {len(admission.bounded)} bounded groups, the model has {len(self.bounded)}")
            for table, run in zip(self.bounded, admission.bounded, strict=True):
                table.admit(slot, run)
        except SlotError:
            self.release(slot)
            raise

    def grant(self, slot: int, pages: Ints) -> None:
        """Append pages to the slot's table. Raises SlotError."""
        if not len(pages):
            return
        held = int(self.page_count[slot])
        if held + len(pages) > self.pages.shape[1]:
            raise SlotError(f"{held + len(pages)} pages are more than a sequence of {self.context} tokens needs")
        if pages.min() < 1 or pages.max() >= self.num_pages:
            raise SlotError(f"page ids must be 1 to {self.num_pages - 1}")
        self.pages[slot, held : held + len(pages)] = pages
        self.page_count[slot] = held + len(pages)

    def may_be_over(self, slots: Longs) -> bool:
        """Whether each slot's sequence is at its end or its last token ends it. Only where the device is the host: much
        quicker than ``left``. A sequence that ended before its last token is not seen."""
        assert self.here is not None
        known = self.known[slots]
        last = self.here[slots, known - 1]
        ends = (self._stop_ids[slots] == last[:, None]).any(1) | (known >= self._targets[slots])
        return bool(ends.all())

    def left(self, slots: Longs) -> Longs:
        """The number of tokens left for each slot's sequence; 0 for one that has ended.

        Stop tokens are searched for only if the device is the host; elsewhere the host knows tokens too late.
        """
        left: Longs = np.maximum(self._targets[slots] - self.known[slots], 0)
        if self.here is None or not self._stops:
            return left
        for slot in slots.tolist():
            known = int(self.known[slot])
            if known > self._searched[slot] and slot in self._stops:
                stops, first = self._stops[slot]
                begin = max(first, int(self._searched[slot]))
                self._stopped[slot] |= not stops.isdisjoint(self.here[slot, begin:known].tolist())
                self._searched[slot] = known
        left[self._stopped[slots]] = 0
        return left

    def read(self, slots: Longs, positions: Longs, at: Tensor) -> Tensor:
        """The token ids int32 at ``positions`` int64 of ``slots``; ``at``: the positions on the device."""
        if self.here is not None:
            return torch.from_numpy(self.here[slots, positions])
        return self.tokens[self._device.memory.put(slots), at]

    def append(self, slots: Longs, at_slots: Tensor, at: Tensor, tokens: Tensor) -> None:
        """Append one token to each slot. ``at_slots``, ``at``: slots and their lengths on the device."""
        if self.here is not None:
            self.here[slots, self.known[slots]] = tokens.numpy()
        else:
            self.tokens[at_slots, at] = tokens.to(torch.int32)
        self.known[slots] += 1

    def grew(self, slots: Longs) -> None:
        """Record that the device has appended one token to each slot."""
        self.known[slots] += 1

    def write(self, slots: Longs, positions: Longs, tokens: Tensor) -> None:
        """Write ``tokens`` int [rows, n], which are not yet known, from ``positions`` on in each slot."""
        if self.here is not None:
            self.here[slots[:, None], positions[:, None] + np.arange(tokens.shape[1])] = tokens.numpy()
            return
        put = self._device.memory.put
        columns = put(positions).unsqueeze(1) + torch.arange(tokens.shape[1], device=tokens.device)
        self.tokens[put(slots).unsqueeze(1), columns] = tokens.to(torch.int32)

    def holds(self, page: int) -> bool:
        """Whether a running request's table names the page."""
        columns = np.arange(self.pages.shape[1])
        return bool(((self.pages == page) & (columns < self.page_count[:, None])).any())

    def errors(self, slots: Ints, generations: Ints, counts: Ints) -> dict[int, str]:
        """Reasons why rows cannot run, by row index."""
        result: dict[int, str] = {}
        inside = (slots > 0) & (slots < len(self.known))
        safe = np.where(inside, slots, 0)
        known, computed = self.known[safe], self.computed[safe]
        last = computed + counts
        fine = inside & self.active[safe] & (self.generation[safe] == generations) & (counts > 0) & (last <= known)
        fine &= (last <= self.page_count[safe] * self.page_size) & (known < self.max_length)
        for table in self.bounded:
            fine &= table.holds(safe, last)
        if fine.all() and len(set(slots.tolist())) == len(slots):
            return result
        seen: set[int] = set()
        for row, slot in enumerate(slots.tolist()):
            if slot in seen:
                result[row] = f"slot {slot} has two rows in one step"
            elif not fine[row]:
                result[row] = self._explain(slot, int(generations[row]), int(counts[row]))
            seen.add(slot)
        return result

    def _explain(self, slot: int, generation: int, count: int) -> str:
        if not 0 < slot < len(self.known):
            return f"slot {slot} is not one of 1 .. {len(self.known) - 1}"
        if self.generation[slot] != generation:
            return f"slot {slot} holds generation {self.generation[slot]}, the row is for generation {generation}"
        if not self.active[slot]:
            return f"slot {slot} holds no request"
        known, computed, pages = int(self.known[slot]), int(self.computed[slot]), int(self.page_count[slot])
        if known >= self.max_length:
            return f"slot {slot} has no room for another token: the context is {self.context} tokens"
        if count < 1 or computed + count > known:
            return f"slot {slot} cannot run {count} tokens: {computed} of {known} known ones are computed"
        return f"slot {slot} needs more pages: {pages} of {self.page_size} tokens do not hold {computed + count} tokens"
