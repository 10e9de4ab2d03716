"""Releases, admissions and page grants: how a step changes the slots before it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from kernels.contract.grammar import GrammarError
from kernels.contract.step import Admission, RowError, StepBatch
from kernels.core.arrays import Ints, unpack_ints
from kernels.core.layer_context import LayerContext
from kernels.grammar.slots import GrammarSlots
from kernels.sampling.sampler import Sampler
from kernels.state.in_flight_writes import InFlightWrites
from kernels.state.slots import SlotError, SlotTable

__all__ = ["SlotObserver", "SlotUpdates"]


class SlotObserver(Protocol):
    """Keeps additional state by slot."""

    def admit(self, admission: Admission) -> None:
        """Record that a request has taken a slot."""
        ...

    def release(self, slot: int) -> None:
        """Record that the slot's request has left."""
        ...


class SlotUpdates:
    """Slot changes of one runner, with all state by slot.

    observer: notified of admissions and releases; None: no other state by slot. clear_pages: overwrites pages of every
    cache with zeros. clear_bounded: the same of a bounded cache group. renew: called before an admission while no
    request holds a slot: the runner may then change its operators. rows: learns which pages belong to which adapter;
    None: the model has no adapters. grammars: the slots' grammars; None: requests have none.
    """

    def __init__(
        self,
        slots: SlotTable,
        sampler: Sampler,
        in_flight_writes: InFlightWrites,
        *,
        observer: SlotObserver | None,
        clear_pages: Callable[[list[int]], None],
        clear_bounded: Callable[[int, list[int]], None],
        renew: Callable[[], None],
        rows: LayerContext | None = None,
        grammars: GrammarSlots | None = None,
    ) -> None:
        self._slots, self._sampler, self._in_flight_writes = slots, sampler, in_flight_writes
        self._observer, self._renew, self._grammars = observer, renew, grammars
        self._clear_pages, self._clear_bounded = clear_pages, clear_bounded
        self._rows = rows
        self._adapters: dict[int, tuple[int, int]] = {}  # number and place of a slot's adapter

    def update(self, batch: StepBatch, failed: list[RowError], granted: list[RowError] | None) -> None:
        """Release, then admit, then grant pages. Errors are added to ``failed``.

        granted: errors of the step's grants, if ``grant`` has been called for it.
        """
        for slot in unpack_ints(batch.released).tolist():
            self._drop(slot)
        self._clear_in_flight(batch)
        if batch.admitted and not self._slots.active.any():
            self._renew()  # a request uses the same operators throughout
        for admission in batch.admitted:
            try:
                self._slots.admit(admission)
                self._release_adapter(admission.slot)
                if self._rows is not None:
                    place = self._rows.adapters.acquire(admission.adapter)
                    self._adapters[admission.slot] = admission.adapter, place
                    self._rows.places[admission.slot] = place
                    self._rows.assign(unpack_ints(admission.pages), place)
                elif admission.adapter:
                    raise SlotError("this runner has no adapters; see --enable-lora")
                if self._grammars is not None:
                    self._grammars.admit(admission)
                elif admission.sampling.grammar is not None:
                    raise SlotError("this runner has no grammar backend; see --grammar-backend")
                self._sampler.admit(admission.slot, admission.sampling, admission.prompt_length)
                if self._observer is not None:
                    self._observer.admit(admission)
            except Exception as error:  # an error of one request fails this request alone
                self._drop(admission.slot)
                invalid = isinstance(error, GrammarError)
                failed.append(RowError(admission.slot, admission.generation, str(error), invalid))
        if self._rows is not None:
            self._rows.used = any(number for number, _ in self._adapters.values())
        failed += self.grant(batch) if granted is None else granted

    def grant(self, batch: StepBatch) -> list[RowError]:
        """Append the granted pages to their slots' tables. -> errors of single slots, which are dropped."""
        failed: list[RowError] = []
        if batch.page_slots or batch.page_ids:
            self._append(batch.page_slots, batch.page_ids, self._grant_pages, failed)
        for table, grants in zip(self._slots.bounded, batch.bounded, strict=bool(batch.bounded)):
            self._append(grants.slots, grants.pages, table.append, failed)
        return failed

    def _grant_pages(self, slot: int, pages: Ints) -> None:
        self._slots.grant(slot, pages)
        if self._rows is not None:
            self._rows.assign(pages, self._adapters[slot][1])

    def _append(
        self, slots: bytes, page_ids: bytes, append: Callable[[int, Ints], None], failed: list[RowError]
    ) -> None:
        state = self._slots
        granted, pages = unpack_ints(slots), unpack_ints(page_ids)
        if len(granted) != len(pages):
            raise ValueError("the slots and pages that a step grants must be of one length")
        for slot in dict.fromkeys(granted.tolist()):
            if not (0 < slot < len(state.known) and state.active[slot]):
                continue  # its admission failed, or its request has just ended
            try:
                append(slot, pages[granted == slot])
            except SlotError as error:
                failed.append(RowError(slot, int(state.generation[slot]), str(error)))
                self._drop(slot)

    def drop_nonfinite(self) -> None:
        """Drop the requests whose rows were not finite, and clear the pages that these rows wrote to.

        A page that now belongs to another request was cleared when its owner changed. Pages written by earlier steps
        are valid, and other requests may read them.
        """
        state = self._slots
        for writes, error in self._in_flight_writes.take_broken():
            for index, table in enumerate(state.bounded):
                first, last = writes.columns(error.slot, error.generation)
                pages = table.pages_between(error.slot, first * state.page_size, last * state.page_size)
                self._clear_bounded(index, pages)
            if state.active[error.slot] and state.generation[error.slot] == error.generation:
                self._drop(error.slot)
            self._clear([page for page in writes.pages_of(error.slot, error.generation) if not state.holds(page)])

    def _clear_in_flight(self, batch: StepBatch) -> None:
        """Clear pages that change owners while a step writes to them for a request that has ended."""
        if not (batch.page_ids or batch.admitted):
            return
        size = self._slots.page_size
        own = [unpack_ints(admission.pages)[-(-admission.computed // size) :] for admission in batch.admitted]
        self._clear(self._in_flight_writes.among(np.concatenate([unpack_ints(batch.page_ids), *own])))

    def _clear(self, pages: list[int]) -> None:
        if pages:
            self._clear_pages(pages)

    def _drop(self, slot: int) -> None:
        if 0 < slot < len(self._slots.known):
            self._slots.release(slot)
            self._release_adapter(slot)
            self._sampler.release(slot)
            if self._grammars is not None:
                self._grammars.release(slot)
            if self._observer is not None:
                self._observer.release(slot)

    def _release_adapter(self, slot: int) -> None:
        if self._rows is not None and slot in self._adapters:
            self._rows.adapters.release(self._adapters.pop(slot)[0])
