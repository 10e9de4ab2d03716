"""Random traffic over the prefix cache, against a model that remembers what every page contains."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.caching import PrefixCache
from actors.protocol import AllocatePages, CacheUpdate, CommitTokens, OpenSequence, PeekPrefixes
from kernels.contract.caches import CacheGroup, GroupPages, Paged, State, Window

PAGE = 2
TOTAL = 12


def pack(ids):
    return np.array(ids, dtype=np.int32).tobytes()


def unpack(data):
    return np.frombuffer(data, dtype=np.int32).tolist()


class Holder:
    def __init__(self, salt, ids, pages, computed):
        self.salt, self.ids, self.pages, self.computed = salt, ids, pages, computed
        self.reported = len(ids)


class CacheTraffic(RuleBasedStateMachine):
    groups = ()

    def __init__(self):
        super().__init__()
        self.cache = PrefixCache(TOTAL + 1, PAGE, bounded=self.groups)
        self.holders = {}
        self.contents = {}  # page -> (salt, tokens up to its end)
        self.available = TOTAL
        self.next = 0

    salts = st.sampled_from([b"", b"s"])
    words = st.lists(st.integers(0, 1), min_size=1, max_size=12)

    @rule(ids=words, salt=salts, use_cache=st.booleans())
    def open(self, ids, salt, use_cache):
        peeked = self.cache.peek(PeekPrefixes(tokens=(pack(ids),), salts=(salt,)))[0]
        prefix = self.cache.open(OpenSequence(sequence=self.next, tokens=pack(ids), salt=salt, use_cache=use_cache))
        pages = unpack(prefix.pages)
        assert prefix.cached == (peeked if use_cache else 0) == len(pages) * PAGE
        assert prefix.cached < len(ids)
        for index, page in enumerate(pages):
            assert self.contents[page] == (salt, ids[: (index + 1) * PAGE])
        self.holders[self.next] = Holder(salt, list(ids), pages, prefix.cached)
        self.available = prefix.available
        self.next += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def work(self, data):
        """One turn as a step makes it: some commit, some close, some grow, all in one message."""
        commits, closed, allocations = [], [], []
        room = self.available
        for sequence, holder in list(self.holders.items()):
            action = data.draw(st.sampled_from(["none", "commit", "close", "grow", "grow"]), label=f"{sequence}")
            if action in ("commit", "close"):
                known = min(len(holder.ids), len(holder.pages) * PAGE)
                holder.computed = data.draw(st.integers(holder.computed, max(known, holder.computed)))
                for index, page in enumerate(holder.pages[: holder.computed // PAGE]):
                    self.contents[page] = (holder.salt, holder.ids[: (index + 1) * PAGE])
                commits.append(CommitTokens(sequence, pack(holder.ids[holder.reported :]), holder.computed))
                holder.reported = len(holder.ids)
            if action == "close":
                closed.append(sequence)
                del self.holders[sequence]
            if action == "grow" and room:
                count = data.draw(st.integers(1, min(room, 3)))
                room -= count
                allocations.append(AllocatePages(sequence, count))
                holder.ids += data.draw(st.lists(st.integers(0, 1), max_size=PAGE * count))
        done = self.cache.update(
            CacheUpdate(commits=tuple(commits), closed=tuple(closed), allocations=tuple(allocations))
        )
        assert done.available >= room
        for request, reply in zip(allocations, done.allocated, strict=True):
            pages = unpack(reply.pages)
            assert len(pages) == request.pages
            held = {page for holder in self.holders.values() for page in holder.pages}
            assert not held & set(pages)
            for page in pages:
                self.contents.pop(page, None)  # about to be written
            self.holders[reply.sequence].pages += pages
        self.available = done.available

    @rule()
    def flush(self):
        self.cache.flush()
        assert self.cache.usage().evictable == 0

    @rule()
    def reset(self):
        self.cache.reset(TOTAL + 1, PAGE, self.groups)
        self.holders.clear()
        self.contents.clear()
        self.available = TOTAL

    @invariant()
    def sound(self):
        self.cache.check()
        usage = self.cache.usage()
        assert usage.free + usage.evictable + usage.used == usage.total == TOTAL
        assert usage.free + usage.evictable == self.available
        assert usage.sequences == len(self.holders)
        if not self.holders:
            assert usage.used == 0

    def teardown(self):
        self.cache.update(CacheUpdate(closed=tuple(self.holders)))
        self.cache.check()
        assert self.cache.usage().used == 0
        assert self.cache.flush()
        assert self.cache.usage().free == TOTAL
        assert all(group.free == group.total for group in self.cache.usage().bounded)


class BoundedCacheTraffic(CacheTraffic):
    """The same beside a window and a state, with pages for all that many holders can hold."""

    groups = (
        GroupPages(CacheGroup(Window(Paged(1, 1, 1), 3), (0,)), 400, PAGE),
        GroupPages(CacheGroup(State(((1,),)), (1,)), 400, 2 * PAGE),
    )


TestCacheTraffic = CacheTraffic.TestCase
TestCacheTraffic.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
TestBoundedCacheTraffic = BoundedCacheTraffic.TestCase
TestBoundedCacheTraffic.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
