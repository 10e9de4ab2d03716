"""What a model of transformers' modeling code caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CodeModel", "LayerCall"]


@dataclass(frozen=True)
class LayerCall:
    """One call of attention. ``k_dim``, ``v_dim``: numbers of a key and of a value. ``window``: tokens that a query
    sees, 0 for all. ``cap``: scores are ``cap * tanh(score / cap)``, 0: they are not. ``sinks``: whether heads have a
    score of one more token, whose value is 0."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int
    cap: float
    sinks: bool

    @property
    def dim(self) -> int:
        """Numbers of a cached key and of a cached value, the shorter of which is padded."""
        return max(self.k_dim, self.v_dim)


@dataclass(frozen=True)
class CodeModel:
    """A model of transformers' modeling code, of the directory ``path`` (``kernels.models.fallback``).

    ``config``: transformers' configuration. ``layers``: the calls of attention of a pass, in order. ``base``: the
    module that makes hidden states. ``trusted``: code of the checkpoint may run. ``quantization``: of linear
    layers while they are loaded, one of ``ONLINE``; "": none. ``dummy``: weights are made up, from ``seed``.
    """

    path: str
    config: Any
    layers: tuple[LayerCall, ...]
    base: str
    trusted: bool = False
    quantization: str = ""
    dummy: bool = False
    seed: int = 0
