"""Text to token ids and back, for one model. Synchronous; the Tokenizer actor calls it in a thread of its own."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer

from actors.chat_template import check_template
from actors.gguf_tokenizer import GgufTokenizerError, build_tokenizer
from actors.model_files import ModelFiles, ModelPathError
from actors.requests import InvalidRequest
from actors.token_pieces import TokenPieces
from kernels.gguf.header import GgufError, read_header

__all__ = ["TextCodec", "is_request_scoped", "load_tokenizer"]

LONG_TEXT = 16384
"""Characters. Longer texts are encoded by the library's batch call, which starts its own pool of threads, once a
process,
that the library never ends."""

_VOCABULARIES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""Files that tokenizers of Python are made of; merges.txt and others come beside them."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def is_request_scoped(error: BaseException) -> bool:
    """Whether what a codec raised is a matter of the text in hand, and no reason to end anything else.

    A panic in the library's Rust code is one, though its class is no Exception (and cannot be imported).
    """
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def load_tokenizer(path: Path, mode: str) -> Tokenizer:
    """The model's tokenizer: tokenizer.json as it is (``auto``), or made by transformers of the model's other files
    (``slow``, or no such file); where ``path`` is a GGUF file, the one that it holds.

    Raises :class:`ModelPathError` when there is none.
    """
    if mode == "slow":
        return _other_tokenizer(path)
    if path.is_file():
        try:
            return build_tokenizer(read_header(path).metadata)
        except (GgufError, GgufTokenizerError) as error:
            raise ModelPathError(f"{path}: {error}") from error
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelPathError(f"{file} cannot be read as a tokenizer: {error}") from error
    return _converted(path)


def _other_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer that the files beside tokenizer.json say."""
    if path.is_file() or not any((path / name).is_file() for name in _VOCABULARIES):
        raise ModelPathError(
            f"--tokenizer-mode slow makes the tokenizer of {', '.join(_VOCABULARIES[:-1])} or {_VOCABULARIES[-1]}, and "
            f"{path} has none of them. Leave it out."
        )
    with TemporaryDirectory(prefix="troupe-tokenizer-") as folder:  # transformers takes a tokenizer.json that it sees
        for file in path.iterdir():
            if file.is_file() and file.name != "tokenizer.json":
                (Path(folder) / file.name).symlink_to(file.resolve())
        return _converted(Path(folder), named=path)


def _converted(path: Path, *, named: Path | None = None) -> Tokenizer:
    """What transformers makes of a directory; errors name ``named`` instead of ``path``."""
    # Slow to import, so only where it is needed: models that ship no tokenizer.json.
    try:
        from transformers import AutoTokenizer

        loaded: Any = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelPathError(
            f"{named or path} has no tokenizer that can be loaded ({type(error).__name__}: {error}). "
            "Give --tokenizer-path a directory with tokenizer.json, or --skip-tokenizer-init and send token ids."
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ModelPathError(
            f"The tokenizer in {named or path} has no fast form. Convert it to tokenizer.json and give it as "
            "--tokenizer-path."
        )
    return backend


class TextCodec:
    """Encodes and decodes for one model, and knows its chat template (``template``; None without one).

    Token ids are Python ints in ``[0, vocab_size)``; ids without a token in the tokenizer decode to an empty string.
    """

    def __init__(self, files: ModelFiles, *, mode: str = "auto", chat_template: str | None = None) -> None:
        self.tokenizer = load_tokenizer(files.tokenizer_path, mode)
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
        found = {}
        for name in _SPECIAL_NAMES:
            value = config.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[name] = value
        return found

    def encode(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises InvalidRequest."""
        try:
            if len(prompt) > LONG_TEXT:
                # The batch call lets other threads run meanwhile; the single one holds the interpreter to its end.
                [encoded] = self.tokenizer.encode_batch_fast([prompt], add_special_tokens=add_special_tokens)
            else:
                encoded = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            ids: list[int] = encoded.ids
        except TypeError:  # what the library says of a str that is not Unicode text
            raise InvalidRequest(
                "The prompt holds half a surrogate pair, which no text contains. Send UTF-8.", param="prompt"
            ) from None
        return ids

    def most_chars(self, tokens: int) -> int:
        """No text with more characters can have as few as ``tokens`` tokens."""
        # A normalizer may make a text shorter before it is cut into tokens.
        return tokens * self._longest_token * (1 if self.tokenizer.normalizer is None else 8)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """One token's own text, special tokens included, U+FFFD where it is part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes, which need not be whole characters; empty for an id without a token."""
        if self.pieces.additive:
            return self.pieces.piece(token_id)
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text.encode()

    def eos_from_tokenizer(self) -> tuple[int, ...]:
        """The id of the tokenizer's own eos_token, if it has one."""
        token = self.special_tokens.get("eos_token")
        found = self.tokenizer.token_to_id(token) if token else None
        return () if found is None else (int(found),)
