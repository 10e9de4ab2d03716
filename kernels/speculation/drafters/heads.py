"""Draft heads: a decoder layer that continues the target's hidden states (EAGLE, Li et al., arXiv 2401.15077; EAGLE-3,
arXiv 2503.01840; multi-token prediction, DeepSeek-V3, arXiv 2412.19437, section 2.2).

Position i of the head's sequence joins the target's hidden state at position i, the feature, with the embedding of the
token at position i + 1, and predicts the token at position i + 2. After the last known token the head's own output
replaces the feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.step import Admission
from kernels.core.arrays import Longs
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Linear, Norm, PendingResidual
from kernels.core.tree import Drafts, DraftTree
from kernels.devices.base import Device
from kernels.devices.linear import NormThenLinear
from kernels.devices.prepared import VerifyOutputs
from kernels.distributed.group import Group
from kernels.models.config import ModelConfig
from kernels.models.layers import block, gated_attention, gqa, mla, mlp, moe, pre_norm
from kernels.models.layers.block import AttentionLayer
from kernels.models.layers.gated_attention import GatedAttention
from kernels.models.layers.indexer import Indexer
from kernels.models.layers.rotary import RotaryEmbedding
from kernels.models.layers.vocabulary import VocabularyEmbedding, VocabularyHead
from kernels.speculation.drafter import AcceptedRows, Drafter, DrafterContext, DraftRows, Observation
from kernels.speculation.early_draft import EarlyDraftPasses
from kernels.speculation.expansion import DraftModel, Expansion
from kernels.speculation.load import DraftCheckpoint, DraftWeights
from kernels.speculation.native_drafts import NativeDrafts
from kernels.speculation.token_map import head_rows, read_token_map
from kernels.state.slots import SlotTable
from kernels.weights.tensors import Tensors, table_of

__all__ = [
    "GatedHeadLayer",
    "HeadDrafter",
    "HeadLayer",
    "HeadModel",
    "SharedEnds",
    "SparseHeadLayer",
    "gated_tensors",
    "open_checkpoint",
]


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
        device, target = context.device, context.target
        table, head = weights.optional("embed_tokens.weight"), weights.optional("lm_head.weight")
        if table is not None:
            self.embed = VocabularyEmbedding(context.group, device.linear.make_lookup(table), len(table))
        else:
            self.embed = target.embeddings.plain
        self.head = target.head.plain if head is None else VocabularyHead(Group(), device.linear.make_dense(head, None))
        self.ids: Tensor | None = None
        if token_map and context.settings.token_map:
            ids = read_token_map(context.settings.token_map, context.full_config.vocab_size)
            config = context.config
            rows = (
                head_rows(context, config.model_path, config.load_format, context.full_config, target, ids)
                if head is None
                else head.index_select(0, ids.to(device.torch_device))
            )
            self.head = VocabularyHead(Group(), device.linear.make_dense(rows, None))
            self.ids = ids.to(device.torch_device)


class _Normed:
    """The identity in place of a norm, for an input that is already normed."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        raise TypeError("no residual is added to a normed input")


class HeadLayer:
    """A decoder layer whose input is already normed. ``prefix``: its name in the checkpoint."""

    def __init__(self, weights: DraftWeights, prefix: str, context: DrafterContext) -> None:
        config, builder = weights.local, weights.builder
        self.attention = gqa.attention(builder, config, f"{prefix}.self_attn", config.windows[0])
        norm_weight = weights.take([f"{prefix}.post_attention_layernorm.weight"])
        norm = context.device.elementwise.make_norm(norm_weight, config.norm_eps)
        self.mlp = mlp.feed_forward(builder, norm, f"{prefix}.mlp")
        self.attention.output.next_norm = norm
        self.heads = self.attention.after_norm(NormThenLinear(_Normed(), self.attention.qkv))

    def __call__(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: ForwardBatch
    ) -> tuple[PendingResidual, Tensor]:
        """``x``: attention's input. -> the summand that the residual still lacks, and the residual."""
        queries, _ = self.heads(None, x, cos, sin, cache, batch.cache_index)
        return self.mlp.add(*self.attention.forward(queries, residual, cache, batch))


class SparseHeadLayer:
    """``HeadLayer`` with DeepSeek's experts, and with latent attention where the target has it."""

    def __init__(self, weights: DraftWeights, prefix: str, context: DrafterContext) -> None:
        config, builder, name = weights.local, weights.builder, f"{prefix}.self_attn"
        self.attention: AttentionLayer
        if (latent := config.latent) is None:
            self.attention = block.attention(builder, config, name, config.windows[0])
        else:
            indexer = Indexer(builder, latent.index, name, latent.rope_dim) if latent.index is not None else None
            self.attention = mla.attention(builder, config, name, 0, indexer)
        norm_weight = weights.take([f"{prefix}.post_attention_layernorm.weight"])
        self.norm = context.device.elementwise.make_norm(norm_weight, config.norm_eps)
        assert config.experts is not None
        self.experts = moe.SparseFeedForward(builder, config.experts, prefix, moe.DEEPSEEK)

    def __call__(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: ForwardBatch
    ) -> tuple[PendingResidual, Tensor]:
        """As ``HeadLayer``."""
        normed, residual = self.norm.add(self.attention(x, cos, sin, cache, batch, None), residual)
        return self.experts(normed), residual


def gated_tensors(config: ModelConfig, prefix: str) -> Tensors:
    """The tensors of a ``GatedHeadLayer``."""
    parts = [
        *pre_norm.norm_tensors(config, prefix, ""),
        *gated_attention.tensors(config, f"{prefix}.self_attn", ""),
        *(
            mlp.tensors(config, f"{prefix}.mlp", "")
            if config.experts is None
            else moe.tensors(config.experts, config.hidden_size, prefix, "")
        ),
    ]
    return table_of(parts)


class GatedHeadLayer:
    """``HeadLayer`` with Qwen3-Next's gated attention, and its experts where the target has them."""

    def __init__(self, weights: DraftWeights, prefix: str) -> None:
        config, builder = weights.local, weights.builder
        self.attention = GatedAttention(builder, config, f"{prefix}.self_attn")
        self.norm = builder.norm(f"{prefix}.post_attention_layernorm", config.norm_eps, config.norm_offset)
        experts = config.experts
        self.mlp: Linear = (
            block.gated_mlp(builder, config, f"{prefix}.mlp")
            if experts is None
            else moe.SparseFeedForward(builder, experts, prefix)
        )

    def __call__(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: ForwardBatch
    ) -> tuple[PendingResidual, Tensor]:
        """As ``HeadLayer``."""
        normed, residual = self.norm.add(self.attention(x, cos, sin, cache, batch, None), residual)
        return self.mlp(normed), residual


class HeadModel(DraftModel):
    """The common part of all layouts of heads.

    ``width``: of the target's residual stream, unless a layout says otherwise. ``features``: the width that ``start``
    expects of the target's features, where it is another one.
    """

    features = 0

    def __init__(self, context: DrafterContext, weights: DraftWeights, token_map: bool = True) -> None:
        self.weights = weights
        self.config: ModelConfig = weights.local
        self.width = self.config.stream_size
        self.device: Device = context.device
        self.ends = SharedEnds(context, weights, token_map)
        self.ids = self.ends.ids
        rope = self.config.rope
        self.rotary = RotaryEmbedding(rope, rope.head_dim or self.config.head_dim, context.dtype, context.device)

    def norm(self, name: str) -> Norm:
        module = name.removesuffix(".weight")
        return self.weights.builder.norm(module, self.config.norm_eps, self.config.norm_offset)

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """[tokens, a] and [tokens, b] -> [tokens, a + b]"""
        width = first.shape[1]
        both = self.device.elementwise.empty_rows(len(first), width + second.shape[1], first.dtype)
        self.device.elementwise.add_rows(first, None, both[:, :width])
        self.device.elementwise.add_rows(second, None, both[:, width:])
        return both

    def start(self, features: Tensor) -> Tensor:
        """The target's features [tokens, n] -> the head's input states [tokens, width]."""
        return features

    def logits(self, states: Tensor) -> Tensor:
        return self.ends.head(states)


class HeadDrafter(Drafter):
    """Observes and drafts with a head. A request with all tokens but the last cached has no state to draft from until
    it has run one more step.
    """

    features = True
    stepwise = True

    def __init__(self, context: DrafterContext, model: HeadModel) -> None:
        self._model, self._context = model, context
        self.latent = model.config.latent is not None
        self._expansion = Expansion(context, model)
        self.parameters, self.weight_bytes = model.weights.parameters, model.weights.weight_bytes
        self.cache_bytes = self._expansion.cache_bytes
        self.depth, self.max_nodes = context.settings.num_steps, context.settings.num_draft_tokens
        shape = (context.config.max_slots, model.width)
        self._states = torch.zeros(shape, dtype=context.dtype, device=context.device.torch_device)
        self.spare_bytes = self._expansion.spare_bytes
        self._observed = np.full(
            context.config.max_slots, -1, dtype=np.int64
        )  # observed positions; the state of the last is stored
        self._early: EarlyDraftPasses | None = None

    def make_caches(self, pages: int) -> list[Any]:
        return self._expansion.make_caches(pages)

    def capture(self, agree: Callable[[bool], bool], accept_outputs: Mapping[int, VerifyOutputs] | None) -> None:
        self._expansion.capture(agree)
        if accept_outputs is not None:
            self._early = self._expansion.prepare_early(self._model, self._states, agree, accept_outputs)

    def early_positions(self) -> int:
        return 0 if self._early is None else self._early.early_positions

    def draft_early(self, accepted: AcceptedRows) -> DraftTree | None:
        if self._early is None or not self._early.size(len(accepted.roots)):
            return None
        return self._early.run(accepted)

    def draft_after_pass(self, end: int, rows: int) -> DraftTree | None:
        return None if self._early is None else self._early.run_after_pass(end, rows)

    def mark_observed(self, slots: Longs, lengths: Longs) -> None:
        self._observed[slots] = lengths

    def native_drafts(self, state: SlotTable, rows: int) -> NativeDrafts | None:
        size = self._model.features or self._model.width
        return self._expansion.native_chains(state, rows, self._states, self._observed, self._model.start, size)

    def admit(self, admission: Admission, tokens: npt.NDArray[np.int32]) -> None:
        self._observed[admission.slot] = -1

    def observe(self, observation: Observation) -> None:
        assert observation.features is not None, "made from features"
        self._observed[observation.slots] = observation.starts + observation.counts
        states = self._expansion.observe(observation, observation.next_tokens, self._model.start(observation.features))
        self._states.index_copy_(0, observation.device_slots, states.index_select(0, observation.last))

    def draft(self, rows: DraftRows) -> Drafts:
        drafts = self._expansion.draft(rows, self._states.index_select(0, rows.device_slots))
        known = self._observed[rows.slots] == rows.roots
        return drafts if known.all() else Drafts(drafts.tree, np.where(known, drafts.nodes, 1))
