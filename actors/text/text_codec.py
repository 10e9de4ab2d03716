"""TextCodec: text to token ids and back, for one model. Synchronous; the Tokenizer actor calls it in a thread."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Encoding, Tokenizer

from actors.protocol.requests import InvalidRequest
from actors.text.chat_template import check_template
from actors.text.gguf_tokenizer import GgufTokenizerError, build_tokenizer
from actors.text.model_files import ModelFiles, ModelPathError
from actors.text.token_pieces import TokenPieces
from actors.text.tokenizer_conversion import ConversionError, convert_tokenizer
from actors.text.tokenizer_growth import check_growth
from kernels.contract.errors import GgufError
from kernels.contract.model_files import read_gguf_header

__all__ = ["TextCodec", "is_request_scoped", "load_tokenizer"]

LONG_TEXT = 16384
"""Characters. Longer texts use the library's batch call, which starts a thread pool once a process and never ends
it."""

_VOCABULARIES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""Files of slow tokenizers; merges.txt and others may accompany them."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def is_request_scoped(error: BaseException) -> bool:
    """Whether an error of a codec concerns the current text only.

    A panic in the library's Rust code does, although its class is not an Exception (and cannot be imported).
    """
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def load_tokenizer(path: Path, mode: str, trusted: bool = False) -> Tokenizer:
    """The model's tokenizer: from tokenizer.json (``auto``), converted by transformers from the model's other files
    (``slow``, or without tokenizer.json), or from the GGUF file ``path``.

    ``trusted``: whether Python files beside it may run where it is converted. Raises :class:`ModelPathError` if there
    is none.
    """
    if mode == "slow":
        return _other_tokenizer(path, trusted)
    if path.is_file():
        try:
            return build_tokenizer(read_gguf_header(path).metadata)
        except (GgufError, GgufTokenizerError) as error:
            raise ModelPathError(f"{path}: {error}") from error
    file = path / "tokenizer.json"
    if file.is_file():
        check_growth(file)
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelPathError(f"{file} cannot be read as a tokenizer: {error}") from error
        tokenizer.no_padding()  # the file may choose any length
        tokenizer.no_truncation()
        return tokenizer
    return _converted(path, trusted=trusted)


def _other_tokenizer(path: Path, trusted: bool) -> Tokenizer:
    """The tokenizer of the files other than tokenizer.json."""
    if path.is_file() or not any((path / name).is_file() for name in _VOCABULARIES):
        raise ModelPathError(
            f"--tokenizer-mode slow makes the tokenizer of {', '.join(_VOCABULARIES[:-1])} or {_VOCABULARIES[-1]}, and "
            f"{path} has none of them. Leave it out."
        )
    with TemporaryDirectory(prefix="troupe-tokenizer-") as folder:  # transformers would use tokenizer.json
        for file in path.iterdir():
            if file.is_file() and file.name != "tokenizer.json":
                (Path(folder) / file.name).symlink_to(file.resolve())
        return _converted(Path(folder), named=path, trusted=trusted)


def _converted(path: Path, *, named: Path | None = None, trusted: bool) -> Tokenizer:
    """The tokenizer that transformers converts from a directory; errors name ``named`` instead of ``path``."""
    # Slow, so only for models without tokenizer.json.
    try:
        backend = convert_tokenizer(path, trusted)
    except (OSError, ConversionError) as error:
        raise ModelPathError(
            f"{named or path} has no tokenizer that can be loaded ({error}). "
            "Give --tokenizer-path a directory with tokenizer.json, or --skip-tokenizer-init and send token ids."
        ) from error
    if backend is None:
        raise ModelPathError(
            f"The tokenizer in {named or path} has no fast form. Convert it to tokenizer.json and give it as "
            "--tokenizer-path."
        )
    return backend


def _share(room: int, first: int, second: int) -> tuple[int, int]:
    """The lengths of two texts in a ``room`` of tokens: the longer one gives way until both are of one length."""
    if first + second <= room:
        return first, second
    if first > second:
        return _share(room, second, first)[::-1]
    kept = min(first, room // 2)
    return kept, room - kept


class TextCodec:
    """Encodes and decodes for one model. ``template``: its chat template, or None.

    Token ids are Python ints in ``[0, vocab_size)``; ids without a token in the tokenizer decode to an empty string.
    """

    def __init__(
        self, files: ModelFiles, *, mode: str = "auto", chat_template: str | None = None, trusted: bool = False
    ) -> None:
        """``trusted``: whether code of the model's directory may run where transformers converts its tokenizer."""
        self.tokenizer = load_tokenizer(files.tokenizer_path, mode, trusted)
        file = files.tokenizer_path / "tokenizer.json"
        self._file = file if mode != "slow" and file.is_file() else None
        self.pieces = TokenPieces(self.tokenizer)
        self._longest_token = max(map(len, self.tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self.special_tokens = self._special_tokens(files.tokenizer_config)
        self.template = files.chat_template(chat_template) or None
        if self.template is not None:
            try:
                check_template(self.template)
            except ValueError as error:
                raise ModelPathError(str(error)) from error

    @staticmethod
    def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
        result = {}
        for name in _SPECIAL_NAMES:
            value = config.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                result[name] = value
        return result

    @property
    def source(self) -> str:
        """The path of tokenizer.json, or its text where there is no such file."""
        return self.tokenizer.to_str() if self._file is None else str(self._file.resolve())

    def encode(self, prompt: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of a text; of one with more than ``max_tokens`` of them the first ones, with all special tokens.
        Raises InvalidRequest."""
        ids: list[int] = self._encoded(prompt, add_special_tokens).ids
        if max_tokens is None or len(ids) <= max_tokens:
            return ids
        if not add_special_tokens:
            return ids[:max_tokens]
        tokenizer, plain = self.tokenizer, self._encoded(prompt, False)
        plain.truncate(max(max_tokens - tokenizer.num_special_tokens_to_add(False), 0))
        shorter: list[int] = tokenizer.post_process(plain, None, True).ids
        return shorter[:max_tokens]

    def encode_pair(self, first: str, second: str, max_tokens: int | None = None) -> tuple[list[int], int]:
        """Token ids of two texts, joined as the tokenizer does for its model, and where the second one begins; 0 if the
        tokenizer does not distinguish them. If there are more than ``max_tokens`` tokens, the longer text loses its
        last ones until both have the same length. Raises InvalidRequest."""
        tokenizer, texts = self.tokenizer, (self._encoded(first, False), self._encoded(second, False))
        if max_tokens is not None:
            room = max(max_tokens - tokenizer.num_special_tokens_to_add(True), 0)
            for text, length in zip(texts, _share(room, len(texts[0].ids), len(texts[1].ids)), strict=True):
                text.truncate(length)
        encoded = tokenizer.post_process(*texts, True)
        types: list[int] = encoded.type_ids
        return encoded.ids[:max_tokens], types.index(1) if 1 in types else 0

    def _encoded(self, text: str, add_special_tokens: bool) -> Encoding:
        try:
            if len(text) <= LONG_TEXT:
                return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            # The batch call releases the GIL; the single call does not.
            return self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except TypeError:  # the library's error for lone surrogates
            raise InvalidRequest("The prompt contains a lone surrogate. Send UTF-8.", param="prompt") from None

    def mark(self, text: str) -> tuple[int, ...]:
        """The tokens of a mark: its own, if it has one."""
        result = self.tokenizer.token_to_id(text)
        return tuple(self.encode(text, add_special_tokens=False)) if result is None else (int(result),)

    def max_chars(self, tokens: int) -> int:
        """Most characters that a text of ``tokens`` tokens can have."""
        # A normalizer may make a text shorter before it is cut into tokens.
        return tokens * self._longest_token * (1 if self.tokenizer.normalizer is None else 8)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """The text of one token, special or not; U+FFFD if it is part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, possibly incomplete characters; empty for an id without a token."""
        if self.pieces.additive:
            return self.pieces.piece(token_id)
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text.encode()

    def eos_from_tokenizer(self) -> tuple[int, ...]:
        """The id of the tokenizer's eos_token, if any."""
        token = self.special_tokens.get("eos_token")
        result = self.tokenizer.token_to_id(token) if token else None
        return () if result is None else (int(result),)
