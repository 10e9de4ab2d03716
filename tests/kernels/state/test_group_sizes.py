"""How the cache's memory is divided among groups of layers."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.contract.caches import CacheGroup, Latent, Paged, State, Window
from kernels.contract.config import RunnerConfig
from kernels.contract.errors import CacheSizeError, ConfigError
from kernels.devices.memory import MemoryUsage
from kernels.state.cache_size import cache_pages
from kernels.state.group_sizes import GroupSizes, snapshot_pages

PAGED = Paged(kv_heads=1, k_dim=4, v_dim=4)
FULL = CacheGroup(PAGED, (0, 2))
WINDOW = CacheGroup(Window(PAGED, 64), (1, 3))
STATE = CacheGroup(State(((8, 8),)), (4,))


def sizes(*groups: CacheGroup, slots: int = 4, context: int = 4096) -> GroupSizes:
    return GroupSizes.from_groups(groups, lambda spec: spec.token_bytes(2), 16, slots, 128, context)


def test_groups_that_keep_all_tokens_have_the_main_pages() -> None:
    found = sizes(FULL, CacheGroup(Latent(12, 4), (1,)))
    assert [group.num_pages for group in found.with_pages(100)] == [100, 100]
    assert found.token_bytes == 2 * 16 + 32
    assert found.bytes(100) == 100 * 16 * found.token_bytes


def test_a_window_has_pages_for_all_slots_at_most() -> None:
    _, window = sizes(FULL, WINDOW).with_pages(100_000)
    assert window.num_pages == 1 + 4 * window.sequence_pages(16) + window.step_pages(128)


@pytest.mark.parametrize("pages", [2, 100, 10_000])
def test_a_window_has_pages_for_one_sequence_at_least(pages: int) -> None:
    _, window = sizes(FULL, WINDOW, slots=1000).with_pages(pages)
    assert window.num_pages - 1 >= window.sequence_pages(16) + window.step_pages(128)
    assert window.num_pages - 1 <= max(pages // 2, window.sequence_pages(16) + window.step_pages(128))


def test_a_state_has_pages_for_all_slots_and_snapshots_beside() -> None:
    (_, few), (_, many) = (sizes(FULL, STATE).with_pages(pages) for pages in (50, 100_000))
    assert few.num_pages - 1 == 4 * few.sequence_pages(16) + few.step_pages(128)
    assert many.num_pages - 1 == 100_000 * 16 // (many.page_tokens * 2)


def test_states_of_many_slots_leave_room_for_pages_of_tokens() -> None:
    """A state of 50 MB and 512 slots would need 77 GB."""
    found = sizes(FULL, CacheGroup(State(((50, 250_000),)), (1,)), slots=512)
    (_, state), (_, one) = found.with_pages(100_000), found.with_pages(2)
    assert state.num_pages - 1 == 2 * 100_000 * 16 // state.page_tokens
    assert one.num_pages - 1 == 2 + one.step_pages(128)  # of a context of 4,096 tokens


def test_snapshots_weigh_no_more_than_the_other_groups() -> None:
    _, state = sizes(FULL, STATE).groups
    main = 16 * 2 * 16
    assert (state.page_bytes, main) == (256, 512)
    assert state.page_tokens == 16
    assert [snapshot_pages(size, 100) for size in (1, 100, 101, 900, 10**9)] == [1, 1, 2, 16, 256]
    assert snapshot_pages(100, 0) == 16


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (WINDOW,), (STATE,), (FULL, WINDOW, STATE)])
def test_as_many_pages_as_fit_a_budget(groups: tuple[CacheGroup, ...]) -> None:
    found = sizes(*groups)
    for budget in (0, 10_000, 1_000_000, 30_000_000):
        pages = found.max_pages(budget, 5000)
        assert pages == 0 or found.bytes(pages) <= budget
        assert pages == 5000 or found.bytes(max(pages, 1) + 1) > budget


@pytest.mark.parametrize("group", [STATE, WINDOW, CacheGroup(Latent(12, 4), (1,))], ids=["state", "window", "latent"])
def test_caches_of_drafts_count_beside_groups(group: CacheGroup) -> None:
    """A draft's own cache has as many pages as the model's, whatever groups that has."""
    divided, draft_bytes = sizes(FULL, group), 96

    def pages(free: int, **options: Any) -> int:
        config = RunnerConfig("", page_size=16, **options)
        return cache_pages(
            config,
            divided.token_bytes,
            4096,
            0,
            MemoryUsage(free, free),
            default_fraction=0.5,
            default_tokens=0,
            draft_bytes=draft_bytes,
            sizes=divided,
        )

    def needed(count: int) -> int:
        return divided.bytes(count) + count * 16 * draft_bytes

    free = 400_000
    for budget, count in ((free // 2, pages(free)), (free, pages(free, mem_fraction_static=1.0))):
        assert needed(count) <= budget < needed(count + 1)
    assert pages(needed(101), max_total_tokens=1600) == 101
    with pytest.raises(CacheSizeError):
        pages(needed(101) - 1, max_total_tokens=1600)


def test_states_follow_the_number_or_memory_ratio_option() -> None:
    found = sizes(FULL, STATE)
    _, many = found.with_states(77, 0.5).with_pages(100_000)
    assert many.num_pages - 1 == 77
    full, share = found.with_states(0, 0.5).with_pages(100_000)
    assert (share.num_pages - 1) * share.page_bytes == pytest.approx(0.5 * 100_000 * full.page_bytes, rel=1e-3)
    (_, few), (_, least) = found.with_states(0, 0.5).with_pages(2), found.with_pages(2)
    assert few.num_pages - 1 == least.sequence_pages(16) + least.step_pages(128)
    with pytest.raises(ConfigError, match="max_mamba_cache_size is 1, and one sequence needs"):
        found.with_states(1, 0)


def test_state_snapshots_are_a_track_interval_apart() -> None:
    groups = (FULL, STATE, WINDOW)
    found = GroupSizes.from_groups(groups, lambda spec: spec.token_bytes(2), 16, 4, 128, 4096, snapshot_tokens=48)
    assert [group.page_tokens for group in found.groups] == [16, 48, 16]
