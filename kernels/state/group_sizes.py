"""Divides the cache's memory among the groups of a model's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from kernels.contract.caches import CacheGroup, GroupPages, Latent, Paged, State, Window
from kernels.contract.errors import ConfigError

__all__ = ["GroupBytes", "GroupSizes", "snapshot_pages"]

_MAX_SNAPSHOT_PAGES = 256
"""Most main pages between two snapshots of a state."""
_SNAPSHOT_PAGES = 16
"""The same if no other group determines the bytes of a page."""
_SHARE = 2
"""Main pages for each page of a bounded group: prefixes without such pages are computed again."""

_STATES = 2
"""Most memory of states, by that of main pages, if slots need so much. A short sequence needs as many as a long one."""

GroupBytes = Callable[[Paged | Latent], int]
"""Bytes of one token in one layer, as a device keeps it."""


def snapshot_pages(state_bytes: int, page_bytes: int) -> int:
    """Main pages between snapshots of a state: a power of two, so that snapshots take at most the memory of the other
    groups for the same tokens.

    state_bytes: of one state, over its layers. page_bytes: of a main page, over the other groups' layers.
    """
    if not page_bytes:
        return _SNAPSHOT_PAGES
    pages = 1
    while pages < _MAX_SNAPSHOT_PAGES and pages * page_bytes < state_bytes:
        pages *= 2
    return pages


@dataclass(frozen=True)
class GroupSizes:
    """The sizes of each group's pages, independent of the available memory.

    page_size: tokens of a main page. slots: sequences that may run. step_tokens: of the largest step. context: tokens
    that a sequence may have. max_states, state_ratio: as in RunnerConfig.
    """

    groups: tuple[GroupPages, ...]
    page_size: int
    slots: int
    step_tokens: int
    context: int
    max_states: int = 0
    state_ratio: float = 0.0

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[CacheGroup],
        token_bytes: GroupBytes,
        page_size: int,
        slots: int,
        step_tokens: int,
        context: int,
        *,
        snapshot_tokens: int = 0,
    ) -> GroupSizes:
        """token_bytes: of one token in one layer. snapshot_tokens: between snapshots of a state; 0: by its size."""
        result: list[GroupPages] = []
        pages = 0  # bytes of a page of tokens, over all groups that keep tokens
        for group in groups:
            spec = group.spec
            if not isinstance(spec, State):
                kept = spec.paged if isinstance(spec, Window) else spec
                size = len(group.layers) * token_bytes(kept) * page_size
                pages += size
                result.append(GroupPages(group, 0, page_size, size))
            else:
                result.append(GroupPages(group, 0, 0, len(group.layers) * spec.sequence_bytes()))
        sized = [
            group
            if group.page_tokens
            else msgspec.structs.replace(
                group, page_tokens=snapshot_tokens or page_size * snapshot_pages(group.page_bytes, pages)
            )
            for group in result
        ]
        return cls(tuple(sized), page_size, slots, step_tokens, context)

    def with_drafts(self, tokens: int) -> GroupSizes:
        """The sizes for steps that verify up to so many draft tokens of a sequence."""
        return replace(self, groups=tuple(msgspec.structs.replace(group, draft_tokens=tokens) for group in self.groups))

    def with_states(self, max_states: int, ratio: float) -> GroupSizes:
        """The sizes with so many states, or with ``ratio`` times the memory of main pages for them; 0: by the slots.
        Raises ConfigError for fewer than one sequence needs."""
        result = replace(self, max_states=max_states, state_ratio=ratio)
        for group in self.groups:
            if isinstance(group.group.spec, State) and 0 < max_states < (least := self._one(group)):
                raise ConfigError(f"max_mamba_cache_size is {max_states}, and one sequence needs {least}; raise it")
        return result

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the groups that keep all tokens, over their layers."""
        return sum(group.page_bytes for group in self.groups if not group.bounded) // self.page_size

    def with_pages(self, pages: int) -> tuple[GroupPages, ...]:
        """All groups for ``pages`` main pages; page 0 of each is included."""
        return tuple(
            msgspec.structs.replace(group, num_pages=self._bounded(group, pages) + 1 if group.bounded else pages)
            for group in self.groups
        )

    def bytes(self, pages: int) -> int:
        """Bytes of all groups."""
        return sum(group.num_pages * group.page_bytes for group in self.with_pages(pages))

    def max_pages(self, budget: int, limit: int, extra: int = 0) -> int:
        """The most main pages, page 0 included and at most ``limit``, with which all groups fit in ``budget`` bytes; 0
        if none fit. ``extra``: bytes that each main page takes beside the groups, as in a draft's own cache."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.bytes(middle) + middle * extra <= budget:
                low = middle
            else:
                high = middle - 1
        return low if low > 1 else 0

    def _bounded(self, group: GroupPages, pages: int) -> int:
        """Pages of the group: enough for one sequence, at most as many as all slots can use, but for snapshots of
        states. The states of all slots may take more memory than there is: sequences then wait for pages."""
        columns, one = group.columns(self.context, self.page_size), self._one(group)
        if isinstance(group.group.spec, State) and self.max_states:
            return self.max_states
        if isinstance(group.group.spec, State) and self.state_ratio:
            return max(one, int(self.state_ratio * pages * self.page_size * self.token_bytes / group.page_bytes))
        all_slots = self.slots * min(group.sequence_pages(self.page_size), columns)
        all_slots += group.step_pages(self.step_tokens)
        shared = pages * self.page_size // (group.page_tokens * _SHARE)
        if isinstance(group.group.spec, Window):
            return max(one, min(all_slots, shared))
        return max(one, shared, min(all_slots, _STATES * pages * self.page_size // group.page_tokens))

    def _one(self, group: GroupPages) -> int:
        """Pages that one sequence needs."""
        columns = group.columns(self.context, self.page_size)
        return min(group.sequence_pages(self.page_size), columns) + group.step_pages(self.step_tokens)
