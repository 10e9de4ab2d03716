"""Multi-token prediction: a model's own heads draft the tokens after the next (DeepSeek-V3, arXiv 2412.19437, section
2.2).

    state = final_norm(layer(projection(embedding and feature, each behind a norm of its own)))

The feature is the target's last hidden state after its final norm, of Step 3.5 and MiMo-V2 before it, whose
``final_norm`` stands before the logits alone; the target's head turns the state into logits, of Step 3.5 the head's
own. A single head runs once for each draft token, as EAGLE's does. Several heads (``MultiHeads``) run once each a
draft: head k drafts the token k + 2 positions on. It joins the state of head k - 1 at position i (head 0 and all heads
of MiMo-V2: the target's feature) with the token at position i + k + 1, so its last k positions wait for tokens that are
not known yet. A draft runs these positions with the tokens of the heads before; the next observation runs them again
with the known tokens.

Public layouts, in the target's checkpoint or in a separate one:

* DeepSeek-V3's: ``model.layers.N`` with ``enorm``, ``hnorm``, ``eh_proj`` of embedding | feature, ``shared_head.norm``;
* MiMo's: ``model.mtp_layers.i`` with ``token_layernorm``, ``hidden_layernorm``, ``input_proj`` of feature | embedding,
  ``final_layernorm``;
* Step 3.5's: as DeepSeek's, with ``transformer.shared_head.norm`` and an output ``transformer.shared_head.output`` of
  each head. The layer is the target's; states are not normed before they are read;
* ERNIE 4.5's: ``model.mtp_block.i`` without experts, ``mtp_emb_norm.i``, ``mtp_hidden_norm.i``, ``mtp_linear_proj.i``
  of embedding | feature; no norm follows;
* Qwen3-Next's: ``mtp.layers.i``; beside it ``mtp.pre_fc_norm_embedding``, ``mtp.pre_fc_norm_hidden``, ``mtp.fc`` of
  embedding | feature, ``mtp.norm``. The layer is the target's with attention. K-EXAONE's and EXAONE 4.5's names are the
  same; the layer is the target's first one, which has no experts;
* MiMo-V2-Flash's: ``model.mtp.layers.i`` with ``enorm``, ``hnorm``, ``eh_proj`` of embedding | feature,
  ``final_layernorm``. The layer is one of the target's with a window and without experts;
* LongCat-Flash's: ``model.mtp.layers.0`` with ``enorm.m``, ``hnorm.m``, ``eh_proj`` of embedding | feature;
  ``model.mtp.norm``. The layer has latent attention and no experts;
* Nemotron 3's: ``mtp.layers.0``, which is attention, with ``enorm``, ``hnorm``, ``eh_proj`` of embedding | feature;
  ``mtp.layers.1``, which is experts, with ``final_layernorm``;
* Ling 2's and 3's: as DeepSeek's, with ``final_layernorm``. The layer is the target's with experts, and with latent
  attention where it has it;
* DeepSeek V4's: ``mtp.0`` with ``enorm``, ``hnorm``, ``e_proj`` of the embedding, ``h_proj`` of each of the residual
  streams, ``hc_head`` and ``norm`` before the logits. The layer is the target's with a window alone (``StreamHead``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.errors import ConfigError, LoadError
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import Admission
from kernels.core.arrays import Ints, Longs
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Norm, PendingResidual
from kernels.core.tree import Drafts, DraftTree, chain
from kernels.devices.linear import norm_of_sum
from kernels.devices.prepared import VerifyOutputs
from kernels.distributed.group import Group
from kernels.models import (
    bailing_hybrid,
    bailing_moe,
    deepseek_v4,
    exaone4,
    longcat_flash,
    mimo_v2_flash,
    nemotron_h,
    step3p5,
)
from kernels.models.config import ModelConfig
from kernels.models.decoder import DecoderLayer
from kernels.models.layers.builder import LayerBuilder
from kernels.models.layers.delta_net import DeltaConfig
from kernels.models.layers.vocabulary import VocabularyHead
from kernels.speculation.draft_sampler import DraftSampler
from kernels.speculation.drafter import AcceptedRows, Drafter, DrafterContext, DraftRows, Observation
from kernels.speculation.drafters.heads import (
    GatedHeadLayer,
    HeadDrafter,
    HeadLayer,
    HeadModel,
    SparseHeadLayer,
    gated_tensors,
    open_checkpoint,
)
from kernels.speculation.expansion import forward_batch, observed_rows
from kernels.speculation.load import DraftCheckpoint, DraftWeights, layer_tensors, need_same_hidden_size, plain
from kernels.speculation.native_drafts import NativeDrafts
from kernels.state.slots import SlotTable
from kernels.weights.tensors import Tensors, TensorSpec, output, table_of

__all__ = ["MtpDrafter", "MtpModel", "MultiHeads"]


class MultiHeads(Drafter):
    """Drafts chains with one token a head. For each slot it keeps features and the first head's states of as many last
    positions as there are heads.
    """

    features = True
    stepwise = True

    def __init__(self, context: DrafterContext, model: MtpModel) -> None:
        if context.settings.topk > 1:
            raise ConfigError("several heads draft a chain: use --speculative-eagle-topk 1 with them")
        heads = model.heads
        self._context, self._heads, self._chained = context, heads, model.chained
        self._sampler = DraftSampler(heads[0].ids, context.device.sampling.greedy)
        self._kept = len(heads)
        self._caches: list[Any] = []
        config, slots = heads[0].config, context.config.max_slots
        layer_bytes = context.device.cache.token_bytes(config.kv_heads, config.head_dim, context.dtype)
        self.cache_bytes = len(heads) * layer_bytes
        self.depth, self.max_nodes = self._kept, min(self._kept + 1, context.settings.num_draft_tokens)
        shape = (slots * self._kept, config.hidden_size)
        self._features = torch.zeros(shape, dtype=context.dtype, device=context.device.torch_device)
        self._states = torch.zeros_like(self._features)
        self._held: Longs = np.zeros(slots, dtype=np.int64)  # number of positions whose state is stored ...
        self._next: Longs = np.zeros(slots, dtype=np.int64)  # ... up to this position, exclusive

    def make_caches(self, pages: int) -> list[Any]:
        config, context = self._heads[0].config, self._context
        self._caches = context.device.cache.make(
            self._kept, pages, context.config.page_size, config.kv_heads, config.head_dim, context.dtype
        )
        return self._caches

    def admit(self, admission: Admission, tokens: Ints) -> None:
        self._held[admission.slot] = 0

    def observe(self, observation: Observation) -> None:
        assert observation.features is not None, "made from features"
        # Earlier positions, whose tokens were not all known, run again if their features are stored.
        again = np.where(
            self._next[observation.slots] == observation.starts,
            np.minimum(self._held[observation.slots], self._kept - 1),
            0,
        )
        starts, counts = observation.starts - again, observation.counts + again
        rows = np.repeat(np.arange(len(starts)), counts)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)  # in its row
        positions = starts[rows] + place
        new = np.cumsum(observation.counts) - observation.counts
        kept = observation.slots[rows] * self._kept + self._kept - again[rows] + place
        count = len(self._features)
        source = np.where(place < again[rows], kept, count + new[rows] + place - again[rows])
        features = torch.cat((self._features, observation.features)).index_select(0, self._put(source))
        table, at = observation.table.view(-1), self._after(observation.slots[rows], positions, observation.table)
        index = self._index(rows, positions, observation.pages)
        attended, at_positions = observed_rows(starts, counts, observation.pages), self._put(positions)
        last = np.cumsum(counts) - 1
        behind = np.arange(self._kept) - self._kept + 1
        keep = self._put(np.maximum(last[:, None] + behind, (last - counts + 1)[:, None]).reshape(-1))
        into = self._put((observation.slots[:, None] * self._kept + np.arange(self._kept)).reshape(-1))
        self._features.index_copy_(0, into, features.index_select(0, keep))
        states = features
        for number, (head, cache) in enumerate(zip(self._heads, self._caches, strict=True)):
            read = table[(at + number).clamp(max=len(table) - 1)]
            batch = forward_batch(self._context.device, head.config, read, at_positions, index, attended)
            states = head.forward(batch, states if self._chained else features, [cache])
            if number == 0:
                self._states.index_copy_(0, into, states.index_select(0, keep))
        self._held[observation.slots] = np.minimum(counts, self._kept)
        self._next[observation.slots] = observation.starts + observation.counts

    def draft(self, rows: DraftRows) -> Drafts:
        steps = max(1, min(rows.steps, self._kept, int(rows.limits.max())))
        known = (self._held[rows.slots] > 0) & (self._next[rows.slots] == rows.roots)
        counts = np.where(known, np.minimum(self._held[rows.slots], self._kept), 1)  # unknown tokens do not run
        starts = np.maximum(rows.roots - counts, 0)
        row = np.repeat(np.arange(len(starts)), counts)
        place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = starts[row] + place
        last = self._put(np.cumsum(counts) - 1)
        kept = rows.slots[row] * self._kept + self._kept - counts[row] + place
        places = self._put(kept)
        states, features = self._states.index_select(0, places), self._features.index_select(0, places)
        index = self._index(row, positions, np.where(known[:, None], rows.pages, 0))
        attended = AttentionRows(starts, counts, rows.pages, 0, len(starts))
        table, at = rows.table.view(-1), self._after(rows.slots[row], positions, rows.table)
        # The draft tokens of a row follow its known tokens: head k reads the last k of them.
        beyond = self._put(positions - rows.roots[row])
        which = self._put(row * (self._kept + 1))
        tokens = torch.zeros((len(starts), self._kept + 1), dtype=torch.int64, device=states.device)
        tokens[:, 0] = rows.root_tokens
        at_positions = self._put(positions)
        for step in range(steps):
            if step:
                ahead = beyond + (step + 1)  # distance of the token read from the root
                drafted = tokens.view(-1)[which + ahead.clamp(min=0)]
                given = table[(at + step).clamp(max=len(table) - 1)].to(torch.int64)
                read = torch.where(ahead > 0, drafted, given)
                head = self._heads[step]
                batch = forward_batch(self._context.device, head.config, read, at_positions, index, attended)
                states = head.forward(batch, states if self._chained else features, [self._caches[step]])
            logits = self._heads[step].logits(states.index_select(0, last))
            tokens[:, step + 1] = self._sampler.best(logits, rows.noise, rows.root_positions, 1 + step)
        nodes = np.where(known, np.minimum(rows.limits, min(steps, self.max_nodes - 1)), 0) + 1
        return Drafts(chain(tokens[:, : steps + 1]), nodes)

    def _put(self, array: Longs) -> Tensor:
        return self._context.device.memory.put(np.ascontiguousarray(array))

    def _after(self, slots: Longs, positions: Longs, table: Tensor) -> Tensor:
        """Indices into the flattened table of the tokens after ``positions``. After a slot's last known token the heads
        read undefined tokens; these positions run again when the token is known.
        """
        return self._put(slots * table.shape[1] + positions + 1)

    def _index(self, rows: Longs, positions: Longs, pages: Ints) -> Tensor:
        page_size = self._context.config.page_size
        return self._put(pages[rows, positions // page_size] * np.int64(page_size) + positions % page_size)


class HeadFamily(Protocol):
    """A model's module whose heads have a layer of its own. ``name``: the head's in the checkpoint."""

    def head_config(self, raw: Mapping[str, Any], target: ModelConfig, name: str) -> ModelConfig:
        """The sizes of a head, a model of one layer after those of ``target``, with config.json ``raw``. Raises
        ConfigError."""
        ...

    def head_tensors(self, config: ModelConfig, name: str) -> Iterator[TensorSpec]:
        """The tensors of the layer."""
        ...

    def head_layer(self, config: ModelConfig, builder: LayerBuilder, name: str) -> DecoderLayer:
        """The layer on one rank, whose sizes are ``config``."""
        ...


@dataclass(frozen=True)
class Layout:
    """Names of a head's parts, in which ``{head}`` is the head, ``{number}`` its number, ``{next}`` the one after it.

    ``token_first``: whether the projection reads the token before the state. ``unused``: copies of the target's
    tensors. ``output``: the module of its logits; empty: they are the target's. ``last_norm`` "": there is none.
    ``family``: makes its layer. ``before_norm``: the target's features and the head's states are those before the last
    norm. ``chained``: of several heads, each reads the states of the one before it, otherwise all read the features.
    ``state_projection``: of each residual stream, ``projection`` being the token's; empty: one is for both. With it
    ``mixture`` makes what stands before the logits in place of ``last_norm``.
    """

    layers: str
    token_norm: str
    state_norm: str
    projection: str
    last_norm: str
    token_first: bool = True
    unused: tuple[str, ...] = ()
    output: str = ""
    family: HeadFamily | None = None
    before_norm: bool = False
    chained: bool = True
    state_projection: str = ""
    mixture: Callable[[ModelConfig, LayerBuilder, str], Norm] | None = None

    def module(self, head: str, part: str) -> str:
        """The name of a ``part``, one of the fields."""
        number = int(head.rpartition(".")[2])
        return part.format(head=head, number=number, next=number + 1)

    def weight(self, head: str, part: str) -> str:
        """The name of its weight."""
        return f"{self.module(head, part)}.weight"


_PARTS = ("{head}.enorm", "{head}.hnorm", "{head}.eh_proj")
DEEPSEEK = Layout(
    "layers", *_PARTS, "{head}.shared_head.norm", unused=("{head}.embed_tokens", "{head}.shared_head.head")
)
MIMO = Layout(
    "mtp_layers",
    "{head}.token_layernorm",
    "{head}.hidden_layernorm",
    "{head}.input_proj",
    "{head}.final_layernorm",
    token_first=False,
)
ERNIE = Layout("mtp_block", "mtp_emb_norm.{number}", "mtp_hidden_norm.{number}", "mtp_linear_proj.{number}", "")
QWEN = Layout("mtp.layers", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
EXAONE = replace(QWEN)
_LING = replace(DEEPSEEK, last_norm="{head}.final_layernorm")
_OWN = {
    "BailingHybridForCausalLM": replace(_LING, family=bailing_hybrid),
    "BailingMoeV3ForCausalLM": replace(_LING, family=bailing_hybrid),
    "BailingMoeV2ForCausalLM": replace(_LING, family=bailing_moe),
    "DeepseekV4ForCausalLM": Layout(
        "mtp",
        "{head}.enorm",
        "{head}.hnorm",
        "{head}.e_proj",
        "",
        family=deepseek_v4,
        before_norm=True,
        state_projection="{head}.h_proj",
        mixture=deepseek_v4.head_norm,
    ),
    "Exaone4ForCausalLM": replace(QWEN, family=exaone4),
    "LongcatFlashForCausalLM": Layout(
        "mtp.layers",
        "{head}.enorm.m",
        "{head}.hnorm.m",
        "{head}.eh_proj",
        "mtp.norm",
        unused=("mtp.embed_tokens",),
        family=longcat_flash,
    ),
    "MiMoV2FlashForCausalLM": Layout(
        "mtp.layers", *_PARTS, "{head}.final_layernorm", family=mimo_v2_flash, before_norm=True, chained=False
    ),
    "NemotronHForCausalLM": Layout("mtp.layers", *_PARTS, "mtp.layers.{next}.final_layernorm", family=nemotron_h),
    "Step3p5ForCausalLM": Layout(
        "layers",
        *_PARTS,
        "{head}.transformer.shared_head.norm",
        output="{head}.transformer.shared_head.output",
        family=step3p5,
        before_norm=True,
    ),
}
"""Layouts of heads that have a layer of their family, by the target's architecture."""


def _find(checkpoint: DraftCheckpoint, target: ModelConfig) -> tuple[Layout, list[str]]:
    """The layout, and the heads' names in order. Raises LoadError where there are none, ConfigError for a target whose
    heads are not built."""
    own = _OWN.get(target.architecture)
    if target.norm_offset and not isinstance(target.recurrence, DeltaConfig) and own is None:
        raise ConfigError(
            f"the heads for later tokens of {target.architecture} are not run, as their norms add to their weights; "
            "use --speculative-algorithm NGRAM"
        )
    layouts = (DEEPSEEK, MIMO, ERNIE, QWEN) if own is None else (own,)
    if checkpoint.dummy:
        layout = own or (QWEN if isinstance(target.recurrence, DeltaConfig) else MIMO)
        first = target.layers if layout.layers == "layers" else 0
        count = 1 if layout is QWEN else int(checkpoint.raw.get("num_nextn_predict_layers") or 1)
        return layout, [f"{layout.layers}.{first + index}" for index in range(count)]
    for layout in layouts:
        pattern = re.compile(rf"{re.escape(layout.layers)}\.(\d+)\..*")
        numbers = sorted({int(match[1]) for name in checkpoint.modules if (match := pattern.fullmatch(name))})
        heads = [f"{layout.layers}.{number}" for number in numbers]
        found = [head for head in heads if layout.module(head, layout.projection) in checkpoint.modules]
        if found:
            if layout is QWEN and not isinstance(target.recurrence, DeltaConfig):
                layout = EXAONE
            return layout, found
    wanted = " or ".join(layout.projection.format(head=f"{layout.layers}.N", number="N") for layout in layouts)
    raise LoadError(
        f"the weights in {checkpoint.path} have no head for tokens after the next: no {wanted}; give "
        "--speculative-draft-model-path, or use another algorithm"
    )


class MtpHead(HeadModel):
    """One head, ``prefix`` in the checkpoint."""

    def __init__(self, context: DrafterContext, weights: DraftWeights, layout: Layout, prefix: str) -> None:
        super().__init__(context, weights)
        self.token_first = layout.token_first
        self.token_norm = self.norm(layout.weight(prefix, layout.token_norm))
        self.state_norm = self.norm(layout.weight(prefix, layout.state_norm))
        projection = weights.projection([layout.module(prefix, layout.projection)])
        self.projection = context.device.linear.make_projection(projection, None)
        self.last_norm = self.norm(layout.weight(prefix, layout.last_norm)) if layout.last_norm else None
        self.norm_of_logits = self.last_norm if layout.before_norm else None
        self.block: DecoderLayer | None = None
        if layout.output:
            rows, group = weights.take([layout.weight(prefix, layout.output)]), context.group
            if self.ids is not None:
                rows, group = rows.index_select(0, self.ids), Group()
            self.ends.head = VocabularyHead(group, context.device.linear.make_dense(rows, None))
        if layout.family is not None:
            self.block = layout.family.head_layer(self.config, weights.builder, prefix)
            return
        self.input_norm = self.norm(f"{prefix}.input_layernorm.weight")
        self.layer: HeadLayer | SparseHeadLayer | GatedHeadLayer
        if layout is QWEN:
            self.layer = GatedHeadLayer(weights, prefix)
        elif self.config.experts is not None:
            self.layer = SparseHeadLayer(weights, prefix, context)
        else:
            self.layer = HeadLayer(weights, prefix, context)

    def forward(self, batch: ForwardBatch, states: Tensor, caches: list[Any]) -> Tensor:
        cos, sin = self.rotary(batch.positions)
        (cache,) = caches
        both = (self.ends.embed(batch.token_ids), self.token_norm), (states, self.state_norm)
        first, second = both if self.token_first else both[::-1]
        residual = self.projection(self.device.elementwise.norm_pair(*first, *second))
        x: PendingResidual
        if self.block is not None:
            x, residual = self.block(None, residual, cos, sin, cache, batch)
        else:
            x, residual = self.layer(self.input_norm(residual), residual, cos, sin, cache, batch)
        if self.last_norm is None or self.norm_of_logits is not None:
            return self.device.elementwise.add_pending(x, residual)
        return norm_of_sum(self.last_norm, x, residual)[0]

    def logits(self, states: Tensor) -> Tensor:
        return super().logits(states if self.norm_of_logits is None else self.norm_of_logits(states))


class StreamHead(HeadModel):
    """One head of a target with several residual streams: it reads all of them, and its states are its own
    [tokens, streams * hidden]."""

    def __init__(self, context: DrafterContext, weights: DraftWeights, layout: Layout, prefix: str) -> None:
        super().__init__(context, weights)
        assert layout.family is not None
        assert layout.mixture is not None, "of a layout with a projection of states"
        self.token_norm = self.norm(layout.weight(prefix, layout.token_norm))
        self.state_norm = self.norm(layout.weight(prefix, layout.state_norm))
        self.token_projection, self.state_projection = (
            context.device.linear.make_projection(weights.projection([layout.module(prefix, part)]), None)
            for part in (layout.projection, layout.state_projection)
        )
        self.block = layout.family.head_layer(self.config, weights.builder, prefix)
        self.mixture = layout.mixture(self.config, weights.builder, prefix)

    def forward(self, batch: ForwardBatch, states: Tensor, caches: list[Any]) -> Tensor:
        cos, sin = self.rotary(batch.positions)
        (cache,) = caches
        token = self.token_projection(self.token_norm(self.ends.embed(batch.token_ids)))
        streams = self.state_projection(self.state_norm(states.reshape(-1, self.config.hidden_size)))
        residual = (streams.view(len(token), -1, token.shape[1]) + token.unsqueeze(1)).flatten(1)
        return self.device.elementwise.add_pending(*self.block(None, residual, cos, sin, cache, batch))

    def logits(self, states: Tensor) -> Tensor:
        return super().logits(self.mixture(states))


class MtpModel:
    """The first ``count`` heads of a checkpoint. Raises ConfigError or LoadError."""

    def __init__(self, context: DrafterContext, checkpoint: DraftCheckpoint, count: int) -> None:
        layout, prefixes = _find(checkpoint, context.full_config)
        if count > len(prefixes):
            raise ConfigError(
                f"{count} speculative steps of a head each need as many heads, and {checkpoint.path} has "
                f"{len(prefixes)}: lower --speculative-num-steps or leave out --enable-multi-layer-eagle"
            )
        prefixes = prefixes[:count]
        whole, *others = (_config(checkpoint, layout, prefix, context.full_config) for prefix in prefixes)
        if count > 1 and (whole.latent is not None or whole.row_window is not None):
            raise ConfigError(
                "several heads with latent or compressed attention are not run: leave --enable-multi-layer-eagle out"
            )
        if any(other != whole for other in others):
            raise ConfigError(
                f"{checkpoint.path}: the first {count} heads for later tokens differ in their window or other sizes, "
                "and only equal ones are run together: leave --enable-multi-layer-eagle out"
            )
        need_same_hidden_size(checkpoint, whole, context.full_config)
        tensors: dict[str, TensorSpec] = {}
        for prefix in prefixes:
            tensors |= _tensors(checkpoint, layout, prefix, whole, context.full_config.vocab_size)
            if layout.output:  # with a token map it is whole, and some of its rows are taken
                name = layout.module(prefix, layout.output)
                spec = output(name, context.full_config.vocab_size, whole.hidden_size)
                tensors[spec.name] = replace(spec, split=None) if context.settings.token_map else spec
        self.weights = DraftWeights(context, checkpoint, tensors, whole)
        make = StreamHead if layout.state_projection else MtpHead
        self.heads: list[HeadModel] = [make(context, self.weights, layout, prefix) for prefix in prefixes]
        self.chained = layout.chained


def _config(checkpoint: DraftCheckpoint, layout: Layout, prefix: str, target: ModelConfig) -> ModelConfig:
    """The sizes of one head."""
    if layout.family is not None:
        return layout.family.head_config(checkpoint.raw, target, prefix)
    if layout is QWEN:
        experts = None if target.experts is None else replace(target.experts, layers=frozenset((0,)))
        return replace(target, layers=1, windows=(0,), experts=experts, recurrence=None, recurrent=frozenset())
    if layout is EXAONE:
        return exaone4.head_config(checkpoint.raw, target, prefix)
    # A head has experts as the last layers do, and an indexer of its own.
    own = {"first_k_dense_replace": 0, "mlp_layer_types": None, "indexer_types": None, "index_topk_pattern": None}
    result = checkpoint.config(target.architecture, 1, prefix, layer_types=None, sliding_window=None, **own)
    return replace(result, experts=None) if layout is ERNIE else result


def _tensors(checkpoint: DraftCheckpoint, layout: Layout, prefix: str, config: ModelConfig, vocab: int) -> Tensors:
    hidden = config.hidden_size
    if layout.family is not None:
        result = table_of(layout.family.head_tensors(config, prefix))
    else:
        result = dict(gated_tensors(config, prefix) if layout is QWEN else layer_tensors(config, prefix))
    for norm in filter(None, (layout.token_norm, layout.state_norm, layout.last_norm)):
        result |= plain(layout.weight(prefix, norm), hidden)
    inputs = hidden if layout.state_projection else 2 * hidden
    for projection in filter(None, (layout.projection, layout.state_projection)):
        result |= plain(layout.weight(prefix, projection), hidden, inputs)
    for name in (layout.weight(prefix, part) for part in layout.unused):
        if checkpoint.has(name):
            result |= plain(name, vocab, hidden)
    return result


class MtpDrafter(Drafter):
    """One head for all steps, or with ``settings.multi_layer`` a head for each step."""

    features = True
    stepwise = True

    @classmethod
    def captured_layers(cls, settings: SpeculativeSettings, model: ModelConfig) -> tuple[int, ...]:
        layout = _OWN.get(model.architecture)
        return (model.layers - 1,) if layout is not None and layout.before_norm else ()

    def __init__(self, context: DrafterContext) -> None:
        settings = context.settings
        checkpoint = open_checkpoint(context)
        several = settings.multi_layer and settings.num_steps > 1
        if several and context.experts is not None:
            raise ConfigError(
                "--speculative-moe-a2a-backend: a pass of several heads runs only one of them, and all devices must run"
                " the same layers; leave it or --enable-multi-layer-eagle out"
            )
        model = MtpModel(context, checkpoint, settings.num_steps if several else 1)
        self._drafter: Drafter = MultiHeads(context, model) if several else HeadDrafter(context, model.heads[0])
        self.parameters, self.weight_bytes = model.weights.parameters, model.weights.weight_bytes
        self.cache_bytes, self.spare_bytes = self._drafter.cache_bytes, self._drafter.spare_bytes
        self.depth, self.max_nodes = self._drafter.depth, self._drafter.max_nodes
        self.latent = self._drafter.latent

    def make_caches(self, pages: int) -> list[Any]:
        return self._drafter.make_caches(pages)

    def observe(self, observation: Observation) -> None:
        self._drafter.observe(observation)

    def draft(self, rows: DraftRows) -> Drafts:
        return self._drafter.draft(rows)

    def capture(self, agree: Callable[[bool], bool], accept_outputs: Mapping[int, VerifyOutputs] | None) -> None:
        self._drafter.capture(agree, accept_outputs)

    def native_drafts(self, state: SlotTable, rows: int) -> NativeDrafts | None:
        return self._drafter.native_drafts(state, rows)

    def early_positions(self) -> int:
        return self._drafter.early_positions()

    def draft_early(self, accepted: AcceptedRows) -> DraftTree | None:
        return self._drafter.draft_early(accepted)

    def draft_after_pass(self, end: int, rows: int) -> DraftTree | None:
        return self._drafter.draft_after_pass(end, rows)

    def mark_observed(self, slots: Longs, lengths: Longs) -> None:
        self._drafter.mark_observed(slots, lengths)

    def admit(self, admission: Admission, tokens: npt.NDArray[np.int32]) -> None:
        self._drafter.admit(admission, tokens)
