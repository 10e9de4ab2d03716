"""OLMo 3 (OLMo Team, https://allenai.org/blog/olmo3): OLMo 2's decoder, of which three of four layers see a sliding
window. Only the fourth stretches its rotation to longer contexts.
"""

from __future__ import annotations

import dataclasses

from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.olmo2 import build, caches, tensors

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    bias, theta = raw.flag("attention_bias"), raw.number("rope_theta", 500000.0)
    plain = raw.decoder(qkv_bias=bias, output_bias=bias, windows=raw.patterned_windows(4), eps=1e-5, theta=theta)
    local = raw.local_rope(plain.head_dim, theta)
    return dataclasses.replace(plain, ropes={layer: local for layer, window in enumerate(plain.windows) if window})
