"""A tokenizer of a few hundred tokens."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["CORPUS", "SPECIAL", "byte_level"]

CORPUS = [
    "The capital of France is Paris. The capital of Japan is Tokyo.",
    "caf\u00e9 na\u00efve \u4f60\u597d \u4f60\u597d \U0001f600\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467"
    " stop STOP",
    "a b  c\n\n\tdef x() { return '\u20ac'; } " * 3,
]
SPECIAL = ["<s>", "<|end|>"]


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False),
    )
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("\u00e9t\u00e9 \u597d", special=False)])
    return tokenizer
