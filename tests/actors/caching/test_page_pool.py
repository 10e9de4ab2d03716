import pytest

from actors.caching.page_pool import TREE, CacheCorrupted, PagePool


def test_pages_are_allocated_once_and_released():
    pool = PagePool(5)
    first, second = pool.allocate(3, owner=7), pool.allocate(1, owner=8)
    assert sorted(first + second) == [1, 2, 3, 4]
    assert pool.free == 0
    pool.release(first, 7)
    assert pool.free == 3
    assert pool.owned() == {8: second}
    pool.check()


def test_page_zero_is_never_allocated():
    assert 0 not in PagePool(9).allocate(8, owner=1)


def test_more_than_free_is_refused_and_nothing_is_taken():
    pool = PagePool(3)
    with pytest.raises(CacheCorrupted, match="3 pages requested, 2 are free"):
        pool.allocate(3, owner=1)
    assert pool.free == 2


def test_only_the_owner_gives_a_page_away():
    pool = PagePool(4)
    pages = pool.allocate(1, owner=1)
    with pytest.raises(CacheCorrupted, match="belongs to 1, not to 2"):
        pool.release(pages, 2)
    pool.transfer(pages, 1, TREE)
    with pytest.raises(CacheCorrupted, match="belongs to -1, not to 1"):
        pool.release(pages, 1)
    pool.release(pages, TREE)
    with pytest.raises(CacheCorrupted):
        pool.release(pages, TREE)


@pytest.mark.parametrize("page", [0, -1, 99])
def test_a_page_that_does_not_exist_belongs_to_no_sequence(page):
    with pytest.raises(CacheCorrupted):
        PagePool(4).release([page], 1)


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="max-total-tokens"):
        PagePool(1)
