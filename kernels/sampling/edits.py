"""Edits of single logits: allowed tokens, bans, bad words, min_tokens, logit_bias, budgets of thoughts.

A slot's lists are flattened once, at admission (``SlotEdits``); those of a batch are laid end to end once for each
composition of the batch (``BatchEdits``), so a step runs the same few operations for any number of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.contract.step import SlotSampling

Put = Callable[[np.ndarray], Tensor]

__all__ = ["BatchEdits", "SlotEdits"]

_PROMPT_END = 6
"""Tokens at the end of a prompt in which a template begins or ends the thought."""


class SlotEdits:
    """The sparse part of a slot's sampling, as arrays; ids outside the vocabulary are dropped."""

    @staticmethod
    def any(sampling: SlotSampling) -> bool:
        """Whether a request may have edits: most have none."""
        return bool(
            sampling.allowed_ids
            or sampling.ban_ids
            or sampling.bad_words
            or sampling.bias_ids
            or sampling.thought_budget
            or (sampling.min_tokens > 0 and sampling.stop_ids)
        )

    def __init__(self, sampling: SlotSampling, vocab_size: int, prompt_length: int) -> None:
        words = [word for word in sampling.bad_words if word]
        self.allowed = _ids(sampling.allowed_ids, vocab_size)
        self.banned = _ids((*sampling.ban_ids, *(word[0] for word in words if len(word) == 1)), vocab_size)
        self.held = _ids(sampling.stop_ids, vocab_size) if sampling.min_tokens > 0 else _ids((), vocab_size)
        bias = dict(zip(sampling.bias_ids, sampling.bias_values, strict=True))
        self.bias_ids = _ids(tuple(bias), vocab_size)
        self.bias_values = np.array([bias[i] for i in self.bias_ids.tolist()], dtype=np.float32)
        self.words = [word for word in words if len(word) > 1 and 0 <= word[-1] < vocab_size]
        budget = sampling.thought_budget
        self.budget = budget if budget is not None and 0 <= budget.end < vocab_size else None
        self.prompt_length = prompt_length

    @property
    def masks(self) -> bool:
        """Whether some token may be masked."""
        return bool(len(self.allowed) or len(self.banned) or len(self.held) or self.reads_history)

    @property
    def reads_history(self) -> bool:
        """Whether the masks depend on tokens of the history."""
        return bool(self.words) or self.budget is not None

    def __bool__(self) -> bool:
        return self.masks or len(self.bias_ids) > 0


def _ids(ids: Sequence[int], vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    array = np.unique(np.array(ids, dtype=np.int64))
    return array[(array >= 0) & (array < vocab_size)]


class BatchEdits:
    """The edits of a batch. ``slots``: the rows with edits and their lists. ``put``: copies an array to the device."""

    def __init__(self, slots: Sequence[tuple[int, SlotEdits]], put: Put) -> None:
        self.masks = any(edits.masks for _, edits in slots)
        self._allowing = put(np.array([row for row, edits in slots if len(edits.allowed)], dtype=np.int64))
        self._allowed = _pairs([(row, edits.allowed) for row, edits in slots], put)
        self._held = _pairs([(row, edits.held) for row, edits in slots], put)
        fixed = [(row, edits.banned) for row, edits in slots]
        self._fixed = _pairs(fixed + [(row, edits.bias_ids) for row, edits in slots], put)
        bans = np.full(sum(len(ids) for _, ids in fixed), -np.inf, dtype=np.float32)
        self._fixed_values = put(np.concatenate([bans, *(edits.bias_values for _, edits in slots)]))

        words = [(row, word) for row, edits in slots for word in edits.words]
        longest = max((len(word) for _, word in words), default=1)
        before = np.full((len(words), longest - 1), -1, dtype=np.int64)  # -1 matches any token and also none
        for index, (_, word) in enumerate(words):
            before[index, longest - len(word) :] = word[:-1]
        self._word_heads = put(before)
        self._word_ends = _pairs([(row, np.array(word[-1:], dtype=np.int64)) for row, word in words], put)

        budgets = [(row, edits.prompt_length, edits.budget) for row, edits in slots if edits.budget is not None]
        numbers = [(row, start, each.tokens, each.begin, each.end) for row, start, each in budgets]
        self._budgets = put(np.array(numbers, dtype=np.int64).reshape(-1, 5))
        self._longest_thought = max((each.tokens for _, _, each in budgets), default=0)

    def allow(self, logits: Tensor) -> None:
        """Mask all but the allowed tokens, in rows with such a list."""
        if len(self._allowing) == 0:
            return
        rows, ids = self._allowed
        kept = logits[rows, ids]
        logits[self._allowing] = -torch.inf
        logits[rows, ids] = kept

    def apply(self, logits: Tensor, slots: Tensor, positions: Tensor, held_until: Tensor, history: Tensor) -> None:
        """Apply all edits to float32 ``logits`` [rows, vocab] in place.

        slots and positions int64 [rows]; held_until int64 [rows]: the position from which stop tokens may be sampled;
        history int [max_slots, context]: token ids by slot.
        """
        self.allow(logits)
        vocab = logits.shape[1]
        flat = logits.view(-1)
        rows, ids = self._fixed
        if len(rows):
            flat.index_add_(0, rows * vocab + ids, self._fixed_values)
        rows, ids = self._held
        if len(rows):
            held = positions[rows] < held_until[rows]
            flat.index_add_(0, rows * vocab + ids, _ruled_out(held))
        rows, ids = self._word_ends
        if len(rows):
            length = self._word_heads.shape[1]
            index = positions[rows, None] - length + torch.arange(length, device=logits.device)
            tail = history[slots[rows, None], index.clamp(min=0)].long()
            matches = ((tail == self._word_heads) & (index >= 0)) | (self._word_heads < 0)
            flat.index_add_(0, rows * vocab + ids, _ruled_out(matches.all(-1)))
        if len(self._budgets):
            self._end_thoughts(logits, slots, positions, history)

    def _end_thoughts(self, logits: Tensor, slots: Tensor, positions: Tensor, history: Tensor) -> None:
        """Leave the end token only where a thought has spent its budget."""
        rows, start, tokens, begin, end = self._budgets.unbind(1)
        at = positions[rows]
        longest = min(self._longest_thought, history.shape[1])
        index = start[:, None] + torch.arange(-_PROMPT_END, longest + 2, device=logits.device)
        known = (index >= 0) & (index < at[:, None])
        recent = history[slots[rows, None], index.clamp(0, history.shape[1] - 1)].long()
        in_time = known & (index <= (start + tokens)[:, None])  # so that its end is seen when it comes
        begun = (begin < 0) | ((recent == begin[:, None]) & in_time).any(-1)
        last_begin = torch.where((recent == begin[:, None]) & known, index, -1).amax(-1)
        last_end = torch.where((recent == end[:, None]) & known, index, -1).amax(-1)
        ended = last_end > last_begin  # an earlier message's thought ended before
        due = (at >= start + tokens) & begun & ~ended
        kept = logits[rows, end]
        logits[rows] = logits[rows].masked_fill(due[:, None], -torch.inf)
        logits[rows, end] = kept


def _ruled_out(where: Tensor) -> Tensor:
    """The mask to add: -inf where True, else 0."""
    return torch.zeros(where.shape, device=where.device).masked_fill_(where, -torch.inf)


def _pairs(parts: Sequence[tuple[int, np.ndarray]], put: Put) -> tuple[Tensor, Tensor]:
    """Row and id, int64 [pairs] each."""
    none = np.empty(0, dtype=np.int64)
    rows = [np.full(len(ids), row, dtype=np.int64) for row, ids in parts]
    return put(np.concatenate([none, *rows])), put(np.concatenate([none, *(ids for _, ids in parts)]))
