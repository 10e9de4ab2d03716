"""What checkpoints call the weights that a quantization scheme may keep in another form."""

from __future__ import annotations

__all__ = ["is_projection"]

_PROJECTIONS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight", "lm_head.weight")


def is_projection(name: str) -> bool:
    """Whether a tensor is a projection's weight: of attention, of a feed-forward layer, of an expert, or the output of
    the model. What chooses experts is none: it stays in floats."""
    return name.endswith(_PROJECTIONS)
