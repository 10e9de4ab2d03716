"""A tiny BERT for tests: a trained WordPiece tokenizer that joins pairs, and seeded weights in float32."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

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
    """Train a WordPiece tokenizer with these texts and write it into ``directory``; returns the size of its vocabulary.
    Texts begin with token 2 and end with 3, which also stands between the two of a pair."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        [*words] * 4, trainers.WordPieceTrainer(vocab_size=160, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]", "sep_token": "[SEP]"}))
    return tokenizer.get_vocab_size()
