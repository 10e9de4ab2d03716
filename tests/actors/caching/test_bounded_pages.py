"""Bounded cache groups beside the main pages: what is shared, given back, evicted and refused."""

import msgspec
import numpy as np
import pytest

from actors.caching import CacheCorrupted, PrefixCache
from actors.caching.bounded_pages import BoundedPages
from actors.protocol import AllocatePages, CacheUpdate, CommitTokens, OpenSequence, PeekPrefixes
from kernels.contract.caches import CacheGroup, GroupPages, Paged, State, Window

PAGE = 2


def pack(ids):
    return np.array(list(ids), dtype=np.int32).tobytes()


def unpack(data):
    return np.frombuffer(data, dtype=np.int32).tolist()


def window(tokens, pages=20):
    return GroupPages(CacheGroup(Window(Paged(1, 1, 1), tokens), (0,)), pages + 1, PAGE)


def state(every, pages=20):
    return GroupPages(CacheGroup(State(((1,),)), (0,)), pages + 1, every * PAGE)


def make(*groups, pages=40, **options):
    return PrefixCache(pages + 1, PAGE, bounded=groups, **options)


def run(cache, number, ids, *, salt=b""):
    """A sequence of these tokens from its beginning to its end; returns its cached prefix."""
    prefix = cache.open(OpenSequence(sequence=number, tokens=pack(ids), salt=salt))
    pages = -(-(len(ids) - prefix.cached) // PAGE)
    cache.update(CacheUpdate(allocations=(AllocatePages(number, pages),)))
    cache.update(CacheUpdate(commits=(CommitTokens(number, b"", len(ids)),), closed=(number,)))
    cache.check()
    return prefix


def test_a_window_needs_only_its_last_pages():
    cache = make(window(3))
    run(cache, 0, range(10))
    prefix = run(cache, 1, [*range(10), 50])
    (held,) = prefix.bounded
    assert prefix.cached == 10
    assert (held.first, len(unpack(held.pages))) == (4, 1)  # tokens 8 and 9 are the two before the next


def test_columns_outside_the_window_are_released_while_a_sequence_runs():
    cache = make(window(5), enabled=False)
    cache.open(OpenSequence(sequence=0, tokens=pack(range(30))))
    cache.update(CacheUpdate(allocations=(AllocatePages(0, 15),)))
    assert cache.usage().bounded[0].used == 15
    for computed, used in ((4, 15), (6, 14), (17, 9), (29, 3)):
        cache.update(CacheUpdate(commits=(CommitTokens(0, b"", computed),)))
        cache.check()
        assert cache.usage().bounded[0].used == used
    assert cache.usage().used == 15
    cache.update(CacheUpdate(closed=(0,)))
    assert cache.usage().bounded[0].free == 20


def test_a_prefix_of_a_state_ends_at_a_snapshot():
    cache = make(state(3))
    run(cache, 0, range(15))
    assert cache.usage().bounded[0].evictable == 2  # after tokens 6 and 12; the state after 15 is no snapshot
    assert cache.peek(PeekPrefixes(tokens=(pack(range(12)), pack(range(13))), salts=(b"", b""))) == [6, 12]
    prefix = run(cache, 1, range(12))
    assert prefix.cached == 6
    assert [(held.first, len(unpack(held.pages))) for held in prefix.bounded] == [(0, 1)]


def test_every_group_must_be_able_to_go_on():
    cache = make(window(4), state(2), state(3))
    run(cache, 0, range(40))
    prefix = run(cache, 1, range(40))
    assert prefix.cached == 36  # the last multiple of 4 and 6


def test_a_prefix_ends_before_a_page_that_was_evicted():
    cache = make(window(5, pages=6), pages=40)
    run(cache, 0, range(12))
    run(cache, 1, range(100, 106))  # takes three pages, the first ones of the window group
    assert cache.usage().bounded[0].evicted == 3
    assert cache.peek(PeekPrefixes(tokens=(pack(range(9)), pack(range(13))), salts=(b"", b""))) == [0, 12]


def test_prefixes_of_another_salt_are_not_shared():
    cache = make(window(3))
    run(cache, 0, range(10), salt=b"one")
    assert run(cache, 1, range(10), salt=b"two").cached == 0


def test_a_shared_page_is_held_until_the_last_sequence_closes():
    cache = make(window(9, pages=5))
    run(cache, 0, range(8))
    for number in (1, 2):
        assert cache.open(OpenSequence(sequence=number, tokens=pack(range(9)))).cached == 8
    assert cache.usage().bounded[0].used == 4
    cache.update(CacheUpdate(closed=(1,)))
    assert cache.usage().bounded[0].used == 4
    cache.update(CacheUpdate(closed=(2,)))
    assert cache.usage().bounded[0].used == 0
    cache.check()


def test_a_flush_frees_every_page():
    cache = make(window(3), state(2))
    run(cache, 0, range(20))
    assert cache.flush()
    assert [group.free for group in cache.usage().bounded] == [20, 20]
    cache.check()


def test_more_pages_than_there_are_is_a_defect_of_the_scheduler():
    cache = make(window(30, pages=3))
    cache.open(OpenSequence(sequence=0, tokens=pack(range(30))))
    with pytest.raises(CacheCorrupted, match="all 3 pages of a window group"):
        cache.update(CacheUpdate(allocations=(AllocatePages(0, 4),)))


def test_groups_that_do_not_fit_the_main_pages_are_refused():
    with pytest.raises(ValueError, match="no multiple"):
        BoundedPages(PAGE, (msgspec.structs.replace(state(1), page_tokens=3),))
    with pytest.raises(ValueError, match="--max-total-tokens"):
        BoundedPages(PAGE, (window(3, pages=0),))
