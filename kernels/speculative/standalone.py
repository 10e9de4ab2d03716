"""A smaller model of the same vocabulary guesses (STANDALONE; Leviathan et al., arXiv 2211.17192, section 2).

Its cache holds every token at its own position, the last known one among them, so that an observation is a pass of it
over the tokens that are new, and the first guess comes of that.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.loading import open_weights
from kernels.models.config import ConfigError, read_config
from kernels.models.decoder import Decoder, tensor_shapes
from kernels.parallel.group import Group
from kernels.parallel.layers import VocabularyHead
from kernels.parallel.partition import local_config, tensor_parts
from kernels.slots import SlotTable
from kernels.speculative.draft_scheme import draft_scheme
from kernels.speculative.drafter import Drafter, DrafterContext, DraftRows, Drafts, Observation
from kernels.speculative.expansion import Expansion, observed_rows
from kernels.speculative.host_drafts import HostDrafts
from kernels.speculative.settings import same_tokens
from kernels.speculative.token_map import head_rows, read_token_map
from kernels.speculative.vocabulary import Padded
from kernels.step import Admission

__all__ = ["StandaloneDrafter"]

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class StandaloneModel:
    """A decoder as a draft model: its keys and values are all the state it has."""

    ids: Tensor | None = None

    def __init__(self, context: DrafterContext) -> None:
        settings, config, group = context.settings, context.config, context.group
        whole = read_config(settings.draft_model_path, quantized=True)
        scheme = draft_scheme(settings.draft_model_path, config, settings)
        target = context.whole.vocab_size
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
        self.config = local_config(whole, group.size)
        shapes = tensor_shapes(whole) if scheme is None else scheme.shapes(tensor_shapes(whole))
        weights = open_weights(
            settings.draft_model_path,
            settings.load_format or config.load_format,
            shapes,
            tensor_parts(shapes, whole, group.rank, group.size),
            context.dtype,
            context.platform.device,
            config.random_seed,
            lambda fraction: None,
            scheme,
        )
        # Of a table that is divided, no rank has the rows that are missing: they are zeros on all.
        short = whole.vocab_size < target and group.size == 1
        source = Padded(weights, target, whole.tied_embeddings) if short else weights
        local = dataclasses.replace(self.config, tied_embeddings=False) if short else self.config
        self._decoder = Decoder(local, source, context.platform, context.dtype, group)
        self._head = self._decoder.logits
        if settings.token_map or whole.vocab_size > target:
            least = min(whole.vocab_size, target)
            ids = read_token_map(settings.token_map, least) if settings.token_map else torch.arange(least)
            load_format = settings.load_format or config.load_format
            rows = head_rows(context, settings.draft_model_path, load_format, whole, self._decoder, ids)
            self._head = VocabularyHead(Group(), context.platform.make_linear(rows, None))
            self._decoder.head = self._head  # the whole one would take memory for nothing
            self.ids = ids.to(context.platform.device)
        self.parameters, self.weight_bytes = weights.parameters, weights.weight_bytes
        self.width = whole.hidden_size

    def forward(self, batch: ForwardBatch, states: Tensor, caches: list[Any]) -> Tensor:
        return self._decoder.forward(batch, caches)

    def logits(self, states: Tensor) -> Tensor:
        return self._head(states)


class StandaloneDrafter(Drafter):
    """``_filled``: by slot, positions in the draft's cache; one more than were observed, where there is a page for it.
    ``_states`` [max_slots, hidden]: what the last of them left.
    """

    stepwise = True

    def __init__(self, context: DrafterContext) -> None:
        settings, slots = context.settings, context.config.max_slots
        self._platform = context.platform
        self._model = StandaloneModel(context)
        self._expansion = Expansion(context, self._model, first=1)
        self._windows = sorted(set(self._model.config.windows))
        self._page_size, self._most = context.config.page_size, context.config.max_step_tokens
        self._filled: Longs = np.zeros(slots, dtype=np.int64)
        self._states = torch.zeros((slots, self._model.width), dtype=context.dtype, device=context.platform.device)
        self.parameters, self.weight_bytes = self._model.parameters, self._model.weight_bytes
        self.depth = settings.num_steps
        self.most_nodes = settings.num_draft_tokens
        self.cache_bytes = self._expansion.cache_bytes
        self.spare_bytes = self._expansion.spare_bytes

    def make_caches(self, pages: int) -> list[Any]:
        return self._expansion.make_caches(pages)

    def host_drafts(self, state: SlotTable, rows: int) -> HostDrafts | None:
        return self._expansion.host_chains(state, rows, self._states, self._filled, lambda features: features, 0)

    def admit(self, admission: Admission, tokens: Ints) -> None:
        self._filled[admission.slot] = admission.computed

    def observe(self, seen: Observation) -> None:
        known = np.minimum(seen.starts + seen.counts + 1, seen.capacity)
        self._fill(seen.slots, known, seen.pages, seen.table)

    def draft(self, rows: DraftRows) -> Drafts:
        short = np.flatnonzero(self._filled[rows.slots] <= rows.roots)
        if len(short):  # there was no page for the last known token when it was observed
            self._fill(rows.slots[short], rows.roots[short] + 1, rows.pages[short], rows.table)
        return self._expansion.draft(rows, self._states.index_select(0, rows.device_slots))

    def _fill(self, slots: Longs, known: Longs, pages: Ints, table: Tensor) -> None:
        """Run each slot's tokens up to ``known``. ``pages`` [rows, columns] hold them all."""
        while len(rows := np.flatnonzero(known > self._filled[slots])):  # there is memory for the tokens of a step
            self._run(slots[rows], known[rows] - self._filled[slots[rows]], pages[rows], table)

    def _run(self, slots: Longs, counts: Longs, pages: Ints, table: Tensor) -> None:
        """Of each slot the next ``counts`` tokens, or as many as a step may have: those of the shortest rows first."""
        order = np.argsort(counts, kind="stable")
        counts = np.diff(np.minimum(np.cumsum(counts[order]), self._most), prepend=0)
        rows, counts = order[counts > 0], counts[counts > 0]
        slots, pages, put = slots[rows], pages[rows], self._platform.put
        starts, ends = self._filled[slots], np.cumsum(counts)
        positions = np.arange(int(ends[-1])) - np.repeat(ends - counts - starts, counts)
        owners = np.repeat(np.arange(len(rows)), counts)
        size = self._page_size
        index = pages[owners, positions // size] * np.int64(size) + positions % size
        at = put(positions)
        tokens = table[put(slots[owners]), at].to(torch.int64)
        attention = observed_rows(starts, counts, pages)
        plans = {window: self._platform.plan_attention(attention, window) for window in self._windows}
        batch = ForwardBatch(tokens, at, put(index), plans)
        states = self._model.forward(batch, self._states, self._expansion.caches)
        self._states[put(slots)] = states.index_select(0, put(ends - 1))
        self._filled[slots] = starts + counts
