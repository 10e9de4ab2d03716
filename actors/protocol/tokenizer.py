"""The tokenizer turns text into token ids and back."""

from __future__ import annotations

import msgspec

from actors.runtime import Message

__all__ = [
    "Decode",
    "DecodeTokens",
    "Encode",
    "Encoded",
    "TokenizerProtocol",
]


class TokenizerProtocol:
    """Encodes and decodes."""


class Encoded(msgspec.Struct, frozen=True):
    """Token ids of a prompt. ``second``: index of the first token of a pair's second text; 0 for a single text and
    for a model without token types. ``seconds``: time of the encoding, without the wait for it."""

    token_ids: list[int]
    second: int = 0
    seconds: float = 0.0


class Encode(Message[TokenizerProtocol, Encoded], frozen=True):
    """A text becomes token ids, or a pair of texts, ``prompt`` and ``pair``; at most ``max_tokens`` of them."""

    prompt: str
    pair: str | None = None
    add_special_tokens: bool = True
    max_tokens: int | None = None


class Decode(Message[TokenizerProtocol, str], frozen=True):
    token_ids: list[int]
    skip_special_tokens: bool = True


class DecodeTokens(Message[TokenizerProtocol, list[str]], frozen=True):
    """Each token's own text."""

    token_ids: list[int]
