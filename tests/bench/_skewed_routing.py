"""Routing of experts by Zipf's law, for models whose made-up routers choose evenly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from kernels.core.operators import Linear
from kernels.devices.experts import ExpertLayers, Routing

__all__ = ["skewed_logits", "skewed_routing"]

_LAYERS = 61  # that begin at rows of their own
_STEP = 67  # rows between the beginnings of two layers


def skewed_logits(count: int, tokens: int, exponent: float) -> Tensor:
    """Logits float32 [tokens, experts] whose best experts are drawn without replacement, the expert of rank r with a
    weight of ``r ** -exponent``: Gumbel noise beside its logarithm (Kool et al., arXiv 1903.06059). Ranks are the
    numbers of experts, from 1 on."""
    generator = torch.Generator().manual_seed(count)
    weights = -exponent * torch.arange(1, count + 1).log()
    uniform = torch.rand(tokens, count, generator=generator).clamp_min(1e-20)
    return weights - (-uniform.log()).log()


class _SkewedRouter:
    """Runs ``router`` as it is, and returns other logits: rows of a table, from ``first`` on. So a step launches what
    it does without a skew."""

    def __init__(self, router: Linear, table: Tensor, first: int, tokens: int) -> None:
        self._router, self._table, self._first, self._tokens = router, table, first, tokens

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._router(x)
        if len(x) > self._tokens:
            raise ValueError(f"a step has {len(x)} tokens; routing is skewed for {self._tokens}")
        return self._table[self._first : self._first + len(x)].to(logits.dtype)


@contextmanager
def skewed_routing(exponent: float, tokens: int) -> Iterator[None]:
    """Layers of experts that are made inside route by Zipf's law of ``exponent``, in steps of at most ``tokens``
    tokens."""
    make_router = ExpertLayers.make_router
    tables: dict[tuple[int, bool], Tensor] = {}
    layers = 0

    def skewed(
        self: ExpertLayers, router: Tensor, bias: Tensor | None, routing: Routing, shared: bool = False
    ) -> Linear:
        nonlocal layers
        key = len(router), routing.is_plain  # others have logits in float32
        if key not in tables:
            table = skewed_logits(len(router), tokens + _LAYERS * _STEP, exponent)
            tables[key] = table.to(router.device, router.dtype if routing.is_plain else torch.float32)
        layers += 1
        made = make_router(self, router, bias, routing, shared)
        return _SkewedRouter(made, tables[key], layers % _LAYERS * _STEP, tokens)

    with mock.patch.object(ExpertLayers, "make_router", skewed):
        yield
