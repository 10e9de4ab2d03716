"""The attention that transformers' modeling code calls, by its registry of implementations.

A model calls it once for each layer that attends, always in the same order: the n-th call of a pass belongs to the n-th
cache. ``PROBE`` records the calls of a pass without weights; ``PAGED`` runs them over the paged cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.contract.errors import ConfigError

__all__ = ["PAGED", "PROBE", "Call", "MaskRule", "Refused", "current", "register", "running"]

PAGED = "troupe"
PROBE = "troupe_probe"


class MaskRule:
    """Stands for the mask of a pass. Code that computes with the mask itself is refused."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __getattr__(self, name: str) -> Any:
        raise Refused("its attention computes with the mask itself")

    def __getitem__(self, index: Any) -> Any:
        return self.__getattr__("")

    __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __rand__ = __getitem__

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """bool: whether positions ``queries`` see positions ``keys``, int64 of shapes that broadcast."""
        zero = torch.zeros((), dtype=torch.int64)
        try:
            result = torch.as_tensor(self._function(zero, zero, queries, keys), dtype=torch.bool)
        except RuntimeError as error:  # it reads tensors of the pass, which have no values
            raise Refused("its mask is neither causal nor a sliding window") from error
        return result.expand(torch.broadcast_shapes(queries.shape, keys.shape))


@dataclass(frozen=True)
class Call:
    """One call of attention. ``queries``, ``keys``, ``values``: [1, heads, tokens, dim]. ``sinks`` [heads]: logits that
    take part in the softmax alone."""

    module: Any
    queries: Tensor
    keys: Tensor
    values: Tensor
    mask: Any
    scale: float
    window: int
    cap: float
    sinks: Tensor | None
    others: tuple[str, ...]
    """Arguments with an effect that is not known here."""


class Refused(ConfigError):
    """A model's code cannot run over the paged cache."""


Run = Callable[[Call], Tensor]
"""-> [1, tokens, heads, dim]"""

current: ContextVar[Run] = ContextVar("current")


@contextmanager
def running(run: Run) -> Iterator[None]:
    """Let ``run`` answer the calls of the models that this thread runs."""
    token = current.set(run)
    try:
        yield
    finally:
        current.reset(token)


_HARMLESS = frozenset(
    (
        "dropout",
        "is_causal",
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "cache_position",
        "logits_to_keep",
        "layer_idx",
        "head_mask",
        "position_embeddings",
        "target_dtype",
        "implementation",
        "deterministic",
        "num_items_in_batch",
        "token_type_ids",
        "mm_token_type_ids",
        "training",
    )
)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    call = Call(
        module,
        query,
        key,
        value,
        attention_mask,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        softcap or 0.0,
        s_aux,
        tuple(sorted(name for name, value in others.items() if value is not None and name not in _HARMLESS)),
    )
    return current.get()(call), None


def _probe_mask(*_: Any, mask_function: Callable[..., Any], **__: Any) -> MaskRule:
    return MaskRule(mask_function)


def register() -> None:
    """Add both implementations to transformers' registry. Masks are made for ``PROBE`` only."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name in (PAGED, PROBE):
        AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(PROBE, _probe_mask)
