"""A tiny CLIP for tests: its tokenizer of single letters, and seeded weights in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = ["END", "make_tiny_clip"]

START, END = 209, 210
_TEXT = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "bos_token_id": START,
    "eos_token_id": END,
}
_IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 8,
    "image_size": 16,
}


def make_tiny_clip(directory: Path, name: str = "CLIPModel", *, projection: int = 20, **text: Any) -> Any:
    """Write a model of 77 positions into ``directory``; returns it as transformers runs it.

    ``projection``: numbers of a text's vector. ``text``: other sizes of its text encoder.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sizes = _TEXT | text
    config = (
        transformers.CLIPConfig(text_config=sizes, vision_config=dict(_IMAGES), projection_dim=projection)
        if name == "CLIPModel"
        else transformers.CLIPTextConfig(**sizes, projection_dim=projection)
    )
    torch.manual_seed(7)
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    model.save_pretrained(directory)
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    words = [*letters, *(f"{letter}</w>" for letter in letters)]
    words += [f"unused{number}" for number in range(START - len(words))]
    special = ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate([*words, *special])}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "CLIPTokenizer", "model_max_length": 77})
    )
    return model
