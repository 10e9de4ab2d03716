"""What an algorithm of speculative decoding has to do; the rest is the same for all of them (``speculator``).

A step of a runner with a drafter goes like this. The drafter *observes* what the step before computed: its tokens, the
hidden states of the layers it captures, and the tokens that were accepted. It *drafts*: a tree of guesses for each row
that may speculate. The target runs the trees, every node is sampled from as any token is, and the path of nodes that
are what was sampled is *accepted* (``verify``). Then the tokens are known, and observed by the next step.

Position i of a draft's cache lies in the same page as that of the target's: pages that requests share are shared by the
draft too, and whoever is given cached pages finds the draft's keys and values there. So what a drafter writes for a
position should be a function of the tokens up to it (and, of the newest, the next one).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.models.config import ModelConfig
from kernels.models.decoder import Decoder
from kernels.parallel.group import Group
from kernels.platforms.base import Platform
from kernels.platforms.prepared import PassEnd
from kernels.sampling import Noise
from kernels.slots import SlotTable
from kernels.speculative.host_drafts import HostDrafts
from kernels.speculative.settings import SpeculativeSettings
from kernels.speculative.tree import DraftTree
from kernels.step import Admission, RunnerConfig

__all__ = ["DraftRows", "Drafter", "DrafterContext", "Drafts", "Observation"]

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter is made from. ``model``: this rank's part of the target; ``whole``: all of it.

    ``context``: tokens that a sequence may have. ``dtype``: the target's.
    """

    config: RunnerConfig
    settings: SpeculativeSettings
    platform: Platform
    group: Group
    target: Decoder
    model: ModelConfig
    whole: ModelConfig
    dtype: torch.dtype
    context: int


@dataclass(frozen=True)
class Observation:
    """Tokens that the target has computed since the last observation; host arrays but for the tensors.

    Row r: positions ``starts[r] .. starts[r] + counts[r] - 1`` of a slot, one after the other over the rows. For a row
    that speculated these are the root and the nodes that were accepted. Every token at the positions is known, and the
    token after each of them too: the last one's is the slot's last known token, or the next of its prompt.
    """

    slots: Longs  # [rows]
    starts: Longs  # [rows]
    counts: Longs  # [rows], at least 1
    pages: Ints  # [rows, columns], the slots' page tables
    capacity: Longs  # [rows]: positions that the pages granted so far hold
    reached: npt.NDArray[np.bool_]  # [rows]: whether the token after the row's last is the slot's last known one
    token_ids: Tensor  # int64 [tokens]
    next_tokens: Tensor  # int64 [tokens]: the token at the position after each
    positions: Tensor  # int64 [tokens]
    cache_index: Tensor  # int64 [tokens]: page * page_size + offset of each
    features: Tensor | None  # [tokens, n], ``Decoder.split``'s; None for a drafter that has no use for it
    last: Tensor  # int64 [rows]: each row's last token among the tokens
    device_slots: Tensor  # int64 [rows], slots on the device
    table: Tensor  # int32 [max_slots, positions]: all known tokens by slot; what stands behind them is of no meaning
    sampled: tuple[Ints, ...] | None = None  # of each row, on the host, what was sampled; with ``needs_host_tokens``


@dataclass(frozen=True)
class DraftRows:
    """Rows that may speculate; host arrays but for the tensors. All tokens before ``roots`` have been observed."""

    slots: Longs  # [rows]
    roots: Longs  # [rows]: the position of the last known token; the first guess is of position roots + 1
    pages: Ints  # [rows, columns]
    capacity: Longs  # [rows]: positions that the pages hold, more than roots + limits
    limits: Longs  # [rows]: nodes besides the root that may be verified, at least 1
    root_tokens: Tensor  # int64 [rows]
    root_positions: Tensor  # int64 [rows], roots on the device
    device_slots: Tensor  # int64 [rows], slots on the device
    table: Tensor  # int32 [max_slots, positions], as in Observation
    noise: Noise | None  # the target's own, to draft with it too; None: all rows are greedy
    steps: int  # levels that are worth it now, 1 to the settings' num_steps (adaptive drafting lowers it)


@dataclass(frozen=True)
class Drafts:
    """``tree``: [rows, nodes]. ``nodes`` int64 [rows], on the host: of each row the first so many are verified, the
    root among them; 1 where there is no guess. Never more than ``limits + 1``."""

    tree: DraftTree
    nodes: Longs


class Drafter(ABC):
    """One algorithm. Called in the model's thread, in the order of the steps, by every rank alike.

    Weights are taken when it is made. What it keeps by slot lives in tensors or arrays of ``max_slots`` rows.

    ``features``: whether it is made from the target's hidden states. Which layers' it is, is asked before the target is
    made (``captured_layers``).
    ``stepwise``: whether each level takes a pass of the draft, so that shallow trees take less.
    ``depth``: the longest path of its trees, the root not counted. ``most_nodes``: of a row's tree, the root counted.
    ``cache_bytes``: a token's, over all caches. ``spare_bytes``: of what its caches have beside the target's pages.
    """

    features: bool = False
    needs_host_tokens: bool = False
    stepwise: bool = False
    parameters: int = 0
    weight_bytes: int = 0
    cache_bytes: int = 0
    spare_bytes: int = 0
    depth: int
    most_nodes: int

    @abstractmethod
    def __init__(self, context: DrafterContext) -> None: ...

    @classmethod
    def captured_layers(cls, settings: SpeculativeSettings, model: ModelConfig) -> tuple[int, ...]:
        """The layers of the target whose results ``features`` are made of; empty: the last hidden state, normed."""
        return ()

    def make_caches(self, pages: int) -> list[Any]:
        """Make the draft's own caches, of the target's number of pages; returned to be cleaned with the target's."""
        return []

    def capture(self, agree: Callable[[bool], bool], ends: Mapping[int, PassEnd]) -> None:
        """Prepare passes beforehand, where the platform gains by it (``Platform.capture_decodes``). ``ends``: of the
        target's passes that accept, behind which it may draft."""
        return None

    def host_drafts(self, state: SlotTable, rows: int) -> HostDrafts | None:
        """The same for up to ``rows`` greedy rows in fewer calls, where the device is the host and gains by it."""
        return None

    def admit(self, admission: Admission, tokens: Ints) -> None:
        """A request takes a slot; ``tokens``: all that are known of it. The first ``admission.computed`` lie in cached
        pages, and were observed when those were computed."""
        return None

    def release(self, slot: int) -> None:
        """The slot's request is gone."""
        return None

    @property
    def branches(self) -> bool:
        """Whether its trees may be more than chains."""
        return self.depth < self.most_nodes - 1

    def levels(self, settings: SpeculativeSettings) -> tuple[int, ...]:
        """How many guesses are verified of a draft of 0, 1, .. ``depth`` levels."""
        wide, most = settings.topk if self.depth < self.most_nodes - 1 else 1, self.most_nodes - 1
        seen = [0, *(wide + wide * wide * level if wide > 1 else level + 1 for level in range(self.depth))]
        return tuple([min(nodes, most) for nodes in seen])

    def reach(self) -> int:
        """How far behind the root of a step ``draft_ahead`` writes at most, whatever is accepted; 0: it cannot."""
        return 0

    def draft_ahead(
        self, roots: Longs, slots: Longs, pages: Ints, outcome: Tensor, tokens: Tensor, features: Tensor, places: Longs
    ) -> DraftTree | None:
        """Observe what a step of greedy rows that all verified accepted, and draft behind it, before the host knows.

        The arguments are those of ``ahead.AheadPasses.run``. The trees have all levels and nodes. None: so many rows
        are not prepared, and nothing was done.
        """
        return None

    def draft_behind(self, end: int, rows: int) -> DraftTree | None:
        """The same of the first ``rows`` rows of what the pass that leaves ``ends[end]`` has just accepted."""
        return None

    def observed_ahead(self, slots: Longs, lengths: Longs) -> None:
        """The host knows now: of these slots so many positions were observed."""
        return None

    @abstractmethod
    def observe(self, seen: Observation) -> None:
        """Fill the draft's cache, and keep what ``draft`` starts from by slot."""

    @abstractmethod
    def draft(self, rows: DraftRows) -> Drafts:
        """A tree for each row. Only the last known token is new since the last observation."""

    def judged(self, slots: Sequence[int], accepted: Sequence[int], drafted: Sequence[int]) -> None:
        """What became of the last drafts: of ``drafted`` levels of a slot's tree ``accepted`` were right."""
        return None
