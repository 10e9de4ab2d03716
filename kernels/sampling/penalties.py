"""Repetition, frequency and presence penalties.

Repetition: Keskar et al., "CTRL", 2019, section 4.1 (a positive logit is divided, a negative one multiplied). Frequency
and presence: OpenAI's API reference. Everything is computed from the token history on the device: there are no counts
by slot to keep or restore, and no cost without penalties.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_penalties"]

_CHUNK = 1 << 24  # elements of a temporary


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    history: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    counted: bool,
) -> None:
    """Apply the three penalties to the ``rows`` int64 [n] of float32 ``logits`` [all rows, vocab], in place.

    history int [n, width]: token ids, of which the first ``lengths`` int64 [n] are known (at least 1) and those from
    ``prompt_lengths`` int64 [n] on are output. Repetition counts all of them, frequency and presence only the output.
    The factors are float32 [n]. ``counted``: whether any frequency or presence is not 0.
    """
    vocab, width = logits.shape[1], history.shape[1]
    flat = logits.view(-1)
    step = max(1, _CHUNK // (vocab if counted else width))
    place = torch.arange(width, device=logits.device)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        known = place < lengths[part, None]
        # Padding repeats the first token, which is written again with the same value.
        ids = torch.where(known, history[part], history[part, :1]).long()
        where = rows[part, None] * vocab + ids
        values = flat[where]
        factor = repetition[part, None]
        values = torch.where(values > 0, values / factor, values * factor)
        if counted:
            is_output = (known & (place >= prompt_lengths[part, None])).float()
            table = torch.zeros((len(ids), vocab), device=logits.device).scatter_add_(1, ids, is_output)
            count = table.gather(1, ids)
            values -= frequency[part, None] * count + presence[part, None] * (count > 0)
        flat[where] = values
