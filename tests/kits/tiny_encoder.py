"""A tiny BERT for tests: a WordPiece tokenizer that joins pairs, and seeded weights in float32."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

__all__ = ["make_tiny_encoder", "write_pair_tokenizer"]

_TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "what is the capital of france the capital of france is paris",
    "one two three four five six seven eight nine ten again and again",
]


def make_tiny_encoder(
    directory: Path, *, labels: int = 0, words: Sequence[str] = tuple(_TEXT), deviation: float = 0.3
) -> transformers.PreTrainedModel:
    """Write a model of 64 positions into ``directory``; returns it as transformers runs it.

    ``labels``: of its head; 0: it embeds. ``words``: texts that the tokenizer is trained with. ``deviation``: of its
    matrices.
    """
    vocab = write_pair_tokenizer(directory, words)
    kind = transformers.BertForSequenceClassification if labels else transformers.BertModel
    torch.manual_seed(7)
    config = transformers.BertConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        num_labels=labels or 2,
    )
    model = kind(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, deviation)
    model.save_pretrained(directory)
    return model


def write_pair_tokenizer(directory: Path, words: Sequence[str] = tuple(_TEXT)) -> int:
    """Write a WordPiece tokenizer of the words in these texts into ``directory``; returns the size of its vocabulary.
    Texts begin with token 2 and end with 3, which also stands between the two of a pair."""
    directory.mkdir(parents=True, exist_ok=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    # Trainers of tokenizers break ties by chance: their vocabulary, and all that is trained with it, would vary.
    pieces = [*ascii_lowercase, *(f"##{letter}" for letter in ascii_lowercase), *" ".join(words).lower().split()]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys([*special, *pieces]))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]", "sep_token": "[SEP]"}))
    return tokenizer.get_vocab_size()
