"""Incremental detokenization of one sequence: whole characters only, and never the start of a stop.

The DecodeStream of the tokenizers library is not used. It decodes all bytes of an incomplete character again with each
token, so invalid bytes take quadratic time, and it cannot return the text that it holds back at the end.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tokenizers import Tokenizer

from actors.text.stop_patterns import StopPatterns
from actors.text.stop_strings import StopStrings
from actors.text.token_pieces import TokenPieces, TokenTexts

__all__ = ["IncrementalText"]

_REPLACEMENT = "\ufffd"
_PENDING = 16  # tokens of one unfinished character; a character has at most 4 bytes


class IncrementalText:
    """Turns token ids into text, a few at a time.

    The concatenated text, up to the first stop string, equals that of decoding all tokens at once, however they are
    split into pushes. (One exception: of byte-fallback tokens that are not UTF-8, valid characters are kept and each
    invalid run becomes one U+FFFD.) The cost of a token does not depend on the number of tokens before it.

    tokenizer: a tokenizer, or its :class:`TokenPieces` where many texts share one. stop: strings that end the text; the
    first complete one counts. patterns: regular expressions that do the same; the text loses the match, the longest
    that ends there. include_stop: whether the text includes it. skip_special_tokens: leave out special tokens
    that are not ``shown``. at_start: the tokens start a text, where SentencePiece's decoders drop a leading space;
    False keeps it, for a text that continues a prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | TokenPieces,
        *,
        stop: Sequence[str] = (),
        patterns: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown: tuple[str, ...] = (),
        at_start: bool = True,
    ) -> None:
        pieces = tokenizer if isinstance(tokenizer, TokenPieces) else TokenPieces(tokenizer)
        texts = pieces.texts(skip_special_tokens, shown)
        self._decoder: _Additive | _Windowed = (
            _Additive(pieces, texts, at_start) if pieces.additive else _Windowed(pieces, texts)
        )
        self._stops = StopStrings(stop)
        self._patterns = StopPatterns(patterns)
        self._include_stop = include_stop
        self._held = ""  # decoded and not returned yet
        self._stop: str | None = None

    def push(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        """Add tokens; returns the text that is now certain, and the stop string or pattern that ended it or None.

        After a stop every push returns no text and the same stop.
        """
        if self._stop is None:
            text = self._decoder.push(token_ids)
            if not self._held and not self._stops.longest and not self._patterns:
                return text, None
            self._take(text)
        return self._release(), self._stop

    def finish(self) -> str:
        """End the text; returns the held text: the start of an incomplete stop string, U+FFFD for an incomplete
        character."""
        if self._stop is None:
            self._take(self._decoder.flush())
        text, self._held = self._held, ""
        return text

    def restore(self, token_ids: Sequence[int], emitted_chars: int) -> None:
        """Restore the state, in a new object, after ``token_ids`` of which ``emitted_chars`` characters were returned.

        Later pushes return exactly the text after these. Raises ValueError if there is less text.
        """
        text = self._decoder.push(token_ids)
        # Only the last few returned characters can be part of a stop string; of a match, any.
        start = max(0, min(emitted_chars, len(text)) - max(0, self._stops.longest - 1))
        start = 0 if self._patterns else start
        self._take(text[start:])
        if start + len(self._held) < emitted_chars:
            raise ValueError(f"{emitted_chars} characters were returned, but the tokens have {len(text)}")
        self._held = self._held[emitted_chars - start :]

    def _take(self, text: str) -> None:
        result = self._stops.feed(text)
        end, self._stop = result if result is not None else (len(text), None)
        length = len(self._stop or "")
        match = self._patterns.feed(text[:end])
        if match is not None and (self._stop is None or match[0] < end or match[1] > length):
            end, length, self._stop = match
        self._held += text[:end]
        if self._stop is not None and not self._include_stop:
            self._held = self._held[: max(0, len(self._held) - length)]

    def _release(self) -> str:
        keep = max(self._stops.held, self._patterns.held) if self._stop is None else 0
        certain = max(0, len(self._held) - keep)
        text, self._held = self._held[:certain], self._held[certain:]
        return text


class _Additive:
    """For decoders whose text is the sum of the tokens' bytes."""

    def __init__(self, pieces: TokenPieces, texts: TokenTexts, at_start: bool) -> None:
        self._pieces = pieces
        self._texts = texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._whole = True  # whether the tokens so far end with a complete character
        self._first_token = at_start
        self._first_space = at_start and pieces.drops_first_space

    def push(self, token_ids: Sequence[int]) -> str:
        if self._whole and not (self._first_token or self._first_space):
            texts = [text for token in token_ids if (text := self._texts[token]) is not None]
            if len(texts) == len(token_ids):
                return "".join(texts)
        pieces, data = self._pieces, bytearray()
        for token in token_ids:
            if token in self._texts.skipped:
                continue
            if self._first_token and pieces.known(token):
                self._first_token = False
                data += pieces.first_piece(token)
            else:
                data += pieces.piece(token)
        text = self._utf8.decode(bytes(data))
        self._whole = not self._utf8.getstate()[0]
        return self._opened(text)

    def flush(self) -> str:
        return self._opened(self._utf8.decode(b"", final=True))

    def _opened(self, text: str) -> str:
        if self._first_space and text:
            self._first_space = False
            return text.removeprefix(" ")
        return text


class _Windowed:
    """For other decoders: decode a short window without and with the new tokens; the difference is the new text.

    The window starts with tokens that were already returned, so a decoder that joins tokens sees their context.
    """

    def __init__(self, pieces: TokenPieces, texts: TokenTexts) -> None:
        self._pieces = pieces
        self._skipped = texts.skipped
        self._before: list[int] = []
        self._new: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        parts = []
        for token in token_ids:
            if token in self._skipped or not self._pieces.known(token):
                continue
            self._new.append(token)
            text = self._difference()
            if not text or (text.endswith(_REPLACEMENT) and len(self._new) < _PENDING):
                continue
            parts.append(text)
            self._before, self._new = self._new, []
        return "".join(parts)

    def flush(self) -> str:
        text = self._difference()
        self._before, self._new = self._before + self._new, []
        return text

    def _difference(self) -> str:
        decode = self._pieces.tokenizer.decode
        before: str = decode(self._before, skip_special_tokens=False)
        both: str = decode(self._before + self._new, skip_special_tokens=False)
        return both[len(before) :]
