"""Operators on each token by itself: norms, activations, sums and tables of embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.core.batch import ForwardBatch
from kernels.core.operators import Linear, Norm, PendingResidual

__all__ = ["ACTIVATIONS", "BiasedNorm", "Elementwise", "LayerNorm", "PositionAngles", "TokenEmbedding", "TorchNorm"]


class TokenEmbedding(Protocol):
    """Token ids int [tokens] -> their embeddings [tokens, hidden]."""

    @property
    def table(self) -> Tensor | None:
        """[vocab, hidden] if it is dense and whole, for kernels that look up rows themselves; else None."""
        ...

    def __call__(self, ids: Tensor) -> Tensor: ...


class PositionAngles(Protocol):
    """Positions int64 [tokens] -> cosines and sines, each [tokens, 1, head_dim] in ``dtype``.

    ``frequencies`` float32 [head_dim]: radians per token. ``scale``: the factor on cosines and sines.
    """

    frequencies: Tensor
    scale: float
    dtype: torch.dtype

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]: ...


class TorchNorm:
    """``weight * x / sqrt(mean(x^2) + eps)`` in float32, in plain torch. ``weight`` as ``Elementwise.make_norm``."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight.float()
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """As ``Norm.add``."""
        residual = residual.add_(x)
        return self(residual), residual


class LayerNorm:
    """``weight * (x - mean(x)) / sqrt(var(x) + eps) + bias`` over the last dimension, in float32 (Ba et al., arXiv
    1607.06450). ``weight``, ``bias``: [dim], or [heads, dim]; without a bias nothing is added."""

    def __init__(self, elementwise: Elementwise, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weight.float(), None if bias is None else bias.float(), eps
        self._run = elementwise.compose(self._normed, lambda x: x)

    def __call__(self, x: Tensor) -> Tensor:
        """As ``Norm``."""
        return self._run(x)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """As ``Norm.add``."""
        total = residual.add_(x)
        return self._run(total), total

    def _normed(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps) * self.weight
        return (normed if self.bias is None else normed + self.bias).to(x.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square_(),
}
"""By the names of ``Elementwise.activate``."""


class Elementwise:
    """Operators on each token by itself, in plain torch; a device replaces those that it has kernels for.

    ``float_weights``: whether a norm's weight may be float32 in a model of another dtype. ``norms_views``: whether rows
    that a norm reads may be apart.
    """

    float_weights: bool = True
    norms_views: bool = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def make_norm(self, weight: Tensor, eps: float) -> Norm:
        """Root mean square norm over the last dimension (Zhang and Sennrich, arXiv 1910.07467), in float32 inside.

        ``weight`` has the input's last dimension, or its last two: a weight for each head.
        """
        return TorchNorm(weight, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``x`` [tokens, 2 * n] = gate | up -> [tokens, n]. May overwrite ``x``."""
        half = x.shape[-1] // 2
        return F.silu(x[:, :half]).mul_(x[:, half:])

    def activate(self, linear: Linear, activation: str) -> Linear:
        """``linear``, then an ``activation``: silu, gelu, gelu_tanh or quick_gelu (Hendrycks and Gimpel, arXiv
        1606.08415), relu or relu2 (So et al., arXiv 2109.08668)."""
        function = ACTIVATIONS[activation]
        return self.compose(lambda x: function(linear(x)), lambda x: x)

    def activate_and_mul(self, linear: Linear, activation: str) -> Linear:
        """``activation(gate) * up`` of what ``linear`` gives, gate | up."""
        function = ACTIVATIONS[activation]

        def gated(x: Tensor) -> Tensor:
            gate, up = linear(x).chunk(2, -1)
            return function(gate) * up

        return self.compose(gated, lambda x: x)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """The rows ``ids`` int [tokens] of ``table`` [vocab, hidden]."""
        return F.embedding(ids, table)

    def compose(self, first: Linear, then: Linear) -> Linear:
        """``then(first(x))``, where ``first`` consists of torch's operators.

        A model calls torch itself only within ``first``, or behind it in the same layer: a CPU records a decode into a
        program of native operators, in which a call of torch's would be missing. Here it ends the recording, and such
        decodes run without a program.
        """
        return lambda x: then(first(x))

    def without_program(self) -> Linear:
        """The identity, by which a layer says that it calls torch's operators: as ``compose``."""
        return self.compose(lambda x: x, lambda x: x)

    def empty_rows(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[rows, width] for ``add_rows`` to write to."""
        return torch.empty((rows, width), dtype=dtype, device=self.torch_device)

    def add_rows(self, x: Tensor, y: Tensor | None, out: Tensor) -> None:
        """``out`` = ``x`` + ``y``, or a copy of ``x``, all [tokens, width]; ``out`` may be a part of another tensor."""
        if y is None:
            out.copy_(x)
        else:
            torch.add(x, y, out=out)

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        """``x`` [tokens, dim] + ``bias`` [dim]. Overwrites ``x``."""
        return x.add_(bias)

    def add_weighted(self, x: Tensor, y: Tensor, logits: Tensor) -> Tensor:
        """``x + sigmoid(logits) * y`` of [tokens, hidden] and ``logits`` [tokens, 1]. May overwrite ``x``."""
        return torch.addcmul(x, y, logits.sigmoid())

    def add_pending(self, x: PendingResidual, residual: Tensor) -> Tensor:
        """The residual stream with its pending summand; ``residual`` itself if nothing is pending."""
        if not isinstance(x, Tensor):
            return residual
        rows, width = residual.shape
        total = self.empty_rows(rows, width, residual.dtype)
        self.add_rows(x, residual, total)
        return total

    def write_stream(self, x: PendingResidual, residual: Tensor, out: Tensor) -> None:
        """``out`` = the residual stream with its pending summand, as ``add_rows`` writes it."""
        self.add_rows(residual, x if isinstance(x, Tensor) else None, out)

    def norm_pair(self, first: Tensor, first_norm: Norm, second: Tensor, second_norm: Norm) -> Tensor:
        """[tokens, a] and [tokens, b], each normed -> side by side [tokens, a + b]."""
        first, second = first_norm(first), second_norm(second)
        width = first.shape[1]
        both = self.empty_rows(len(first), width + second.shape[1], first.dtype)
        self.add_rows(first, None, both[:, :width])
        self.add_rows(second, None, both[:, width:])
        return both

    def norm_embeddings_and_states(
        self,
        embed: TokenEmbedding,
        token_norm: Norm,
        states: Tensor,
        state_norm: Norm,
        angles: PositionAngles,
        batch: ForwardBatch,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The beginning of a pass over tokens and states: ``norm_pair`` of the tokens' embeddings and the ``states``
        [tokens, hidden], and the cosines and sines of the tokens' positions."""
        cos, sin = angles(batch.positions)
        return self.norm_pair(embed(batch.token_ids), token_norm, states, state_norm), cos, sin


class BiasedNorm:
    """``norm(x) + bias``, ``bias`` [dim] in the model's dtype, as ModelSlim's correction of outliers leaves it. The
    residual stays without the bias."""

    def __init__(self, elementwise: Elementwise, norm: Norm, bias: Tensor) -> None:
        self._add_bias = elementwise.add_bias
        self.norm = norm
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """As ``Norm``."""
        return self._add_bias(self.norm(x), self.bias)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """As ``Norm.add``."""
        normed, total = self.norm.add(x, residual)
        return self._add_bias(normed, self.bias), total
