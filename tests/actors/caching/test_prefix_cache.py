import numpy as np
import pytest

from actors.caching import CacheCorrupted, PrefixCache
from actors.protocol import AllocatePages, CacheUpdate, CommitTokens, OpenSequence, PeekPrefixes


def pack(ids):
    return np.array(list(ids), dtype=np.int32).tobytes()


def unpack(data):
    return np.frombuffer(data, dtype=np.int32).tolist()


def run(cache, sequence, ids, **kwargs):
    """A sequence that computes ``ids`` and stays open; its pages."""
    prefix = cache.open(OpenSequence(sequence=sequence, tokens=pack(ids), **kwargs))
    pages = unpack(prefix.pages)
    needed = -(-len(ids) // 4) - len(pages)
    done = cache.update(CacheUpdate(allocations=(AllocatePages(sequence, needed),)))
    pages += unpack(done.allocated[0].pages)
    cache.update(CacheUpdate(commits=(CommitTokens(sequence, b"", len(ids)),)))
    cache.check()
    return pages


def close(cache, *sequences):
    done = cache.update(CacheUpdate(closed=sequences))
    cache.check()
    return done.available


def test_a_second_turn_finds_the_first():
    cache = PrefixCache(17, 4)
    pages = run(cache, 1, range(10))
    assert close(cache, 1) == 16
    prefix = cache.open(OpenSequence(sequence=2, tokens=pack(range(12))))
    assert (unpack(prefix.pages), prefix.cached, prefix.available) == (pages[:2], 8, 14)
    usage = cache.usage()
    assert (usage.queried_tokens, usage.hit_tokens, usage.sequences) == (22, 8, 1)
    assert usage.free + usage.evictable + usage.used == usage.total == 16


@pytest.mark.parametrize(("length", "cached"), [(8, 4), (9, 8), (4, 0), (5, 4), (1, 0)])
def test_a_token_is_always_left_to_compute(length, cached):
    cache = PrefixCache(17, 4)
    run(cache, 1, range(8))
    assert cache.peek(PeekPrefixes(tokens=(pack(range(length)),), salts=(b"",))) == [cached]
    assert cache.open(OpenSequence(sequence=2, tokens=pack(range(length)))).cached == cached


def test_without_use_cache_every_position_is_computed_again():
    cache = PrefixCache(17, 4)
    first = run(cache, 1, range(8))
    second = run(cache, 2, range(8), use_cache=False)
    assert not set(first) & set(second)
    assert close(cache, 1, 2) == 16
    assert cache.usage().evictable == 2  # the duplicates were freed


def test_a_commit_never_lowers_what_is_available():
    cache = PrefixCache(9, 4)
    run(cache, 1, range(16))
    close(cache, 1)
    cache.open(OpenSequence(sequence=2, tokens=pack(range(16)), use_cache=False))
    granted = cache.update(CacheUpdate(allocations=(AllocatePages(2, 4),)))
    assert granted.available == 4
    assert cache.update(CacheUpdate(commits=(CommitTokens(2, b"", 16),))).available == 4
    cache.check()


def test_what_a_close_frees_is_there_for_the_same_turn_s_grow():
    cache = PrefixCache(5, 4)
    run(cache, 1, range(16))
    cache.open(OpenSequence(sequence=2, tokens=pack([9])))
    done = cache.update(CacheUpdate(closed=(1,), allocations=(AllocatePages(2, 4),)))
    assert sorted(unpack(done.allocated[0].pages)) == [1, 2, 3, 4]
    assert done.available == 0
    assert cache.usage().evicted_pages == 4
    cache.check()


def test_a_page_half_computed_is_not_shared():
    cache = PrefixCache(9, 4)
    cache.open(OpenSequence(sequence=1, tokens=pack(range(8))))
    cache.update(CacheUpdate(allocations=(AllocatePages(1, 2),)))
    cache.update(CacheUpdate(commits=(CommitTokens(1, b"", 6),)))
    assert cache.open(OpenSequence(sequence=2, tokens=pack(range(9)))).cached == 4
    close(cache, 1, 2)
    assert cache.usage().evictable == 1


def test_output_joins_the_prefix():
    cache = PrefixCache(9, 4)
    cache.open(OpenSequence(sequence=1, tokens=pack(range(3))))
    cache.update(CacheUpdate(allocations=(AllocatePages(1, 2),)))
    cache.update(CacheUpdate(commits=(CommitTokens(1, pack([3, 4]), 4),)))
    cache.check()
    assert cache.peek(PeekPrefixes(tokens=(pack(range(5)),), salts=(b"",))) == [4]


def test_off_means_nothing_is_shared_or_kept():
    cache = PrefixCache(9, 4, enabled=False)
    run(cache, 1, range(8))
    assert cache.open(OpenSequence(sequence=2, tokens=pack(range(9)))).cached == 0
    assert close(cache, 1, 2) == 8
    assert cache.usage().free == 8
    assert cache.flush()


def test_flush_waits_for_open_sequences():
    cache = PrefixCache(9, 4)
    run(cache, 1, range(8))
    assert not cache.flush()
    close(cache, 1)
    assert cache.flush()
    assert cache.usage().free == 8


def test_reset_forgets_sequences_and_prefixes():
    cache = PrefixCache(9, 4)
    run(cache, 1, range(8))
    cache.reset(5, 8)
    cache.check()
    assert (cache.usage().total, cache.usage().used, cache.usage().sequences) == (4, 0, 0)
    assert cache.open(OpenSequence(sequence=1, tokens=pack(range(8)))).cached == 0


def test_opening_twice_is_refused():
    cache = PrefixCache(9, 4)
    cache.open(OpenSequence(sequence=1, tokens=pack([1])))
    with pytest.raises(ValueError, match="sequence 1 is open already"):
        cache.open(OpenSequence(sequence=1, tokens=pack([1])))


def test_a_sequence_that_is_not_open_gets_nothing():
    cache = PrefixCache(9, 4)
    for message in (
        CacheUpdate(closed=(3,)),
        CacheUpdate(allocations=(AllocatePages(3, 1),)),
        CacheUpdate(commits=(CommitTokens(3, b"", 0),)),
    ):
        with pytest.raises(ValueError, match="sequence 3 is not open"):
            cache.update(message)


@pytest.mark.parametrize("computed", [9, 5])
def test_a_commit_of_more_than_is_known_or_held_is_refused(computed):
    cache = PrefixCache(9, 4)
    cache.open(OpenSequence(sequence=1, tokens=pack(range(8))))
    cache.update(CacheUpdate(allocations=(AllocatePages(1, 1),)))
    with pytest.raises(CacheCorrupted, match="commits"):
        cache.update(CacheUpdate(commits=(CommitTokens(1, b"", computed),)))
