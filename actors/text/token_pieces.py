"""TokenPieces: the bytes that each token of a tokenizer adds to a text.

Byte-level BPE (Radford et al. 2019), byte fallback (SentencePiece, Kudo and Richardson 2018) and Metaspace decoders
concatenate the bytes of their tokens, so a text can grow by a token without decoding anything twice. Other decoders
have no such pieces.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from tokenizers import Tokenizer

__all__ = ["TokenPieces", "TokenTexts"]


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's character for each byte: itself if it is printable, otherwise 256 and up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


class TokenPieces:
    """The pieces of one tokenizer, shared by all texts.

    ``additive``: whether a text is the concatenation of pieces; otherwise :meth:`piece` must not be called.
    ``drops_first_space``: whether a space at the start of a text is dropped. ``drops_first_marks``: whether all spaces
    of its first token are dropped.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self.drops_first_space = False
        self.drops_first_marks = False
        self._spaces: dict[str, str] = {}
        self._byte_level = False
        self._byte_fallback = False
        self.additive = self._read(_steps(tokenizer))
        self._pieces: dict[int, bytes | None] = {}
        self._texts: dict[tuple[bool, tuple[str, ...]], TokenTexts] = {}

    def _read(self, steps: list[dict[str, Any]]) -> bool:
        """Read the decoder's steps; returns whether it is additive."""
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            self._byte_level = True
            return True
        if kinds == ["Metaspace"]:
            self._spaces = {steps[0]["replacement"]: " "}
            self.drops_first_marks = steps[0].get("prepend_scheme", "always") != "never"
            return True
        if kinds[:2] == ["Replace", "ByteFallback"] and kinds[2:] in ([], ["Fuse"], ["Fuse", "Strip"]):
            pattern = steps[0]["pattern"].get("String")
            if not pattern or (kinds[3:] and (steps[3]["content"], steps[3]["start"], steps[3]["stop"]) != (" ", 1, 0)):
                return False
            self._spaces = {pattern: steps[0]["content"]}
            self._byte_fallback = True
            self.drops_first_space = bool(kinds[3:])
            return True
        return False

    def known(self, token_id: int) -> bool:
        """Whether the id has a token. Models pad their vocabulary with unused ids."""
        if token_id not in self._pieces:
            self._pieces[token_id] = self._make(token_id)
        return self._pieces[token_id] is not None

    def piece(self, token_id: int) -> bytes:
        """The bytes of a token, possibly incomplete characters; empty for an id without a token."""
        return (self._pieces[token_id] or b"") if self.known(token_id) else b""

    def texts(self, skip_special_tokens: bool, shown: tuple[str, ...] = ()) -> TokenTexts:
        """The text that each token adds after whole characters. ``shown``: special tokens that are not skipped."""
        key = skip_special_tokens, shown
        if key not in self._texts:
            skipped = self.special if skip_special_tokens else frozenset[int]()
            self._texts[key] = TokenTexts(self, skipped - {self.tokenizer.token_to_id(token) for token in shown})
        return self._texts[key]

    def first_piece(self, token_id: int) -> bytes:
        """The bytes of a token at the start of a text."""
        token = self.tokenizer.id_to_token(token_id)
        if self.drops_first_marks and token is not None:
            for mark in self._spaces:
                token = token.replace(mark, "")
            return token.encode()
        return self.piece(token_id)

    def _make(self, token_id: int) -> bytes | None:
        token: str | None = self.tokenizer.id_to_token(token_id)
        if token is None:
            return None
        if self._byte_level:
            # A token with a character outside the alphabet is an added token: its text is literal.
            return bytes(_BYTE_OF[c] for c in token) if all(c in _BYTE_OF for c in token) else token.encode()
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        for mark, space in self._spaces.items():
            token = token.replace(mark, space)
        return token.encode()


class TokenTexts(dict[int, str | None]):
    """The text of each id; None if it is not whole characters, empty for ``skipped`` ids. Filled on demand."""

    def __init__(self, pieces: TokenPieces, skipped: frozenset[int]) -> None:
        self._pieces = pieces
        self.skipped = skipped

    def __missing__(self, token_id: int) -> str | None:
        text: str | None = None
        with contextlib.suppress(UnicodeDecodeError):
            text = "" if token_id in self.skipped else self._pieces.piece(token_id).decode()
        self[token_id] = text
        return text


def _steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The tokenizer's decoder as a list of steps in JSON form."""
    decoder: Any = tokenizer.decoder
    if decoder is None:
        return []
    state: dict[str, Any] = json.loads(decoder.__getstate__())  # the state is the JSON of tokenizer.json
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]
