"""STANDALONE: a smaller model with the same vocabulary drafts tokens (Leviathan et al., arXiv 2211.17192, section 2).

Its cache holds every token at its own position, the last known one included. An observation is a pass over the new
tokens, which also yields the first draft token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.contract.caches import is_plain
from kernels.contract.errors import ConfigError
from kernels.contract.speculation import same_tokens
from kernels.contract.step import Admission
from kernels.core.arrays import Ints, Longs
from kernels.core.batch import ForwardBatch
from kernels.core.tree import Drafts
from kernels.distributed.group import Group
from kernels.models.config_loader import read_config
from kernels.models.decoder import Decoder
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.vocabulary import VocabularyHead
from kernels.models.registry import build, caches, tensors
from kernels.speculation.division import divide_draft
from kernels.speculation.drafter import Drafter, DrafterContext, DraftRows, Observation
from kernels.speculation.expansion import Expansion, observed_rows
from kernels.speculation.load import draft_scheme
from kernels.speculation.native_drafts import NativeDrafts
from kernels.speculation.token_map import head_rows, read_token_map
from kernels.state.slots import SlotTable
from kernels.weights.loading import CheckpointFiles, Placement, open_weights
from kernels.weights.quantization.weights import Projection, QuantizedWeight
from kernels.weights.source import ModelSource

__all__ = ["PaddedEmbedding", "StandaloneDrafter"]


class PaddedEmbedding:
    """``source`` with the embedding table padded with zeros to ``rows``, so that every id of the target has a row.

    An output layer that shares the table (``tied``) is returned without the padding, because a row of zeros could win
    as a draft token.
    """

    def __init__(self, source: ModelSource, rows: int, tied: bool) -> None:
        self._source, self._rows, self._tied = source, rows, tied
        self._head: Tensor | None = None

    def take(self, names: Sequence[str]) -> Tensor:
        """As ``TensorSource.take``."""
        return self._source.take(names)

    def biases(self, modules: Sequence[str]) -> Tensor | None:
        """As ``TensorSource.biases``."""
        return self._source.biases(modules)

    def projection(self, modules: Sequence[str]) -> Projection:
        """As ``TensorSource.projection``."""
        if self._tied and list(modules) == ["lm_head"]:
            assert self._head is not None, "the table is taken first"
            return self._head
        return self._source.projection(modules)

    def table(self, module: str) -> Tensor:
        """As ``ModelSource.table``, in floats."""
        result = self._source.table(module)
        if isinstance(result, QuantizedWeight):
            result = result.dequantize(result.dtype)
        whole = pad(result, (0, 0, 0, self._rows - len(result)))
        self._head = whole[: len(result)]
        return whole


class StandaloneModel:
    """A decoder as a draft model. Its only state is its cache."""

    ids: Tensor | None = None

    def __init__(self, context: DrafterContext) -> None:
        settings, config, group = context.settings, context.config, context.group
        try:
            whole = read_config(settings.draft_model_path, quantized=True)
        except ConfigError as error:
            raise ConfigError(f"--speculative-draft-model-path {settings.draft_model_path}: {error}") from error
        if not is_plain(caches(whole)) or whole.eager_attention:
            raise ConfigError(
                f"a draft model must keep keys and values of all tokens in every layer, and not cap scores of "
                f"attention, which {whole.architecture} does not: use another draft model"
            )
        scheme = draft_scheme(settings.draft_model_path, config, settings)
        target = context.full_config.vocab_size
        if not same_tokens(whole.vocab_size, target):
            raise ConfigError(
                f"the draft model has {whole.vocab_size} tokens, the model {target}: their tokens must be the same; "
                "give --speculative-draft-model-path a model with the same tokenizer"
            )
        if whole.max_positions < context.context:
            raise ConfigError(
                f"the draft model is made for {whole.max_positions} tokens, and sequences have up to "
                f"{context.context}; lower --context-length, or use another draft model"
            )
        declared = tensors(whole) if scheme is None else scheme.adapt(tensors(whole))
        division = divide_draft(config, group, context.experts, whole, declared.values())
        self.config = division.local
        load_format = settings.load_format or config.load_format
        files = CheckpointFiles(settings.draft_model_path, load_format, config.random_seed)
        placement = Placement(context.dtype, context.device.torch_device, division.shard)
        weights = open_weights(files, declared, placement, scheme)
        # No rank has the missing rows of a sharded table: they are zeros on all ranks.
        short = whole.vocab_size < target and group.size == 1
        source = PaddedEmbedding(weights, target, whole.tied_embeddings) if short else weights
        local = dataclasses.replace(self.config, tied_embeddings=False) if short else self.config
        builder = ModelBuilder(
            source,
            context.device,
            group,
            context.dtype,
            context.context,
            ep_size=division.ep_size,
            shared=division.shared,
        )
        decoder = build(local, builder)
        if not isinstance(decoder, Decoder):
            raise ConfigError(f"{whole.architecture} generates no text; give --speculative-draft-model-path another")
        self._decoder = decoder
        self._head = self._decoder.logits
        if settings.token_map or whole.vocab_size > target:
            vocab_size = min(whole.vocab_size, target)
            ids = read_token_map(settings.token_map, vocab_size) if settings.token_map else torch.arange(vocab_size)
            rows = head_rows(context, settings.draft_model_path, load_format, whole, self._decoder, ids)
            self._head = VocabularyHead(Group(), context.device.linear.make_dense(rows, None))
            self._decoder.head = self._head  # frees the memory of the whole head
            self.ids = ids.to(context.device.torch_device)
        self.parameters, self.weight_bytes = weights.parameters, weights.weight_bytes
        self.width = whole.hidden_size

    def forward(self, batch: ForwardBatch, states: Tensor, caches: list[Any]) -> Tensor:
        return self._decoder.forward(batch, caches)

    def logits(self, states: Tensor) -> Tensor:
        return self._head(states)


class StandaloneDrafter(Drafter):
    """STANDALONE. ``_filled``: by slot, filled positions of the draft's cache; one more than observed positions, if a
    page has room for it. ``_states`` [max_slots, hidden]: the hidden state of the last one.
    """

    stepwise = True

    def __init__(self, context: DrafterContext) -> None:
        settings, slots = context.settings, context.config.max_slots
        self._device = context.device
        self._model = StandaloneModel(context)
        self._expansion = Expansion(context, self._model, first=1)
        self._windows = sorted(set(self._model.config.windows))
        self._page_size, self._max_tokens = context.config.page_size, context.config.max_step_tokens
        self._filled: Longs = np.zeros(slots, dtype=np.int64)
        self._states = torch.zeros((slots, self._model.width), dtype=context.dtype, device=context.device.torch_device)
        self.parameters, self.weight_bytes = self._model.parameters, self._model.weight_bytes
        self.depth = settings.num_steps
        self.max_nodes = settings.num_draft_tokens
        self.cache_bytes = self._expansion.cache_bytes
        self.spare_bytes = self._expansion.spare_bytes

    def make_caches(self, pages: int) -> list[Any]:
        return self._expansion.make_caches(pages)

    def native_drafts(self, state: SlotTable, rows: int) -> NativeDrafts | None:
        return self._expansion.native_chains(state, rows, self._states, self._filled, lambda features: features, 0)

    def admit(self, admission: Admission, tokens: Ints) -> None:
        self._filled[admission.slot] = admission.computed

    def observe(self, observation: Observation) -> None:
        known = np.minimum(observation.starts + observation.counts + 1, observation.capacity)
        self._fill(observation.slots, known, observation.pages, observation.table)

    def draft(self, rows: DraftRows) -> Drafts:
        granted = rows.capacity > rows.roots  # else there is no place for the last known token
        short = np.flatnonzero(granted & (self._filled[rows.slots] <= rows.roots))
        if len(short):  # no page was available for the last known token when it was observed
            self._fill(rows.slots[short], rows.roots[short] + 1, rows.pages[short], rows.table)
        drafts = self._expansion.draft(rows, self._states.index_select(0, rows.device_slots))
        return drafts if granted.all() else Drafts(drafts.tree, np.where(granted, drafts.nodes, 1))

    def _fill(self, slots: Longs, known: Longs, pages: Ints, table: Tensor) -> None:
        """Run each slot's tokens up to ``known``. ``pages`` [rows, columns] hold them all."""
        while len(rows := np.flatnonzero(known > self._filled[slots])):  # memory suffices for the tokens of one step
            self._run(slots[rows], known[rows] - self._filled[slots[rows]], pages[rows], table)

    def _run(self, slots: Longs, counts: Longs, pages: Ints, table: Tensor) -> None:
        """Run the next ``counts`` tokens of each slot, or as many as fit into a step, the shortest rows first."""
        order = np.argsort(counts, kind="stable")
        counts = np.diff(np.minimum(np.cumsum(counts[order]), self._max_tokens), prepend=0)
        rows, counts = order[counts > 0], counts[counts > 0]
        slots, pages, put = slots[rows], pages[rows], self._device.memory.put
        starts, ends = self._filled[slots], np.cumsum(counts)
        positions = np.arange(int(ends[-1])) - np.repeat(ends - counts - starts, counts)
        owners = np.repeat(np.arange(len(rows)), counts)
        size = self._page_size
        index = pages[owners, positions // size] * np.int64(size) + positions % size
        at = put(positions)
        tokens = table[put(slots[owners]), at].to(torch.int64)
        attention = observed_rows(starts, counts, pages)
        plans = {window: self._device.attention.plan(attention, window) for window in self._windows}
        batch = ForwardBatch(tokens, at, put(index), plans)
        states = self._model.forward(batch, self._states, self._expansion.caches)
        self._states[put(slots)] = states.index_select(0, put(ends - 1))
        self._filled[slots] = starts + counts
