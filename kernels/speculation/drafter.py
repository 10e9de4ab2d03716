"""The contract of an algorithm of speculative decoding. ``speculator`` has the part that all algorithms share.

A step of a runner with a drafter has three parts. The drafter *observes* the results of the step before: its tokens,
the hidden states of the captured layers, and the accepted tokens. It *drafts* a tree of tokens for each row that may
speculate. The target runs the trees, a token is sampled after every node, and the path of nodes that equal the sampled
tokens is *accepted* (``verify``). The next step observes these tokens.

Position i of a draft's cache lies in the same page as position i of the target's cache. Requests that share pages also
share the draft's keys and values in them. A drafter should therefore write to a position only what depends on the
tokens up to it (for the newest position, also on the next token).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.config import RunnerConfig
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import Admission
from kernels.core.arrays import Ints, Longs
from kernels.core.tree import Drafts, DraftTree
from kernels.devices.base import Device
from kernels.devices.prepared import VerifyOutputs
from kernels.distributed.draft_experts import DraftExperts
from kernels.distributed.group import Group
from kernels.models.config import ModelConfig
from kernels.models.decoder import Decoder
from kernels.sampling.sampler import Noise
from kernels.speculation.native_drafts import NativeDrafts
from kernels.state.slots import SlotTable

__all__ = ["AcceptedRows", "DraftRows", "Drafter", "DrafterContext", "Observation"]


@dataclass(frozen=True)
class DrafterContext:
    """The inputs of a drafter's constructor. ``model``: this rank's part of the target's configuration;
    ``full_config``: the full one. ``context``: the most tokens of a sequence. ``dtype``: the target's. ``chains``:
    whether the target verifies chains alone. ``experts``: with data-parallel attention, the ranks that divide the
    draft's experts; None: each part of attention has all of them.
    """

    config: RunnerConfig
    settings: SpeculativeSettings
    device: Device
    group: Group
    target: Decoder
    model: ModelConfig
    full_config: ModelConfig
    dtype: torch.dtype
    context: int
    chains: bool = False
    experts: DraftExperts | None = None


@dataclass(frozen=True)
class Observation:
    """Tokens that the target has computed since the last observation. Arrays are on the host, tensors on the device.

    Row r has the positions ``starts[r] .. starts[r] + counts[r] - 1`` of a slot; rows are concatenated. A row that
    speculated has the root and the accepted nodes. Every token at these positions is known, and so is the token after
    each: after the last one it is the slot's last known token, or the next of its prompt.
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
    features: Tensor | None  # [tokens, n], of ``Decoder.split``; None for a drafter that does not use them
    last: Tensor  # int64 [rows]: each row's last token among the tokens
    device_slots: Tensor  # int64 [rows], slots on the device
    table: Tensor  # int32 [max_slots, positions]: all known tokens by slot; entries after these are undefined
    sampled: tuple[Ints, ...] | None = None  # the sampled tokens of each row, on the host; with ``needs_host_tokens``


@dataclass(frozen=True)
class DraftRows:
    """Rows that may speculate. Arrays are on the host, tensors on the device. All tokens before ``roots`` have been
    observed."""

    slots: Longs  # [rows]
    roots: Longs  # [rows]: the position of the last known token; the first draft token is of position roots + 1
    pages: Ints  # [rows, columns]
    capacity: Longs  # [rows]: positions that the pages hold, more than roots + limits; in a pipeline at least roots
    limits: Longs  # [rows]: nodes besides the root that may be verified, at least 1
    root_tokens: Tensor  # int64 [rows]
    root_positions: Tensor  # int64 [rows], roots on the device
    device_slots: Tensor  # int64 [rows], slots on the device
    table: Tensor  # int32 [max_slots, positions], as in Observation
    noise: Noise | None  # the target's own, to draft with it too; None: all rows are greedy
    steps: int  # levels to draft, 1 to the settings' num_steps (adaptive drafting lowers it)


class AcceptedRows(NamedTuple):
    """The accepted tokens of a step, on the device, before the host knows them. All rows are greedy and verified.

    ``roots`` [rows]: positions of the trees' roots. ``pages`` [rows, columns]: enough for accepted and newly drafted
    tokens. ``outcome``: ``VerifyResult.outcome``. ``tokens`` int64 [rows, levels or fewer]: the token after each
    accepted node. ``features`` [tokens, n]: the step's; a row's begin at ``places`` [rows].
    """

    roots: Longs
    slots: Longs
    pages: Ints
    outcome: Tensor
    tokens: Tensor
    features: Tensor
    places: Longs


class Drafter(ABC):
    """One algorithm. Every rank calls it in the model's thread, in the order of the steps.

    The constructor loads the weights. State by slot is kept in tensors or arrays of ``max_slots`` rows.

    ``features``: whether it reads the target's hidden states; ``captured_layers`` names the layers before the target is
    built. ``stepwise``: whether each level takes a pass of the draft, so that shallow trees are cheaper.
    ``depth``: the longest path of a tree, without the root. ``max_nodes``: the most nodes of a tree, with the root.
    ``cache_bytes``: bytes of a token in all caches, which hold latent vectors if ``latent``. ``spare_bytes``: bytes of
    the caches beyond the target's pages.
    """

    features: bool = False
    needs_host_tokens: bool = False
    stepwise: bool = False
    parameters: int = 0
    weight_bytes: int = 0
    cache_bytes: int = 0
    latent: bool = False
    spare_bytes: int = 0
    depth: int
    max_nodes: int

    @abstractmethod
    def __init__(self, context: DrafterContext) -> None: ...

    @classmethod
    def captured_layers(cls, settings: SpeculativeSettings, model: ModelConfig) -> tuple[int, ...]:
        """The layers of the target that ``features`` consist of; empty: the last hidden state, after the final norm."""
        return ()

    def make_caches(self, pages: int) -> list[Any]:
        """Make the draft's caches, with the target's number of pages. The runner clears them together with the
        target's."""
        return []

    def capture(self, agree: Callable[[bool], bool], accept_outputs: Mapping[int, VerifyOutputs] | None) -> None:
        """Capture passes, where the device gains by it (``Capture.decodes``). ``accept_outputs``: results of the
        target's passes that accept; the drafter may draft directly after these. None: nothing drafts early
        (``draft_early``), and passes that do are not captured."""
        return None

    def native_drafts(self, state: SlotTable, rows: int) -> NativeDrafts | None:
        """Prepare drafting in one native call for up to ``rows`` rows, on the CPU; None: not supported."""
        return None

    def admit(self, admission: Admission, tokens: Ints) -> None:
        """Admit a request. ``tokens``: all known tokens. The first ``admission.computed`` lie in cached pages and were
        observed when the pages were computed."""
        return None

    def release(self, slot: int) -> None:
        """Release the slot of a request that has ended."""
        return None

    @property
    def branches(self) -> bool:
        """Whether its trees may be more than chains."""
        return self.depth < self.max_nodes - 1

    def levels(self, settings: SpeculativeSettings) -> tuple[int, ...]:
        """The number of verified draft tokens for drafts of 0, 1, .. ``depth`` levels."""
        wide, max_drafts = settings.topk if self.depth < self.max_nodes - 1 else 1, self.max_nodes - 1
        seen = [0, *(wide + wide * wide * level if wide > 1 else level + 1 for level in range(self.depth))]
        return tuple([min(nodes, max_drafts) for nodes in seen])

    def early_positions(self) -> int:
        """The most positions after a step's root that ``draft_early`` writes to; 0: it cannot draft early."""
        return 0

    def draft_early(self, accepted: AcceptedRows) -> DraftTree | None:
        """Observe a step's accepted tokens and draft after them, before the host knows them.

        The trees have all levels and nodes. None: no pass is captured for so many rows, and state is unchanged.
        """
        return None

    def draft_after_pass(self, end: int, rows: int) -> DraftTree | None:
        """Draft early for the first ``rows`` rows of the pass that has just run, with the result
        ``accept_outputs[end]``."""
        return None

    def mark_observed(self, slots: Longs, lengths: Longs) -> None:
        """Record on the host that the first ``lengths`` positions of these slots were observed early."""
        return None

    @abstractmethod
    def observe(self, observation: Observation) -> None:
        """Fill the draft's cache, and store the state that ``draft`` starts from, by slot."""

    @abstractmethod
    def draft(self, rows: DraftRows) -> Drafts:
        """A tree for each row. Only the last known token is new since the last observation."""

    def record_acceptance(self, slots: Sequence[int], accepted: Sequence[int], drafted: Sequence[int]) -> None:
        """Record that the first ``accepted`` of the ``drafted`` levels of each slot's last tree were accepted."""
        return None
