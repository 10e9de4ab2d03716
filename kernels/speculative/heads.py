"""Drafts that are a head on the target: a decoder's layer that goes on from the target's hidden states (EAGLE, Li et
al., arXiv 2401.15077; EAGLE-3, arXiv 2503.01840; multi-token prediction, DeepSeek-V3, arXiv 2412.19437, section 2.2).

Position i of the head's sequence joins what the target found at position i, its feature, with the embedding of the
token at position i + 1, and predicts the token at position i + 2. Behind the last token known the head goes on from its
own output in place of the feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.layers.rotary import RotaryEmbedding
from kernels.models.config import ModelConfig
from kernels.models.decoder import Attention, FeedForward
from kernels.parallel.group import Group
from kernels.parallel.layers import VocabularyEmbedding, VocabularyHead
from kernels.platforms.base import Platform
from kernels.platforms.operators import Norm, Unadded
from kernels.platforms.prepared import PassEnd
from kernels.platforms.projections import BehindNorm
from kernels.slots import SlotTable
from kernels.speculative.ahead import AheadPasses
from kernels.speculative.checkpoint import DraftCheckpoint, DraftWeights
from kernels.speculative.drafter import Drafter, DrafterContext, DraftRows, Drafts, Observation
from kernels.speculative.expansion import DraftModel, Expansion
from kernels.speculative.host_drafts import HostDrafts
from kernels.speculative.token_map import head_rows, read_token_map
from kernels.speculative.tree import DraftTree
from kernels.step import Admission

__all__ = ["HeadDrafter", "HeadLayer", "HeadModel", "SharedEnds", "open_checkpoint"]

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


def open_checkpoint(context: DrafterContext) -> DraftCheckpoint:
    """The draft's directory, or else the target's own. Raises ConfigError or LoadError."""
    config, settings = context.config, context.settings
    path = settings.draft_model_path or config.model_path
    return DraftCheckpoint(path, settings.load_format or config.load_format)


class SharedEnds:
    """Embeddings and output head: the draft's own where its checkpoint has them, else the target's.

    ``token_map``: whether the head is cut down to ``settings.token_map``. ``ids`` int64: the target's id of each of the
    head's tokens; None: they are the target's.
    """

    def __init__(self, context: DrafterContext, weights: DraftWeights, token_map: bool) -> None:
        platform, target = context.platform, context.target
        table, head = weights.optional("embed_tokens.weight"), weights.optional("lm_head.weight")
        self.embed = target.embeddings
        if table is not None:
            self.embed = VocabularyEmbedding(context.group, platform.make_lookup(table), len(table))
        self.head = target.head if head is None else VocabularyHead(Group(), platform.make_linear(head, None))
        self.ids: Tensor | None = None
        if token_map and context.settings.token_map:
            ids = read_token_map(context.settings.token_map, context.whole.vocab_size)
            config = context.config
            rows = (
                head_rows(context, config.model_path, config.load_format, context.whole, target, ids)
                if head is None
                else head.index_select(0, ids.to(platform.device))
            )
            self.head = VocabularyHead(Group(), platform.make_linear(rows, None))
            self.ids = ids.to(platform.device)


class _Normed:
    """A norm of what is normed."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        raise TypeError("nothing is added to what is normed")


class HeadLayer:
    """A decoder's layer whose input is normed by others. ``prefix``: its name in the checkpoint."""

    def __init__(self, weights: DraftWeights, prefix: str, context: DrafterContext) -> None:
        config, platform, group = weights.local, context.platform, context.group
        source = weights.layer(prefix)
        self.attention = Attention(config, 0, source, platform, group)
        norm = platform.make_norm(weights.take([f"{prefix}.post_attention_layernorm.weight"]), config.norm_eps)
        self.mlp = FeedForward(norm, config, 0, source, platform, group)
        self.attention.output.following = norm
        self.heads = self.attention.behind(BehindNorm(_Normed(), self.attention.qkv))

    def __call__(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: ForwardBatch
    ) -> tuple[Unadded, Tensor]:
        """``x``: what attention reads. -> what is still to be added to the residual, and that."""
        queries, _ = self.heads(None, x, cos, sin, cache, batch.cache_index)
        return self.mlp.add(*self.attention.find(queries, residual, cache, batch))


class HeadModel(DraftModel):
    """What the layouts share. ``width``: the target's hidden size, unless a layout says otherwise. ``features``: the
    width of what ``start`` wants of the target, where it is another one."""

    features = 0

    def __init__(self, context: DrafterContext, weights: DraftWeights, token_map: bool = True) -> None:
        self.weights = weights
        self.config: ModelConfig = weights.local
        self.width = self.config.hidden_size
        self.platform: Platform = context.platform
        self.ends = SharedEnds(context, weights, token_map)
        self.ids = self.ends.ids
        self.rotary = RotaryEmbedding(self.config.rope, self.config.head_dim, context.dtype, context.platform)

    def norm(self, name: str) -> Norm:
        return self.platform.make_norm(self.weights.take([name]), self.config.norm_eps)

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """[tokens, a] and [tokens, b] -> [tokens, a + b]"""
        width = first.shape[1]
        both = self.platform.empty_rows(len(first), width + second.shape[1], first.dtype)
        self.platform.add_rows(first, None, both[:, :width])
        self.platform.add_rows(second, None, both[:, width:])
        return both

    def start(self, features: Tensor) -> Tensor:
        """The target's features [tokens, n] -> the states that the head goes on from [tokens, width]."""
        return features

    def logits(self, states: Tensor) -> Tensor:
        return self.ends.head(states)


class HeadDrafter(Drafter):
    """Observes with a head, and drafts with it. A request that found all but its last token in others' pages has no
    state to draft from until it has run one more.
    """

    features = True
    stepwise = True

    def __init__(self, context: DrafterContext, model: HeadModel) -> None:
        self._model, self._context = model, context
        self._expansion = Expansion(context, model)
        self.parameters, self.weight_bytes = model.weights.parameters, model.weights.weight_bytes
        self.cache_bytes = self._expansion.cache_bytes
        self.depth, self.most_nodes = context.settings.num_steps, context.settings.num_draft_tokens
        shape = (context.config.max_slots, model.width)
        self._states = torch.zeros(shape, dtype=context.dtype, device=context.platform.device)
        self.spare_bytes = self._expansion.spare_bytes
        self._observed = np.full(context.config.max_slots, -1, dtype=np.int64)  # positions, of which the last's is kept
        self._ahead: AheadPasses | None = None

    def make_caches(self, pages: int) -> list[Any]:
        return self._expansion.make_caches(pages)

    def capture(self, agree: Callable[[bool], bool], ends: Mapping[int, PassEnd]) -> None:
        self._expansion.capture(agree)
        target = self._context.target
        features = target.hidden_size * max(1, len(target.captures))
        self._ahead = self._expansion.prepare_ahead(self._model, self._states, features, agree, ends)

    def reach(self) -> int:
        return 0 if self._ahead is None else self._ahead.reach

    def draft_ahead(
        self, roots: Longs, slots: Longs, pages: Ints, outcome: Tensor, tokens: Tensor, features: Tensor, places: Longs
    ) -> DraftTree | None:
        if self._ahead is None or not self._ahead.size(len(roots)):
            return None
        return self._ahead.run(roots, slots, pages, outcome, tokens, features, places)

    def draft_behind(self, end: int, rows: int) -> DraftTree | None:
        return None if self._ahead is None else self._ahead.follow(end, rows)

    def observed_ahead(self, slots: Longs, lengths: Longs) -> None:
        self._observed[slots] = lengths

    def host_drafts(self, state: SlotTable, rows: int) -> HostDrafts | None:
        size = self._model.features or self._model.width
        return self._expansion.host_chains(state, rows, self._states, self._observed, self._model.start, size)

    def admit(self, admission: Admission, tokens: npt.NDArray[np.int32]) -> None:
        self._observed[admission.slot] = -1

    def observe(self, seen: Observation) -> None:
        assert seen.features is not None, "made from features"
        self._observed[seen.slots] = seen.starts + seen.counts
        states = self._expansion.observe(seen, seen.next_tokens, self._model.start(seen.features))
        self._states.index_copy_(0, seen.device_slots, states.index_select(0, seen.last))

    def draft(self, rows: DraftRows) -> Drafts:
        drafts = self._expansion.draft(rows, self._states.index_select(0, rows.device_slots))
        known = self._observed[rows.slots] == rows.roots
        return drafts if known.all() else Drafts(drafts.tree, np.where(known, drafts.nodes, 1))
