import numpy as np

from actors.caching.radix_tree import RadixTree


def tokens(*pages):
    """Pages of two tokens each, distinguished by a letter."""
    return np.array([[ord(p), 0] for p in "".join(pages)], dtype=np.int32).tobytes()


def leave(tree, word, pages, salt=b""):
    """A prefix computed by somebody who is gone."""
    root, _ = tree.acquire(salt, b"", 0)
    return tree.leave(root, tokens(word), list(pages))


def test_the_longest_prefix_is_found_and_capped():
    tree = RadixTree(2)
    assert leave(tree, "abcd", [1, 2, 3, 4]) == []
    assert tree.peek(b"", tokens("abxy"), 9) == 2
    assert tree.peek(b"", tokens("abcd"), 3) == 3
    assert tree.peek(b"", tokens("b"), 9) == 0
    assert tree.peek(b"", tokens("aba"), 9) == 2  # where a prefix ends, another does not begin
    node, pages = tree.acquire(b"", tokens("abcz"), 9)
    assert pages == [1, 2, 3]
    assert (tree.size, tree.evictable) == (4, 1)
    tree.check([node])
    tree.release(node)
    assert tree.evictable == 4
    tree.check([])


def test_salts_are_worlds_apart_and_leave_no_root_behind():
    tree = RadixTree(2)
    leave(tree, "ab", [1, 2], salt=b"tenant")
    assert tree.peek(b"", tokens("ab"), 9) == 0
    assert tree.peek(b"tenant", tokens("ab"), 9) == 2
    assert sorted(tree.evict(9)) == [1, 2]
    assert list(tree.walk()) == []


def test_the_pages_of_a_latecomer_are_its_duplicates():
    tree = RadixTree(2)
    one, _ = tree.acquire(b"", b"", 0)
    two, _ = tree.acquire(b"", b"", 0)
    one, taken, displaced = tree.extend(one, tokens("ab"), [1, 2])
    assert (taken, displaced) == (2, [])
    two, taken, displaced = tree.extend(two, tokens("abc"), [3, 4, 5])
    assert (taken, displaced) == (0, [])  # held by one: two goes on with its own pages
    tree.check([one, two])
    assert tree.leave(two, tokens("abc"), [3, 4, 5]) == [3, 4]  # the third page is news to the tree
    assert tree.peek(b"", tokens("abc"), 9) == 3
    tree.check([one])


def test_unheld_pages_give_way_to_a_runner_s_own():
    tree = RadixTree(2)
    leave(tree, "abc", [1, 2, 3])
    node, _ = tree.acquire(b"", b"", 0)
    node, taken, displaced = tree.extend(node, tokens("abx"), [4, 5, 6])
    assert (taken, displaced) == (3, [1, 2])
    assert tree.path_pages(node) == [4, 5, 6]
    assert (tree.size, tree.evictable) == (4, 1)
    tree.check([node])


def test_a_growing_sequence_makes_no_chain_of_nodes():
    tree = RadixTree(2)
    node, _ = tree.acquire(b"", b"", 0)
    for index, letter in enumerate("abcdefgh"):
        node, _, _ = tree.extend(node, tokens(letter), [index + 1])
    assert len(list(tree.walk())) == 2
    tree.check([node])


def test_a_shared_leaf_is_not_extended_in_place():
    tree = RadixTree(2)
    leave(tree, "a", [1])
    one, _ = tree.acquire(b"", tokens("a"), 1)
    two, _ = tree.acquire(b"", tokens("a"), 1)
    one, _, _ = tree.extend(one, tokens("b"), [2])
    assert tree.path_pages(two) == [1]
    tree.release(one)
    assert tree.evictable == 1
    tree.check([two])


def test_the_least_recently_used_goes_first_and_from_its_end():
    tree = RadixTree(2)
    leave(tree, "abc", [1, 2, 3])
    leave(tree, "xyz", [4, 5, 6])
    node, _ = tree.acquire(b"", tokens("abc"), 3)
    tree.release(node)
    assert tree.evict(2) == [5, 6]
    assert tree.peek(b"", tokens("xyz"), 9) == 1
    assert tree.evict(2) == [4, 3]
    tree.check([])


def test_the_least_often_used_goes_first_however_old_the_others_are():
    tree = RadixTree(2, policy="lfu")
    leave(tree, "abc", [1, 2, 3])
    for _ in range(2):
        node, _ = tree.acquire(b"", tokens("abc"), 3)
        tree.release(node)
    leave(tree, "rst", [7, 8, 9])
    leave(tree, "xyz", [4, 5, 6])
    assert tree.evict(2) == [8, 9]  # the older of equals
    assert tree.evict(4) == [7, 4, 5, 6]
    assert tree.evict(1) == [3]
    tree.check([])


def test_both_parts_of_a_divided_prefix_have_been_used_as_often():
    tree = RadixTree(2, policy="lfu")
    leave(tree, "abcd", [1, 2, 3, 4])
    for _ in range(2):
        node, _ = tree.acquire(b"", tokens("abcd"), 4)
        tree.release(node)
    node, _ = tree.acquire(b"", tokens("ab"), 2)
    tree.release(node)
    leave(tree, "xyz", [5, 6, 7])
    assert tree.evict(3) == [5, 6, 7]
    tree.check([])


def test_a_parent_goes_after_its_children():
    tree = RadixTree(2)
    leave(tree, "ab", [1, 2])
    leave(tree, "abc", [8, 9, 3])
    leave(tree, "abd", [8, 9, 4])
    assert tree.evict(2) == [3, 4]
    assert sorted(tree.evict(9)) == [8, 9]  # gave way: 1, 2
    assert (tree.size, tree.evictable) == (0, 0)


def test_a_leaf_that_became_a_parent_is_evicted_after_its_children():
    tree = RadixTree(2)
    leave(tree, "ab", [1, 2])
    holder, _ = tree.acquire(b"", tokens("a"), 1)  # b stays behind as a leaf that may go
    assert leave(tree, "abc", [3, 4, 5]) == [3, 4]
    assert tree.evict(1) == [5]
    assert tree.evict(1) == [2]
    assert (tree.size, tree.evictable) == (1, 0)
    tree.check([holder])


def test_what_is_held_stays():
    tree = RadixTree(2)
    leave(tree, "abc", [1, 2, 3])
    node, _ = tree.acquire(b"", tokens("ab"), 2)
    assert tree.evict(9) == [3]
    tree.check([node])


def test_the_order_of_eviction_is_remembered_without_growing():
    tree = RadixTree(2)
    leave(tree, "ab", [1, 2])
    for _ in range(1000):
        node, _ = tree.acquire(b"", tokens("ab"), 2)
        tree.release(node)
    assert len(tree._heap) < 100
    assert tree.evict(2) == [1, 2]


def test_a_prefix_grows_in_place_whatever_its_length():
    tree = RadixTree(2)
    root, _ = tree.acquire(b"", b"", 0)
    node, _, _ = tree.extend(root, tokens("ab"), [1, 2])
    key, pages = node.key, node.pages
    assert tree.extend(node, tokens("cd"), [3, 4]) == (node, 2, [])
    assert node.key is key
    assert node.pages is pages
    assert (bytes(key), pages) == (tokens("abcd"), [1, 2, 3, 4])
    tree.check([node])
