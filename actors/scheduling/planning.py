"""Fills a step: decodes, then chunks of running prefills, then sequences from the queue."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias

from actors.boards.suspects import Cohort
from actors.protocol import (
    AllocatedPages,
    AllocatePages,
    CacheUpdate,
    CacheUpdated,
    Ended,
    OpenSequence,
    PeekPrefixes,
    PrefixMatch,
)
from actors.scheduling.adapter_places import AdapterPlaces
from actors.scheduling.config import PlannerConfig
from actors.scheduling.growth import GrowthReserve
from actors.scheduling.policy import Policy
from actors.scheduling.sequence import Sequence
from actors.scheduling.sequence_table import SequenceTable
from actors.scheduling.speculation.draft_limits import DraftLimits
from actors.scheduling.step_builder import StepBuilder

__all__ = ["CacheMessage", "CacheReply", "StepPlanning", "too_large"]

CacheMessage: TypeAlias = OpenSequence | CacheUpdate | PeekPrefixes
CacheReply: TypeAlias = PrefixMatch | CacheUpdated | list[int]
Planning: TypeAlias = Generator[CacheMessage, CacheReply, None]

_MAX_SKIPPED = 64  # most sequences skipped in one step because their prefix is being computed
_RETRY_STEPS = 32  # steps after which a queue whose head did not fit is tried again in any case


def too_large(pages: int, total: int) -> Ended:
    """The end of a sequence that needs more pages than the cache has."""
    return Ended(
        "error",
        message=f"the sequence needs {pages} pages, the cache has {total}: "
        "raise --max-total-tokens or shorten the request",
    )


def _parts(tenants: int, step: StepBuilder) -> int:
    """Parts of the budget of prompts: no more than the rows that can still use one."""
    return max(1, min(tenants, step.prefill_rows))


class StepPlanning:
    """Fills steps. ``available``: free pages that the cache last reported, minus those requested since."""

    def __init__(self, config: PlannerConfig, policy: Policy, table: SequenceTable) -> None:
        self._config = config
        self._policy = policy
        self._table = table
        self._growth = GrowthReserve(config.conservativeness)
        self._total_pages = 0
        self._available = 0
        self._steps = 0
        self._turn = 0  # of decodes
        self._blocked = (-1, 0)  # (id of the sequence that did not fit, pages it needs)
        self._draft_limits: DraftLimits | None = None
        self._cohort: Cohort | None = None  # of the current step

    def new_worker(self, total_pages: int, limits: DraftLimits | None) -> None:
        """Start with an empty cache of ``total_pages``. ``limits``: draft limits, if the worker drafts."""
        self._total_pages = self._available = total_pages
        self._draft_limits = limits
        self._blocked = (-1, 0)

    def fill(
        self, now: float, *, idle: bool, cohort: Cohort | None = None
    ) -> Generator[CacheMessage, CacheReply, tuple[StepBuilder, tuple[AllocatedPages, ...]]]:
        """Fill the next step; returns it with its page grants. ``idle``: no step is in flight, so none will free pages.
        ``cohort``: the only sequences that may run; None: all."""
        config, table = self._config, self._table
        self._cohort = cohort
        step = StepBuilder(config.step_tokens, config.prefill_max_requests or config.max_running, config.tail_tokens)
        first = yield from self._make_room(step)
        yield from self._plan_decodes(step)
        step.limit_prefills(config.max_prefill_tokens)
        if self._are_owed(step):
            yield from self._admit_within_share(step, first, now)
            first = None
        yield from self._plan_prefills(step)
        if idle and step.empty and table.running and (cohort is None or self._is_last(cohort)):
            self._end_last(step)
        if self._may_join(step) and (table.may_admit or not table.running):
            yield from self._admit(step, first, now)
        if self._draft_limits is not None and self._draft_limits.decode_only and not step.counts:
            self._plan_draft(self._draft_limits, step)
        if self._draft_limits is not None:
            step.unobserved = self._draft_limits.is_unobserved
        allocated: tuple[AllocatedPages, ...] = ()
        if step.allocations or table.has_updates:
            allocated = (yield from self._update_cache(tuple(step.allocations))).allocated
        self._steps += 1
        if self._steps % _RETRY_STEPS == 0:
            table.may_admit = True
        if not step.short:
            self._growth.step()
        return step, allocated

    def _update_cache(
        self, allocations: tuple[AllocatePages, ...] = ()
    ) -> Generator[CacheMessage, CacheReply, CacheUpdated]:
        """Send commits and closes to the cache, and request pages."""
        commits, closed = self._table.take_updates()
        done = yield CacheUpdate(commits=commits, closed=closed, allocations=allocations)
        if not isinstance(done, CacheUpdated):
            raise TypeError(f"a CacheUpdate was answered with {type(done).__name__}")
        self._available = done.available
        return done

    def sync_cache(self) -> Planning:
        """Send pending commits and closes."""
        if self._table.has_updates:
            yield from self._update_cache()

    def _refresh_available(self, step: StepBuilder) -> Planning:
        """Update ``available`` after all news is sent; pages that the step will request are subtracted."""
        if self._table.has_updates:
            yield from self._update_cache()
            self._available -= step.pages

    def _plan_decodes(self, step: StepBuilder) -> Planning:
        """Add a decode row for every sequence whose next input token is known to the device."""
        rows: list[Sequence] = []
        growers: list[Sequence] = []
        most = self._micro_batch()
        for sequence in self._of_stages(self._of_cohort(self._table.running.values())):
            if len(rows) >= most:
                break
            scheduled = sequence.scheduled
            if sequence.known - scheduled == 1 and sequence.known < sequence.target:
                rows.append(sequence)
                if scheduled + sequence.max_extra >= sequence.capacity:
                    growers.append(sequence)
        if len(growers) > self._available:
            yield from self._refresh_available(step)
        if len(growers) > self._available:
            # The position depends on draft tokens in flight, which are judged soon: no sequence is preempted for it.
            growers = [s for s in growers if not s.max_extra]
            if len(growers) > self._available:
                growers = yield from self._yield_pages(step, growers)
            rows = [s for s in rows if s.serial and (s.scheduled + s.max_extra < s.capacity or s in growers)]
        for sequence in growers:
            step.request(sequence, 1, self._table.page_size)
        self._available -= len(growers)
        step.decodes = rows
        step.budget -= len(rows)
        if self._config.micro_batch is not None:
            step.prefill_rows = min(step.prefill_rows, max(1, most - len(rows)))
        self._turn += 1
        for sequence in rows:
            sequence.scheduled += 1
            sequence.known += 1
            sequence.turn = self._turn
        if self._draft_limits is not None and not self._draft_limits.decode_only:
            self._plan_draft(self._draft_limits, step)

    def _plan_draft(self, limits: DraftLimits, step: StepBuilder) -> None:
        """Assign draft limits to the decodes: before prompts take the rest of the budget, or once it is known that no
        prompt runs."""
        rows = len(step.decodes)
        if not rows or limits.skip(step):
            return
        # At most half of the step while prompts wait or run. No page that another sequence might need in this step or,
        # if each grows by a page, in the next.
        prompts = not limits.decode_only and (self._table.prefilling or self._table.waiting)
        budget = self._config.step_tokens - rows
        wanted_pages = step.pages
        spare = self._available - len(self._table.running)
        limits.assign(step, (budget // 2 if prompts else budget) // rows, spare, self._table.page_size)
        self._available -= step.pages - wanted_pages

    def _yield_pages(
        self, step: StepBuilder, growers: list[Sequence]
    ) -> Generator[CacheMessage, CacheReply, list[Sequence]]:
        """Preempt the weakest sequences until the pages suffice. Returns those of ``growers`` that get a page.

        A sequence that has not progressed since its last preemption is spared, and so is one that ends with the steps
        in flight. So some growers may have to skip this step.
        """
        step.short = True
        self._growth.preempted()
        while len(growers) > self._available:
            victim = self._victim(lambda s: s.progressed and s.known < s.target)
            if victim is None:
                growers = sorted(growers, key=lambda s: (-s.priority, s.arrival_order))[: self._available]
                break
            self._table.preempt(victim)
            growers = [sequence for sequence in growers if sequence is not victim]
            yield from self._refresh_available(step)
        return growers

    def _victim(self, eligible: Callable[[Sequence], bool]) -> Sequence | None:
        """The weakest eligible running sequence; never the strongest of all."""
        running = self._table.running.values()
        strongest = self._policy.strongest(running)
        candidates = [sequence for sequence in running if sequence is not strongest and eligible(sequence)]
        return self._policy.weakest(candidates) if candidates else None

    def _are_owed(self, step: StepBuilder) -> bool:
        """Whether tenants may be admitted before the running prompts of others take the whole step."""
        table = self._table
        return (
            self._config.chunked
            and len(table.prefilling) > 0
            and table.may_admit
            and self._may_join(step)
            and self._policy.are_owed(table.waiting, table.prefilling.values())
        )

    def _admit_within_share(self, step: StepBuilder, first: Sequence | None, now: float) -> Planning:
        """Admit sequences with the part of the budget that is a tenant's where all have a prompt."""
        tenants = len({sequence.tenant for sequence in self._table.prefilling.values()}) + 1
        kept = step.budget - -(-step.budget // _parts(tenants, step))
        step.budget -= kept
        yield from self._admit(step, first, now)
        step.budget += kept

    def _plan_prefills(self, step: StepBuilder) -> Planning:
        """Add the next chunks of running prefills. Tenants get equal parts of the budget, and what others leave; the
        prompts of one tenant run in the order of their admission."""
        groups = self._prefilling(step)
        for number, group in enumerate(groups):
            kept = step.budget - -(-step.budget // _parts(len(groups) - number, step))
            step.budget -= kept
            yield from self._plan_chunks(step, group)
            step.budget += kept

    def _prefilling(self, step: StepBuilder) -> list[list[Sequence]]:
        """The running prefills that the step has no chunk of, by tenant; those with the fewest tokens left first."""
        prefilling = self._of_cohort(self._table.prefilling.values())
        running = [s for s in prefilling if s.id not in step.admitted]
        if not self._policy.has_tenants or not self._config.chunked:
            return [running]
        groups: dict[str, list[Sequence]] = {}
        for sequence in running:
            groups.setdefault(sequence.tenant, []).append(sequence)
        return sorted(groups.values(), key=lambda group: sum(s.known - s.scheduled for s in group))

    def _plan_chunks(self, step: StepBuilder, sequences: Iterable[Sequence]) -> Planning:
        """Add the next chunks of these prefills."""
        for sequence in sequences:
            if step.budget <= 0 or step.prefill_rows <= 0:
                break
            rest = sequence.known - sequence.scheduled
            count = step.chunk(rest)
            pages = -(-(sequence.scheduled + count) // self._table.page_size) - sequence.pages
            if pages > self._available:
                yield from self._refresh_available(step)
            if pages > self._available:
                pages = self._available
                count = min(count, sequence.capacity + pages * self._table.page_size - sequence.scheduled)
                step.short = True
            if count <= 0:
                continue
            self._run_prefill(step, sequence, count, max(pages, 0))

    def _run_prefill(self, step: StepBuilder, sequence: Sequence, count: int, pages: int) -> None:
        if pages > 0:
            step.request(sequence, pages, self._table.page_size)
            self._available -= pages
        step.prefill(sequence, count)
        if sequence.known - sequence.scheduled > 1:
            self._table.prefilling[sequence.id] = sequence
        else:
            self._table.prefilling.pop(sequence.id, None)

    def _of_cohort(self, sequences: Iterable[Sequence]) -> Iterable[Sequence]:
        """The sequences that the current step may run."""
        cohort = self._cohort
        return sequences if cohort is None else [sequence for sequence in sequences if cohort.takes(sequence.id)]

    def _of_stages(self, sequences: Iterable[Sequence]) -> Iterable[Sequence]:
        """Of a pipeline the sequences that no step in flight runs: its first stage does not know their tokens yet. The
        one that has waited longest is first."""
        if self._config.stages == 1:
            return sequences
        free = [sequence for sequence in sequences if sequence.scheduled == sequence.computed]
        return sorted(free, key=lambda sequence: sequence.turn)

    def _micro_batch(self) -> int:
        """The most decodes of a step. The steps in flight of a pipeline divide the running sequences equally."""
        config = self._config
        if config.stages == 1:
            return config.max_running
        flights = config.stages + config.stages_ahead if config.overlap else 1
        return config.micro_batch or max(1, -(-len(self._table.running) // flights))

    def _is_last(self, cohort: Cohort) -> bool:
        """Whether one sequence runs and it is of the cohort: others may continue in the next step."""
        running = self._table.running
        return len(running) == 1 and cohort.takes(next(iter(running)))

    def _end_last(self, step: StepBuilder) -> None:
        """End the last running sequence, which the whole cache cannot hold.

        No step is in flight and no sequence can continue. All have progressed since their admission, so all but the
        strongest have been preempted for it.
        """
        (last,) = self._table.running.values()
        needed = -(-(last.scheduled + 1) // self._table.page_size)
        step.outputs.append(self._table.end(last, too_large(needed, self._total_pages)))

    def _make_room(self, step: StepBuilder) -> Generator[CacheMessage, CacheReply, Sequence | None]:
        """Preempt weak sequences for a waiting one of much higher priority. Returns it, to be admitted first."""
        table = self._table
        if self._cohort is not None:
            return None  # suspects are cleared or condemned soon: none is preempted for a priority
        pressing = self._policy.pressing(table.waiting, table.running.values())
        if pressing is None:
            return None
        if not AdapterPlaces(self._config.max_adapters, table.running.values()).fits(pressing):
            return None  # it waits for a place of its adapter, which no preemption of one sequence frees
        if len(table.running) >= self._config.max_running or not table.slots.free:
            victim = self._victim_of(pressing)
            if victim is None:
                return None
            table.preempt(victim)
            return pressing
        if table.may_admit:
            return None  # there is room: the order of the queue decides
        if self._blocked[0] == pressing.id:
            yield from self._refresh_available(step)
            preempted = table.preemptions
            while self._is_blocked(pressing):
                victim = self._victim_of(pressing)
                if victim is None:
                    break
                table.preempt(victim)
                yield from self._refresh_available(step)
            return pressing if table.preemptions > preempted else None
        blocked = table.sequences.get(self._blocked[0])
        if blocked is not None and blocked.tenant != pressing.tenant:
            return None  # free room belongs to that tenant
        table.may_admit = True  # another sequence did not fit; this one is untried
        return pressing

    def _is_blocked(self, sequence: Sequence) -> bool:
        """Whether this is the sequence that did not fit, and pages are still too few."""
        table = self._table
        if table.reservations is not None and not table.reservations.fits(sequence):
            return True
        return self._blocked[1] + self._growth.pages(table.running.values(), table.page_size) > self._available

    def _victim_of(self, pressing: Sequence) -> Sequence | None:
        candidates = [
            s
            for s in self._table.running.values()
            if s.progressed and s.known < s.target and self._policy.may_preempt(pressing, s)
        ]
        return self._policy.weakest(candidates) if candidates else None

    def _may_join(self, step: StepBuilder) -> bool:
        """Whether the step has a place for one more admission."""
        reserved = 0 if self._cohort is None else self._cohort.reserved
        return (
            step.budget > 0
            and step.prefill_rows > 0
            and len(self._table.running) + reserved < self._config.max_running
            and self._table.slots.free > reserved
            and len(self._table.waiting) > 0
        )

    def _admit(self, step: StepBuilder, first: Sequence | None, now: float) -> Planning:
        """Admit sequences in the policy's order, up to the first that does not fit."""
        config, table, size = self._config, self._table, self._table.page_size
        yield from self._refresh_available(step)
        order = yield from self._order(first, now)
        reserve = self._growth.pages(table.running.values(), size)
        places = AdapterPlaces(config.max_adapters, table.running.values())
        held = 0
        for sequence in self._of_cohort(order):
            if not self._may_join(step) or held >= _MAX_SKIPPED:
                break
            if table.siblings.computes_for(sequence):
                held += 1
                continue
            if not places.fits(sequence):
                continue  # however many there are, those after them may run
            needed = -(-sequence.length // size)
            if needed > self._total_pages:
                step.outputs.append(table.end(sequence, too_large(needed, self._total_pages)))
                continue
            if not config.chunked and step.counts and sequence.length > step.budget:
                break
            if table.running and table.reservations is not None and not table.reservations.fits(sequence):
                table.may_admit = False
                self._blocked = (sequence.id, 0)
                break
            prefix = yield from self._open(sequence)
            self._available = prefix.available - step.pages
            sequence.pages = len(prefix.pages) // 4
            needed = self._growth.pages((sequence,), size)
            if table.running and needed + reserve > self._available:
                table.refuse(sequence)
                self._blocked = (sequence.id, needed)
                break
            table.start(sequence, prefix)
            places.take(sequence)
            step.admitted[sequence.id] = prefix
            count = step.chunk(sequence.known - sequence.scheduled)
            self._run_prefill(step, sequence, count, -(-(sequence.scheduled + count) // size) - sequence.pages)
            reserve += self._growth.pages((sequence,), size)

    def _order(self, first: Sequence | None, now: float) -> Generator[CacheMessage, CacheReply, Iterable[Sequence]]:
        cached: list[int] | None = None
        if self._policy.wants_prefixes(self._table.waiting):
            reply = yield PeekPrefixes(
                tokens=tuple([sequence.tokens() for sequence in self._table.waiting]),
                salts=tuple([sequence.spec.salt for sequence in self._table.waiting]),
            )
            if not isinstance(reply, list):
                raise TypeError(f"a PeekPrefixes was answered with {type(reply).__name__}")
            cached = reply
        order = self._policy.order(self._table.waiting, self._table.running.values(), now, cached)
        if first is not None:
            return itertools.chain((first,), (sequence for sequence in order if sequence is not first))
        return order

    def _open(self, sequence: Sequence) -> Generator[CacheMessage, CacheReply, PrefixMatch]:
        prefix = yield OpenSequence(
            sequence=sequence.id,
            tokens=sequence.tokens(),
            salt=sequence.spec.salt,
            use_cache=not sequence.scores_prompt,
        )
        if not isinstance(prefix, PrefixMatch):
            raise TypeError(f"an OpenSequence was answered with {type(prefix).__name__}")
        return prefix
