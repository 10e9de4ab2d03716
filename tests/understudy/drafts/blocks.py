"""The parts that the training networks share: RMSNorm, rotary attention over a given mask, and a decoder layer.

Modules are named as in Hugging Face checkpoints, so that a state dictionary is a checkpoint. Plain torch; shapes are
[batch, length, width]. Masks are boolean, true where a query sees a key.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Attention", "Layer", "RMSNorm", "Sizes", "rotation"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a layer, as config.json says them."""

    hidden: int
    inner: int
    heads: int
    groups: int
    head: int
    eps: float
    theta: float

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Sizes":
        """Read a config.json object."""
        return cls(
            config["hidden_size"],
            config["intermediate_size"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
            config["rms_norm_eps"],
            config["rope_theta"],
        )


def rotation(sizes: Sizes, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `positions` [..., length]: two float32 tensors [..., length, head]."""
    steps = torch.arange(0, sizes.head, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * sizes.theta ** -(steps / sizes.head)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, given back in the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """`x` [batch, heads, length, head]; the tables [length, head] or [batch, 1, length, head]."""
    left, right = x.chunk(2, dim=-1)
    return (x * turn[0] + torch.cat((-right, left), dim=-1) * turn[1]).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; `inputs` may be wider than the hidden size (EAGLE-3)."""

    def __init__(self, sizes: Sizes, inputs: int, head_norms: bool) -> None:
        super().__init__()
        self.sizes = sizes
        queries, keys = sizes.heads * sizes.head, sizes.groups * sizes.head
        self.q_proj = nn.Linear(inputs, queries, bias=False)
        self.k_proj = nn.Linear(inputs, keys, bias=False)
        self.v_proj = nn.Linear(inputs, keys, bias=False)
        self.o_proj = nn.Linear(queries, sizes.hidden, bias=False)
        if head_norms:
            self.q_norm = RMSNorm(sizes.head, sizes.eps)
            self.k_norm = RMSNorm(sizes.head, sizes.eps)
        self.head_norms = head_norms

    def queries(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """[batch, heads, length, head], normed and rotated."""
        q = self.q_proj(x).unflatten(-1, (self.sizes.heads, self.sizes.head))
        return _rotate((self.q_norm(q) if self.head_norms else q).transpose(1, 2), turn)

    def keys(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys, normed and rotated, and values: two [batch, groups, length, head]."""
        k = self.k_proj(x).unflatten(-1, (self.sizes.groups, self.sizes.head))
        v = self.v_proj(x).unflatten(-1, (self.sizes.groups, self.sizes.head)).transpose(1, 2)
        return _rotate((self.k_norm(k) if self.head_norms else k).transpose(1, 2), turn), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The block's output [batch, length, hidden]; without a mask attention is causal."""
        repeat = self.sizes.heads // self.sizes.groups
        k, v = (y.repeat_interleave(repeat, dim=1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.down_proj = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and feed-forward with their norms. `mix` adds both to a residual, from ready queries and keys."""

    def __init__(self, sizes: Sizes, inputs: int = 0, input_norm: bool = True, head_norms: bool = False) -> None:
        super().__init__()
        if input_norm:
            self.input_layernorm = RMSNorm(sizes.hidden, sizes.eps)
        self.self_attn = Attention(sizes, inputs or sizes.hidden, head_norms)
        self.post_attention_layernorm = RMSNorm(sizes.hidden, sizes.eps)
        self.mlp = FeedForward(sizes)

    def mix(self, residual: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The residual sum after the layer, [batch, length, hidden]."""
        residual = residual + self.self_attn.attend(q, k, v, mask)
        found: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return found
