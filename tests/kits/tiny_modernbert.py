"""A tiny ModernBERT for tests: a trained WordPiece tokenizer that joins pairs, and seeded weights in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.kits.tiny_encoder import write_pair_tokenizer

__all__ = ["make_tiny_modernbert"]


def make_tiny_modernbert(directory: Path, *, labels: int = 0, kind: str = "", **sizes: Any) -> Any:
    """Write a model of 1,024 positions into ``directory``; returns it as transformers runs it. Two of its five layers
    attend to all tokens, the others to 8 on each side.

    ``labels``: of its head; 0: it embeds. ``kind``: the class, if it is another. ``sizes``: others of its config.
    """
    vocab = write_pair_tokenizer(directory)
    options = {
        "vocab_size": vocab,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "local_attention": 16,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "num_labels": labels or 2,
    }
    torch.manual_seed(7)
    name = kind or ("ModernBertForSequenceClassification" if labels else "ModernBertModel")
    model = getattr(transformers, name)(transformers.ModernBertConfig(**options | sizes)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3 if parameter.ndim == 1 else 0.15)
    model.save_pretrained(directory)
    return model
