from __future__ import annotations

import gc

from app.server.garbage_collection import IdleGarbageCollector


class Node:
    def __init__(self) -> None:
        self.me = self


def full() -> int:
    return gc.get_stats()[2]["collections"]


async def test_full_collections_wait_for_idle_unless_too_much_is_old() -> None:
    idle = False
    collector = IdleGarbageCollector(lambda: idle)
    before = gc.get_threshold()
    with collector.running():
        assert gc.get_freeze_count() > 0
        assert not collector.collect_if_due()  # nothing has become old
        gc.collect(1)
        start = full()
        assert not collector.collect_if_due()
        nodes = [Node() for _ in range(300_000)]  # the interpreter itself would collect them all
        assert full() == start
        idle = True
        assert collector.collect_if_due()
        assert full() == start + 1
        assert not collector.collect_if_due()
        idle = False
        for _ in range(20):
            gc.collect(1)
        assert collector.collect_if_due()
        del nodes
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
