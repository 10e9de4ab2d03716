"""How a step is filled: decodes, then chunks of running prefills, then sequences from the queue."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias

from actors.protocol import CacheTurn, CacheTurnDone, Ended, Grant, Grow, Lease, OpenSequence, PeekPrefixes
from actors.scheduling.config import PlannerConfig
from actors.scheduling.draft import Draft
from actors.scheduling.growth import GrowthReserve
from actors.scheduling.guessing import Guessing
from actors.scheduling.policy import Policy
from actors.scheduling.roster import Roster
from actors.scheduling.sequence import Sequence
from actors.scheduling.suspects import Cohort

__all__ = ["CacheMessage", "CacheReply", "StepPlanning", "too_large"]

CacheMessage: TypeAlias = OpenSequence | CacheTurn | PeekPrefixes
CacheReply: TypeAlias = Lease | CacheTurnDone | list[int]
Planning: TypeAlias = Generator[CacheMessage, CacheReply, None]

_MOST_HELD = 64  # sequences of the queue passed over in one step because their prefix is being computed
_RETRY_STEPS = 32  # a queue whose head did not fit is looked at again after so many steps, whatever happened


def too_large(pages: int, total: int) -> Ended:
    """The end of a sequence that no cache of this size can hold."""
    return Ended(
        "error",
        message=f"the sequence needs {pages} pages, the cache has {total}: "
        "raise --max-total-tokens or shorten the request",
    )


class StepPlanning:
    """Fills drafts, one after the other. ``available`` is what the cache last said it can give, less what was asked."""

    def __init__(self, config: PlannerConfig, policy: Policy, roster: Roster) -> None:
        self._config = config
        self._policy = policy
        self._roster = roster
        self._growth = GrowthReserve(config.conservativeness)
        self._total_pages = 0
        self._available = 0
        self._steps = 0
        self._blocked = (-1, 0)  # the sequence that did not fit, and the pages it needs
        self._guessing: Guessing | None = None
        self._cohort: Cohort | None = None  # of the draft in hand

    def new_worker(self, total_pages: int, guessing: Guessing | None) -> None:
        """The cache is empty, of this size. ``guessing``: of a worker that makes guesses."""
        self._total_pages = self._available = total_pages
        self._guessing = guessing
        self._blocked = (-1, 0)

    def fill(
        self, now: float, *, idle: bool, cohort: Cohort | None = None
    ) -> Generator[CacheMessage, CacheReply, tuple[Draft, tuple[Grant, ...]]]:
        """The next draft and the pages for it. ``idle``: nothing is in flight, so that waiting for it will not help.
        ``cohort``: the only sequences that it may run; None: all."""
        config, roster = self._config, self._roster
        self._cohort = cohort
        draft = Draft(config.step_tokens, config.prefill_max_requests or config.max_running, config.tail_tokens)
        first = yield from self._make_room(draft)
        yield from self._plan_decodes(draft)
        draft.limit_prefills(config.max_prefill_tokens)
        yield from self._plan_prefills(draft)
        if idle and draft.empty and roster.running and (cohort is None or self._is_last(cohort)):
            self._end_last(draft)
        if self._may_join(draft) and (roster.may_admit or not roster.running):
            yield from self._admit(draft, first, now)
        if self._guessing is not None and self._guessing.apart and not draft.counts:
            self._plan_guesses(self._guessing, draft)
        if self._guessing is not None:
            draft.unseen = self._guessing.unseen
        grants: tuple[Grant, ...] = ()
        if draft.grows or roster.has_news:
            grants = (yield from self._turn(tuple(draft.grows))).grants
        self._steps += 1
        if self._steps % _RETRY_STEPS == 0:
            roster.may_admit = True
        if not draft.short:
            self._growth.step()
        return draft, grants

    def _turn(self, grows: tuple[Grow, ...] = ()) -> Generator[CacheMessage, CacheReply, CacheTurnDone]:
        """Tell the cache what was computed and who left, and ask for pages."""
        commits, closes = self._roster.news()
        done = yield CacheTurn(commits=commits, closes=closes, grows=grows)
        if not isinstance(done, CacheTurnDone):
            raise TypeError(f"a CacheTurn was answered with {type(done).__name__}")
        self._available = done.available
        return done

    def _settle(self, draft: Draft) -> Planning:
        """Learn how many pages there are, with everything told; those the draft will ask for are not counted."""
        if self._roster.has_news:
            yield from self._turn()
            self._available -= draft.pages

    def _plan_decodes(self, draft: Draft) -> Planning:
        """A token for every sequence whose next input is known, to the device at least."""
        rows: list[Sequence] = []
        growers: list[Sequence] = []
        for sequence in self._of_cohort(self._roster.running.values()):
            scheduled = sequence.scheduled
            if sequence.known - scheduled == 1 and sequence.known < sequence.target:
                rows.append(sequence)
                if scheduled + sequence.ahead >= sequence.capacity:
                    growers.append(sequence)
        if len(growers) > self._available:
            yield from self._settle(draft)
        if len(growers) > self._available:
            # Who may have got so far only if guesses in flight are right will know soon: nobody has to go for that.
            growers = [s for s in growers if not s.ahead]
            if len(growers) > self._available:
                growers = yield from self._yield_pages(draft, growers)
            rows = [s for s in rows if s.serial and (s.scheduled + s.ahead < s.capacity or s in growers)]
        for sequence in growers:
            draft.grow(sequence, 1, self._roster.page_size)
        self._available -= len(growers)
        draft.decodes = rows
        draft.budget -= len(rows)
        for sequence in rows:
            sequence.scheduled += 1
            sequence.known += 1
        if self._guessing is not None and not self._guessing.apart:
            self._plan_guesses(self._guessing, draft)

    def _plan_guesses(self, guessing: Guessing, draft: Draft) -> None:
        """What the draft's decodes may verify. Beside prompts it is decided before these take what is left of the
        step, else once it is known that there are none."""
        rows = len(draft.decodes)
        if not rows or guessing.rests(draft):
            return
        # No more than half of the step while others have prompts to run; no page that somebody else might need in this
        # step or, while all go on by a page, in the next.
        prompts = not guessing.apart and (self._roster.prefilling or self._roster.waiting)
        budget = self._config.step_tokens - rows
        asked = draft.pages
        spare = self._available - len(self._roster.running)
        guessing.allow(draft, (budget // 2 if prompts else budget) // rows, spare, self._roster.page_size)
        self._available -= draft.pages - asked

    def _yield_pages(
        self, draft: Draft, growers: list[Sequence]
    ) -> Generator[CacheMessage, CacheReply, list[Sequence]]:
        """Too few pages: the weakest are preempted. Returns those of ``growers`` that get a page.

        Who has been preempted and has not got on since is spared, and so is who will end with the steps in flight; so
        it may be that some growers have to sit out this step.
        """
        draft.short = True
        self._growth.preempted()
        while len(growers) > self._available:
            victim = self._victim(lambda s: s.progressed and s.known < s.target)
            if victim is None:
                growers = sorted(growers, key=lambda s: (-s.strength, s.rank))[: self._available]
                break
            self._roster.preempt(victim)
            growers = [sequence for sequence in growers if sequence is not victim]
            yield from self._settle(draft)
        return growers

    def _victim(self, eligible: Callable[[Sequence], bool]) -> Sequence | None:
        """The weakest eligible running sequence; the strongest of all is none."""
        running = self._roster.running.values()
        strongest = self._policy.strongest(running)
        candidates = [sequence for sequence in running if sequence is not strongest and eligible(sequence)]
        return self._policy.weakest(candidates) if candidates else None

    def _plan_prefills(self, draft: Draft) -> Planning:
        """The next chunks of running prefills, in the order of their admission."""
        for sequence in list(self._of_cohort(self._roster.prefilling.values())):
            if draft.budget <= 0 or draft.prefill_rows <= 0:
                break
            rest = sequence.known - sequence.scheduled
            count = draft.chunk(rest)
            pages = -(-(sequence.scheduled + count) // self._roster.page_size) - sequence.pages
            if pages > self._available:
                yield from self._settle(draft)
            if pages > self._available:
                pages = self._available
                count = min(count, sequence.capacity + pages * self._roster.page_size - sequence.scheduled)
                draft.short = True
            if count <= 0:
                continue
            self._run_prefill(draft, sequence, count, max(pages, 0))

    def _run_prefill(self, draft: Draft, sequence: Sequence, count: int, pages: int) -> None:
        if pages > 0:
            draft.grow(sequence, pages, self._roster.page_size)
            self._available -= pages
        draft.prefill(sequence, count)
        if sequence.known - sequence.scheduled > 1:
            self._roster.prefilling[sequence.id] = sequence
        else:
            self._roster.prefilling.pop(sequence.id, None)

    def _of_cohort(self, sequences: Iterable[Sequence]) -> Iterable[Sequence]:
        """Those that the draft in hand may run."""
        cohort = self._cohort
        return sequences if cohort is None else [sequence for sequence in sequences if cohort.takes(sequence.id)]

    def _is_last(self, cohort: Cohort) -> bool:
        """Whether one sequence runs, and it is of the cohort: others may go on in the next step."""
        running = self._roster.running
        return len(running) == 1 and cohort.takes(next(iter(running)))

    def _end_last(self, draft: Draft) -> None:
        """Nothing is in flight, and nothing can go on. All that run have got on since they were admitted, so that those
        beside the strongest have been preempted for it; and the whole cache is too small for that one."""
        (last,) = self._roster.running.values()
        needed = -(-(last.scheduled + 1) // self._roster.page_size)
        draft.emissions.append(self._roster.end(last, too_large(needed, self._total_pages)))

    def _make_room(self, draft: Draft) -> Generator[CacheMessage, CacheReply, Sequence | None]:
        """A waiting sequence of much higher priority takes the place of weak ones. Returns it, to be admitted first."""
        roster = self._roster
        if self._cohort is not None:
            return None  # no priority is worth the place of a sequence that is cleared, or condemned, soon
        pressing = self._policy.pressing(roster.waiting, roster.running.values())
        if pressing is None:
            return None
        if len(roster.running) >= self._config.max_running or not roster.slots.free:
            victim = self._victim_of(pressing)
            if victim is None:
                return None
            roster.preempt(victim)
            return pressing
        if roster.may_admit:
            return None  # there is room, and the queue's own order says for whom
        if self._blocked[0] == pressing.id:
            yield from self._settle(draft)
            preempted = roster.preemptions
            while self._blocked[1] + self._growth.pages(roster.running.values(), roster.page_size) > self._available:
                victim = self._victim_of(pressing)
                if victim is None:
                    break
                roster.preempt(victim)
                yield from self._settle(draft)
            return pressing if roster.preemptions > preempted else None
        blocked = roster.sequences.get(self._blocked[0])
        if blocked is not None and blocked.tenant != pressing.tenant:
            return None  # room that comes free is for that tenant
        roster.may_admit = True  # another one is known not to fit: this one has yet to be tried
        return pressing

    def _victim_of(self, pressing: Sequence) -> Sequence | None:
        candidates = [
            s
            for s in self._roster.running.values()
            if s.progressed and s.known < s.target and self._policy.may_preempt(pressing, s)
        ]
        return self._policy.weakest(candidates) if candidates else None

    def _may_join(self, draft: Draft) -> bool:
        """Whether the step has a place for one more admission."""
        reserved = 0 if self._cohort is None else self._cohort.reserved
        return (
            draft.budget > 0
            and draft.prefill_rows > 0
            and len(self._roster.running) + reserved < self._config.max_running
            and self._roster.slots.free > reserved
            and len(self._roster.waiting) > 0
        )

    def _admit(self, draft: Draft, first: Sequence | None, now: float) -> Planning:
        """Sequences from the queue, in the policy's order. One that does not fit is not overtaken."""
        config, roster, size = self._config, self._roster, self._roster.page_size
        yield from self._settle(draft)
        order = yield from self._order(first, now)
        reserve = self._growth.pages(roster.running.values(), size)
        held = 0
        for sequence in self._of_cohort(order):
            if not self._may_join(draft) or held >= _MOST_HELD:
                break
            if roster.siblings.computes_for(sequence):
                held += 1
                continue
            needed = -(-sequence.length // size)
            if needed > self._total_pages:
                draft.emissions.append(roster.end(sequence, too_large(needed, self._total_pages)))
                continue
            if not config.chunked and draft.counts and sequence.length > draft.budget:
                break
            lease = yield from self._open(sequence)
            self._available = lease.available - draft.pages
            sequence.pages = len(lease.pages) // 4
            own = self._growth.pages((sequence,), size)
            if roster.running and own + reserve > self._available:
                roster.refuse(sequence)
                self._blocked = (sequence.id, own)
                break
            roster.start(sequence, lease)
            draft.admitted[sequence.id] = lease.pages
            count = draft.chunk(sequence.known - sequence.scheduled)
            self._run_prefill(draft, sequence, count, -(-(sequence.scheduled + count) // size) - sequence.pages)
            reserve += self._growth.pages((sequence,), size)

    def _order(self, first: Sequence | None, now: float) -> Generator[CacheMessage, CacheReply, Iterable[Sequence]]:
        cached: list[int] | None = None
        if self._policy.wants_prefixes(self._roster.waiting):
            reply = yield PeekPrefixes(
                tokens=tuple([sequence.tokens() for sequence in self._roster.waiting]),
                salts=tuple([sequence.spec.salt for sequence in self._roster.waiting]),
            )
            if not isinstance(reply, list):
                raise TypeError(f"a PeekPrefixes was answered with {type(reply).__name__}")
            cached = reply
        order = self._policy.order(self._roster.waiting, self._roster.running.values(), now, cached)
        if first is not None:
            return itertools.chain((first,), (sequence for sequence in order if sequence is not first))
        return order

    def _open(self, sequence: Sequence) -> Generator[CacheMessage, CacheReply, Lease]:
        lease = yield OpenSequence(
            sequence=sequence.id,
            tokens=sequence.tokens(),
            salt=sequence.spec.salt,
            use_cache=not sequence.scores_prompt,
        )
        if not isinstance(lease, Lease):
            raise TypeError(f"an OpenSequence was answered with {type(lease).__name__}")
        return lease
