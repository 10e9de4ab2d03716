"""One forward pass, as a model sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["ForwardBatch"]


@dataclass(frozen=True)
class ForwardBatch:
    """Tokens of all rows one after the other; decode rows stand first.

    ``plans``: the platform's attention plan for each window length that the model's layers have (0: all tokens).
    ``states`` [tokens, width]: what a draft model starts from beside its tokens; None for a whole model.
    """

    token_ids: Tensor  # int [tokens]
    positions: Tensor  # int64 [tokens], index in the sequence
    cache_index: Tensor  # int64 [tokens], page * page_size + offset, where keys and values go
    plans: Mapping[int, Any]
    states: Tensor | None = None
