"""Requests that take slots, get pages and leave, with all that is kept of them by slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.captures import CapturedSteps
from kernels.loaded_model import LoadedModel
from kernels.slots import SlotError
from kernels.step import RowError, StepBatch
from kernels.unsettled import Unsettled

__all__ = ["Tenants"]

Ints = npt.NDArray[np.int32]


class Tenants:
    """Of one runner. ``unsettled``: its steps that are under way; ``captured``: what is prepared anew when operators
    become better while nobody is there."""

    def __init__(self, loaded: LoadedModel, captured: CapturedSteps, unsettled: Unsettled) -> None:
        self._platform, self._captured, self._unsettled = loaded.platform, captured, unsettled
        self._slots, self._sampler, self._speculator = loaded.slots, loaded.sampler, loaded.speculator
        self._caches = [caches for caches in (loaded.caches, loaded.draft_caches) if caches]
        self._page_size = loaded.config.page_size

    def update(self, batch: StepBatch, failed: list[RowError], granted: list[RowError] | None) -> None:
        """Releases, then admissions, then page grants, unless they are done and ``granted`` says what was wrong with
        them. Errors are added to ``failed``."""
        for slot in _ints(batch.released).tolist():
            self._drop(slot)
        self._clean_granted(batch)
        if batch.admitted and not self._slots.active.any() and self._platform.renew():
            self._captured.capture()  # a request sees one kind of operator
        for admission in batch.admitted:
            try:
                self._slots.admit(admission)
                self._sampler.admit(admission.slot, admission.sampling, admission.prompt_length)
                if self._speculator is not None:
                    self._speculator.admit(admission)
            except Exception as error:  # whatever is wrong with one request is its own
                self._drop(admission.slot)
                failed.append(RowError(admission.slot, admission.generation, str(error)))
        failed += self.grant(batch) if granted is None else granted

    def grant(self, batch: StepBatch) -> list[RowError]:
        """Add the pages that are granted. -> what was wrong with them."""
        failed: list[RowError] = []
        if not (batch.page_slots or batch.page_ids):
            return failed
        state = self._slots
        granted, pages = _ints(batch.page_slots), _ints(batch.page_ids)
        if len(granted) != len(pages):
            raise ValueError("page_slots and page_ids of a step must be of one length")
        for slot in dict.fromkeys(granted.tolist()):
            if not (0 < slot < len(state.known) and state.active[slot]):
                continue  # its admission failed, or its request just ended
            try:
                state.grant(slot, pages[granted == slot])
            except SlotError as error:
                failed.append(RowError(slot, int(state.generation[slot]), str(error)))
                self._drop(slot)
        return failed

    def settle(self) -> None:
        """Drop the requests that were found not to be finite, and clean what they wrote to, unless it is someone
        else's by now: then it was cleaned before. What earlier steps wrote was sound, and others may read it.
        """
        state = self._slots
        for writes, error in self._unsettled.take():
            if state.active[error.slot] and state.generation[error.slot] == error.generation:
                self._drop(error.slot)
            self._clear([page for page in writes.of(error.slot, error.generation) if not state.holds(page)])

    def _clean_granted(self, batch: StepBatch) -> None:
        """Pages that change hands while a step is under way that writes to them, for a request that has ended."""
        if not (batch.page_ids or batch.admitted):
            return
        size = self._page_size
        own = [_ints(admission.pages)[-(-admission.computed // size) :] for admission in batch.admitted]
        self._clear(self._unsettled.among(np.concatenate([_ints(batch.page_ids), *own])))

    def _clear(self, pages: list[int]) -> None:
        for caches in self._caches if pages else ():
            self._platform.clear_pages(caches, pages)

    def _drop(self, slot: int) -> None:
        if 0 < slot < len(self._slots.known):
            self._slots.release(slot)
            self._sampler.release(slot)
            if self._speculator is not None:
                self._speculator.release(slot)


def _ints(data: bytes) -> Ints:
    return np.frombuffer(data, dtype=np.int32)
