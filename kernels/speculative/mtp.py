"""A model's own heads for the tokens after the next (multi-token prediction; DeepSeek-V3, arXiv 2412.19437).

    state = final_norm(layer(projection(embedding and feature, each behind a norm of its own)))

The feature is the target's last hidden state after its final norm; logits are the target's head of the state. One head
that is run again and again drafts as EAGLE's does; several heads draft a token each (``multi_mtp``). Public layouts, in
the target's own checkpoint or in one of their own:

* DeepSeek-V3's: ``model.layers.N`` with ``enorm``, ``hnorm``, ``eh_proj`` of embedding | feature, ``shared_head.norm``;
* MiMo's: ``model.mtp_layers.i`` with ``token_layernorm``, ``hidden_layernorm``, ``input_proj`` of feature | embedding,
  ``final_layernorm``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.load_error import LoadError
from kernels.models.config import ConfigError, ModelConfig
from kernels.platforms.prepared import PassEnd
from kernels.platforms.projections import norm_of_sum
from kernels.slots import SlotTable
from kernels.speculative.checkpoint import DraftCheckpoint, DraftWeights, layer_shapes, need_same_hidden_size
from kernels.speculative.drafter import Drafter, DrafterContext, DraftRows, Drafts, Observation
from kernels.speculative.heads import HeadDrafter, HeadLayer, HeadModel, open_checkpoint
from kernels.speculative.host_drafts import HostDrafts
from kernels.speculative.multi_mtp import MultiHeads
from kernels.speculative.tree import DraftTree
from kernels.step import Admission

__all__ = ["DEEPSEEK", "MIMO", "Layout", "MtpDrafter", "MtpModel"]


@dataclass(frozen=True)
class Layout:
    """What the parts of a head are called. ``token_first``: what the projection reads first. ``unused``: copies of the
    target's tensors."""

    layers: str
    token_norm: str
    state_norm: str
    projection: str
    last_norm: str
    token_first: bool
    unused: tuple[str, ...] = ()


DEEPSEEK = Layout(
    "layers", "enorm", "hnorm", "eh_proj", "shared_head.norm", True, ("embed_tokens.weight", "shared_head.head.weight")
)
MIMO = Layout("mtp_layers", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", False)


def _find(checkpoint: DraftCheckpoint) -> tuple[Layout, list[str]]:
    """The layout, and the heads' names in order. Raises LoadError where there are none."""
    if checkpoint.dummy:
        count = int(checkpoint.raw.get("num_nextn_predict_layers") or 1)
        return MIMO, [f"{MIMO.layers}.{index}" for index in range(count)]
    for layout in (DEEPSEEK, MIMO):
        pattern = re.compile(rf"{layout.layers}\.(\d+)\.{layout.projection}")
        found = sorted(int(match[1]) for name in checkpoint.modules if (match := pattern.fullmatch(name)))
        if found:
            return layout, [f"{layout.layers}.{index}" for index in found]
    raise LoadError(
        f"the weights in {checkpoint.path} have no head for tokens after the next: neither model.layers.N.eh_proj nor "
        "model.mtp_layers.N.input_proj; give --speculative-draft-model-path, or use another algorithm"
    )


class MtpHead(HeadModel):
    """One head, ``prefix`` in the checkpoint."""

    def __init__(self, context: DrafterContext, weights: DraftWeights, layout: Layout, prefix: str) -> None:
        super().__init__(context, weights)
        self.token_first = layout.token_first
        self.token_norm = self.norm(f"{prefix}.{layout.token_norm}.weight")
        self.state_norm = self.norm(f"{prefix}.{layout.state_norm}.weight")
        self.projection = context.platform.make_projection(weights.projection([f"{prefix}.{layout.projection}"]), None)
        self.input_norm = self.norm(f"{prefix}.input_layernorm.weight")
        self.layer = HeadLayer(weights, prefix, context)
        self.last_norm = self.norm(f"{prefix}.{layout.last_norm}.weight")

    def forward(self, batch: ForwardBatch, states: Tensor, caches: list[Any]) -> Tensor:
        cos, sin = self.rotary(batch.positions)
        (cache,) = caches
        both = (self.ends.embed(batch.token_ids), self.token_norm), (states, self.state_norm)
        first, second = both if self.token_first else both[::-1]
        residual = self.projection(self.platform.norm_both(*first, *second))
        x, residual = self.layer(self.input_norm(residual), residual, cos, sin, cache, batch)
        return norm_of_sum(self.last_norm, x, residual)[0]


class MtpModel:
    """``count``: how many of the heads are wanted. Raises ConfigError or LoadError."""

    def __init__(self, context: DrafterContext, checkpoint: DraftCheckpoint, count: int) -> None:
        layout, prefixes = _find(checkpoint)
        if count > len(prefixes):
            raise ConfigError(
                f"{count} speculative steps of a head each need as many heads, and {checkpoint.path} has "
                f"{len(prefixes)}: lower --speculative-num-steps or leave out --enable-multi-layer-eagle"
            )
        prefixes = prefixes[:count]
        architecture = context.whole.architecture
        whole = checkpoint.config(architecture, 1, prefixes[0], layer_types=None, sliding_window=None)
        need_same_hidden_size(checkpoint, whole, context.whole)
        shapes: dict[str, tuple[int, ...]] = {}
        for prefix in prefixes:
            shapes |= _shapes(checkpoint, layout, prefix, whole, context.whole.vocab_size)
        self.weights = DraftWeights(context, checkpoint, shapes, whole)
        self.heads = [MtpHead(context, self.weights, layout, prefix) for prefix in prefixes]


def _shapes(
    checkpoint: DraftCheckpoint, layout: Layout, prefix: str, config: ModelConfig, vocab: int
) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes = layer_shapes(config, prefix)
    for norm in (layout.token_norm, layout.state_norm, layout.last_norm):
        shapes[f"{prefix}.{norm}.weight"] = (hidden,)
    shapes[f"{prefix}.{layout.projection}.weight"] = (hidden, 2 * hidden)
    for name in layout.unused:
        if checkpoint.has(f"{prefix}.{name}"):
            shapes[f"{prefix}.{name}"] = (vocab, hidden)
    return shapes


class MtpDrafter(Drafter):
    """One head run again and again, or with ``settings.multi_layer`` a head for each step."""

    features = True
    stepwise = True

    def __init__(self, context: DrafterContext) -> None:
        settings = context.settings
        checkpoint = open_checkpoint(context)
        several = settings.multi_layer and settings.num_steps > 1
        model = MtpModel(context, checkpoint, settings.num_steps if several else 1)
        self._drafter: Drafter = MultiHeads(context, model.heads) if several else HeadDrafter(context, model.heads[0])
        self.parameters, self.weight_bytes = model.weights.parameters, model.weights.weight_bytes
        self.cache_bytes, self.spare_bytes = self._drafter.cache_bytes, self._drafter.spare_bytes
        self.depth, self.most_nodes = self._drafter.depth, self._drafter.most_nodes

    def make_caches(self, pages: int) -> list[Any]:
        return self._drafter.make_caches(pages)

    def observe(self, seen: Observation) -> None:
        self._drafter.observe(seen)

    def draft(self, rows: DraftRows) -> Drafts:
        return self._drafter.draft(rows)

    def capture(self, agree: Callable[[bool], bool], ends: Mapping[int, PassEnd]) -> None:
        self._drafter.capture(agree, ends)

    def host_drafts(self, state: SlotTable, rows: int) -> HostDrafts | None:
        return self._drafter.host_drafts(state, rows)

    def reach(self) -> int:
        return self._drafter.reach()

    def draft_ahead(
        self,
        roots: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int32],
        outcome: Tensor,
        tokens: Tensor,
        features: Tensor,
        places: npt.NDArray[np.int64],
    ) -> DraftTree | None:
        return self._drafter.draft_ahead(roots, slots, pages, outcome, tokens, features, places)

    def draft_behind(self, end: int, rows: int) -> DraftTree | None:
        return self._drafter.draft_behind(end, rows)

    def observed_ahead(self, slots: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> None:
        self._drafter.observed_ahead(slots, lengths)

    def admit(self, admission: Admission, tokens: npt.NDArray[np.int32]) -> None:
        self._drafter.admit(admission, tokens)
