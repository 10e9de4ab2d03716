"""MiniCPM3 (OpenBMB, arXiv 2404.06395 and https://huggingface.co/openbmb/MiniCPM3-4B): latent attention and plain
feed-forward layers, with multipliers of embeddings, residual stream and logits.
"""

from __future__ import annotations

import dataclasses

from kernels.models import deepseek_v3
from kernels.models.config import ConfigReader, ModelConfig

__all__ = ["build", "caches", "config", "tensors"]

tensors, caches, build = deepseek_v3.tensors, deepseek_v3.caches, deepseek_v3.build


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    plain = raw.latent_decoder(rope_interleaved=False)
    depth = raw.raw.get("scale_depth", 1.4)
    return dataclasses.replace(
        plain,
        embedding_scale=raw.number("scale_emb", 12.0),
        residual_scale=1.0 if depth is None else raw.number("scale_depth", 1.4) / plain.layers**0.5,
        logit_scale=raw.size("dim_model_base", 256) / plain.hidden_size,
    )
